"""Compile choice: compiles a model's layers with torch, if requested, and proves the result.

Before a compiled model serves, two sequences are computed with and without compiling: in chunks,
token by token, in a batch and alone, which also compiles all code that such steps need. If logits
differ, or the compiler cannot trace a whole layer, the service does not start, since compiling was
requested explicitly.

A layer's forward is divided at our hooks, which run uncompiled: at its rotary embedding, its cache
and its attention. The pieces between them are compiled once for all layers of a kind, for any
number of tokens. torch's compiler is imported only where it is used, as the import takes seconds.
"""

import shutil
from typing import Any, Literal

import structlog
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from inference_svc.runtime.calibration.kernels import is_gpu, reason_of
from inference_svc.runtime.calibration.proof import new_pool
from inference_svc.runtime.calibration.stock import is_same, logits_distance
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.model.capture import leave_out_of_compiling
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.packed_linear import packed_bytes
from inference_svc.runtime.positions.recipes import Calibration
from shared.types.errors import ConfigError

CompileName = Literal["off", "layers"]
# Tokens of the two sequences in each step; 0: the step is without that sequence.
STEPS = ((9, 0), (5, 7), (1, 1), (1, 0), (0, 1), (3, 1), (0, 4))
OUR_BREAK = "torch.compiler.disable"  # in the compiler's reason for a graph that ends at our hook

log = structlog.get_logger()


def choose_compiling(
    name: CompileName, loaded: LoadedModel, calibration: Calibration, backend: str = "inductor"
) -> None:
    """Compile the model's layers, if requested; to be called on the thread that will run them.

    Args:
        name: "layers", or "off" to leave them uncompiled.
        loaded: the model, set to the attention of the calibration's mode.
        calibration: the model's calibration.
        backend: torch's name of the compiler back-end.

    Raises:
        ConfigError: the layers cannot be compiled, or give other logits when compiled.
    """
    if name == "off":
        return
    reason, remedy = _why_unsupported(loaded, calibration, backend)
    if not reason:
        remedy = "set it to off"
        reason = _compile_and_prove(loaded, calibration, backend)
    if reason:
        raise ConfigError(f"model.compile = layers cannot be used: {reason}", remedy)
    log.info("layers_compiled", layers=len(layers_of(loaded.model)))


def _why_unsupported(
    loaded: LoadedModel, calibration: Calibration, backend: str
) -> tuple[str, str]:
    """Return why layers cannot be compiled here, and the remedy; ("", ""): they can."""
    if calibration.mode != "ragged":
        return (
            f"the model runs in mode {calibration.mode}, which cannot be compiled",
            "set it to off",
        )
    if not layers_of(loaded.model):
        return "the layers of the model are not of Transformers' own kind", "set it to off"
    if packed_bytes(loaded.model):
        reason = "the weights are packed, which the compiler does not support"
        return reason, "set model.packed_weights to off"
    has_compiler = any(map(shutil.which, ("g++", "clang++", "c++")))
    if backend == "inductor" and not is_gpu(loaded.device) and not has_compiler:
        return "there is no C++ compiler", "install g++, or set it to off"
    return "", ""


def _compile_and_prove(loaded: LoadedModel, calibration: Calibration, backend: str) -> str:
    """Compile the layers; if they must not serve, undo that and return the reason; else ""."""
    expected = _logits(loaded, calibration)
    compile_layers(loaded.model, backend)
    try:
        logits = _logits(loaded, calibration)
        breaks = unexpected_breaks()
        if breaks:
            reason = f"the compiler cannot trace a layer: {breaks[0][:160]}"
        elif is_same(logits, expected, loaded.dtype, calibration.rounding):
            return ""
        else:
            distance = logits_distance(logits, expected, loaded.dtype)
            reason = f"its logits differ from those before by {distance:.1e}"
    except Exception as error:  # noqa: BLE001 - compilers may raise anything
        reason = reason_of(error)
    undo_compiling(loaded.model)
    return reason


def _logits(loaded: LoadedModel, calibration: Calibration) -> Tensor:
    """Compute two sequences step by step; return [n, vocab]."""
    num_tokens = sum(map(sum, STEPS))
    pool = new_pool(loaded, calibration, 3 * num_tokens)
    runner = ModelRunner(loaded, calibration)
    sequences = [pool.new_kv(num_tokens) for _ in range(2)]
    buffer = pool.new_write_buffer(0, num_tokens)
    logits = []
    for sizes in STEPS:
        chunks = [
            Chunk(
                kv,
                [(37 * (kv.num_tokens + i) + 11) % loaded.vocab_size for i in range(size)],
                want_logits=True,
                write_buffer=buffer if kv is sequences[0] else None,
            )
            for kv, size in zip(sequences, sizes, strict=True)
            if size
        ]
        logits.append(runner.step(chunks))
    return torch.cat(logits)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's layers: all modules of Transformers' layer class."""
    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Set a model's layers to be compiled when they run next.

    Args:
        model: the model, with our hooks installed; no other thread runs it.
        backend: torch's name of the compiler back-end.
    """
    import torch._dynamo as compiler

    leave_out_of_compiling(torch.compiler.disable)
    # Layers differ in their index only: as an argument, all of them can share the compiled code.
    compiler.config.allow_unspec_int_on_nn_module = True
    compiler.utils.counters.clear()
    for layer in layers_of(model):
        layer.compile(dynamic=True, backend=backend)


def undo_compiling(model: nn.Module) -> None:
    """Undo `compile_layers`."""
    for layer in layers_of(model):
        layer._compiled_call_impl = None  # noqa: SLF001 - torch has no public function for it


def unexpected_breaks() -> list[str]:
    """Return the reasons for graph breaks since `compile_layers`, without those at our hooks."""
    import torch._dynamo as compiler

    counted: dict[str, Any] = compiler.utils.counters["graph_break"]
    return [reason.splitlines()[0] for reason in counted if OUR_BREAK not in reason]
