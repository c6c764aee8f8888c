"""Has torch compile a model's layers, if that is asked for, and proves what comes of it.

Before it serves, two sequences are computed both ways: in chunks, token by token, beside each other
and alone, which also compiles whatever such steps need. If logits differ, or the compiler cannot
see through a layer, the service does not start: nobody asked for a part of it.

A layer's forward falls into pieces at our hooks, which run in Python as ever: at its rotary
embedding, its cache and its attention. What is between them is compiled once for all layers of a
kind, for any number of tokens. torch's compiler is imported only where it is used: that alone takes
seconds.
"""

import shutil
from typing import Any, Literal

import structlog
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from inference_svc.runtime.calibration.attention_choice import is_gpu, reason_of
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
# How many tokens each of two sequences gets in a step; 0: the step is without it.
STEPS = ((9, 0), (5, 7), (1, 1), (1, 0), (0, 1), (3, 1), (0, 4))
OUR_BREAK = "torch.compiler.disable"  # in why a graph has ended: there is a hook of ours

log = structlog.get_logger()


def choose_compiling(
    name: CompileName, loaded: LoadedModel, calibration: Calibration, backend: str = "inductor"
) -> None:
    """Compile the model's layers, where that is asked for: on the thread that is to run them.

    Args:
        name: "off": leave them as they are.
        loaded: the model, set to the attention of the calibration's mode.
        calibration: what is known of it.
        backend: torch's name of what makes kernels.

    Raises:
        ConfigError: they cannot be compiled, or answer otherwise then.
    """
    if name == "off":
        return
    reason, remedy = _missing(loaded, calibration, backend)
    if not reason:
        remedy = "set it to off"
        reason = _refuted(loaded, calibration, backend)
    if reason:
        raise ConfigError(f"model.compile = layers: {reason}", remedy)
    log.info("layers_compiled", layers=len(layers_of(loaded.model)))


def _missing(loaded: LoadedModel, calibration: Calibration, backend: str) -> tuple[str, str]:
    """Return what compiling lacks here, and the remedy; empty: nothing."""
    if calibration.mode != "ragged":
        return f"the model runs in mode {calibration.mode}, which is not compiled", "set it to off"
    if not layers_of(loaded.model):
        return "the model has no layers of Transformers' own kind", "set it to off"
    if packed_bytes(loaded.model):
        reason = "weights are packed, which the compiler cannot look into"
        return reason, "set model.packed_weights to off"
    has_compiler = any(map(shutil.which, ("g++", "clang++", "c++")))
    if backend == "inductor" and not is_gpu(loaded.device) and not has_compiler:
        return "there is no C++ compiler", "install g++, or set it to off"
    return "", ""


def _refuted(loaded: LoadedModel, calibration: Calibration, backend: str) -> str:
    """Compile; return why what was compiled must not serve, which is undone then."""
    expected = _logits(loaded, calibration)
    compile_layers(loaded.model, backend)
    try:
        logits = _logits(loaded, calibration)
        breaks = other_breaks()
        if breaks:
            reason = f"the compiler cannot see through a layer: {breaks[0][:160]}"
        elif is_same(logits, expected, loaded.dtype, calibration.rounding):
            return ""
        else:
            distance = logits_distance(logits, expected, loaded.dtype)
            reason = f"its logits are {distance:.1e} off those before"
    except Exception as error:  # noqa: BLE001 - what compilers raise is too much to foresee
        reason = reason_of(error)
    compute_as_before(loaded.model)
    return reason


def _logits(loaded: LoadedModel, calibration: Calibration) -> Tensor:
    """Compute two sequences, [n, vocab]."""
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
