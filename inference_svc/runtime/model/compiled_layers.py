"""Layers of a model compiled by torch, between our hooks: these run in Python as ever.

A layer's forward falls into pieces at its rotary embedding, its cache and its attention. What is
between them is compiled once for all layers of a kind, for any number of tokens. torch's compiler
is imported only where it is used: that alone takes seconds.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from inference_svc.runtime.model.capture import leave_out_of_compiling

OUR_BREAK = "torch.compiler.disable"  # in why a graph has ended: there is a hook of ours


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return what Transformers knows as a model's layers."""
    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Have a model's layers compiled when they are run next.

    Args:
        model: with our hooks; no other thread runs it.
        backend: torch's name of what makes kernels.
    """
    import torch._dynamo as compiler

    leave_out_of_compiling(torch.compiler.disable)
    # Layers differ in their number: it is to be an argument of what they have in common.
    compiler.config.allow_unspec_int_on_nn_module = True
    compiler.utils.counters.clear()
    for layer in layers_of(model):
        layer.compile(dynamic=True, backend=backend)


def compute_as_before(model: nn.Module) -> None:
    """Undo `compile_layers`."""
    for layer in layers_of(model):
        layer._compiled_call_impl = None  # noqa: SLF001 - there is no other way back


def other_breaks() -> list[str]:
    """Return why graphs have ended since `compile_layers`, but at our hooks."""
    import torch._dynamo as compiler

    counted: dict[str, Any] = compiler.utils.counters["graph_break"]
    return [reason.splitlines()[0] for reason in counted if OUR_BREAK not in reason]
