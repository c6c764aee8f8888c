"""Compile choice: compiles the model's forward, or takes what an earlier start has compiled.

Before compiled graphs serve, two sequences are computed with and without them: in chunks, token by
token, in a batch and alone, with and without a write buffer, so that every graph is used. If logits
differ, or what was written, or if the forward is no graph, the service does not start, if compiling
was requested explicitly. A remembered forward was proven when it was compiled: only a few steps of
it are compared again.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from inference_svc.runtime.calibration.kernels import reason_of
from inference_svc.runtime.calibration.proof import new_pool
from inference_svc.runtime.calibration.remembered_forwards import RememberedForwards
from inference_svc.runtime.calibration.stock import is_same, logits_distance
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.compiled_forward import CompiledForward, compile_forward
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.compute.piece_compiler import INDUCTOR, PieceCompiler
from inference_svc.runtime.compute.traced_forward import UntraceableError, why_untraceable
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration
from shared.process.log import get_logger
from shared.types.errors import ConfigError

CompileName = Literal["auto", "off", "step"]
# Tokens of the two sequences in each step; 0: the step is without that sequence. The first sequence
# has a write buffer. Only steps in which no sequence has more than WITH_LOGITS tokens give logits.
STEPS = ((9, 0), (5, 7), (1, 1), (1, 0), (0, 1), (3, 1), (0, 4), (2, 1), (0, 2), (16, 0), (1, 0))
REMEMBERED_STEPS = ((5, 7), (1, 1), (1, 0))  # of a forward that was proven before
WITH_LOGITS = 8
NOT_REMEMBERED = "no start with model.compile = step has compiled this model here"

log = get_logger(__name__)


def choose_compiling(
    name: CompileName,
    loaded: LoadedModel,
    calibration: Calibration,
    file: Path,
    compiler: PieceCompiler = INDUCTOR,
) -> CompiledForward | None:
    """Compile the model's forward, or load it; to be called on the thread that will run it.

    Args:
        name: "step": compiled, unless it is remembered; "auto": only if it is remembered; "off":
            forwards run operation by operation.
        loaded: the model, set to the attention of the calibration's mode.
        calibration: the model's calibration.
        file: the file of remembered forwards.
        compiler: what makes kernels of the graphs' pieces.

    Returns:
        The compiled forward; None: forwards run operation by operation.

    Raises:
        ConfigError: the forward cannot be compiled, or gives other results when compiled.
    """
    if name == "off":
        return None
    remembered = RememberedForwards(file, compiler)
    compiled = _take_remembered(remembered, loaded, calibration)
    if compiled is not None:
        log.info("forward_compiled", graphs=len(compiled.graphs), was_proven=True)
        return compiled
    if name == "auto":
        reason = why_untraceable(calibration) or compiler.why_unusable(loaded.device)
        log.info("forward_not_compiled", reason=reason or NOT_REMEMBERED)
        return None
    compiled = _compile_and_prove(loaded, calibration, compiler)
    remembered.remember(loaded, calibration, compiled)
    log.info("forward_compiled", graphs=len(compiled.graphs), was_proven=False)
    return compiled


def _take_remembered(
    remembered: RememberedForwards, loaded: LoadedModel, calibration: Calibration
) -> CompiledForward | None:
    """Load a remembered forward and compare it; None: there is none that gives the same."""
    try:
        compiled = remembered.find(loaded, calibration)
        if compiled is None:
            return None
        reason = _why_wrong(loaded, calibration, compiled, REMEMBERED_STEPS)
    except Exception as error:  # noqa: BLE001 - compilers and what they make may raise anything
        reason = reason_of(error)
    if reason:
        log.warning("remembered_forward_not_taken", reason=reason)
        return None
    return compiled


def _compile_and_prove(
    loaded: LoadedModel, calibration: Calibration, compiler: PieceCompiler
) -> CompiledForward:
    """Compile a forward.

    Raises:
        ConfigError: it cannot be compiled, or gives other results when compiled.
    """
    remedy = "set it to off"
    reason = why_untraceable(calibration)
    if not reason:
        reason = compiler.why_unusable(loaded.device)
        if reason:
            remedy = "install g++, or set it to off"
    if not reason:
        try:
            compiled = compile_forward(loaded, calibration, compiler)
            reason = _why_wrong(loaded, calibration, compiled, STEPS)
        except UntraceableError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - models and compilers may raise anything
            reason = f"the forward is not a graph: {reason_of(error)}"
    if reason:
        raise ConfigError(f"model.compile = step cannot be used: {reason}", remedy)
    return compiled


Steps = Sequence[tuple[int, int]]


def _why_wrong(
    loaded: LoadedModel, calibration: Calibration, compiled: CompiledForward, steps: Steps
) -> str:
    """Return how the compiled forward differs from what it was made of; "": it does not."""
    expected = _results(loaded, calibration, None, steps)
    found = _results(loaded, calibration, compiled, steps)
    if compiled.num_run < len(steps):
        return f"graphs fit {compiled.num_run} of {len(steps)} steps only"
    for what, values in found.items():
        if not is_same(values, expected[what], loaded.dtype, calibration.rounding):
            distance = logits_distance(values, expected[what], loaded.dtype)
            return f"its {what} differ from those before by {distance:.1e}"
    return ""


def _results(
    loaded: LoadedModel, calibration: Calibration, compiled: CompiledForward | None, steps: Steps
) -> dict[str, Tensor]:
    """Compute two sequences step by step; return logits and what was written, [n, size] each."""
    num_tokens = sum(map(sum, steps))
    pool = new_pool(loaded, calibration, 3 * num_tokens)
    runner = ModelRunner(loaded, calibration, compiled=compiled)
    sequences = [pool.new_kv(num_tokens) for _ in range(2)]
    buffer = pool.new_write_buffer(0, num_tokens)
    logits = []
    for sizes in steps:
        chunks = [
            Chunk(
                kv,
                [(37 * (kv.num_tokens + i) + 11) % loaded.vocab_size for i in range(size)],
                want_logits=max(sizes) <= WITH_LOGITS,
                write_buffer=buffer if kv is sequences[0] else None,
            )
            for kv, size in zip(sequences, sizes, strict=True)
            if size
        ]
        logits.append(runner.step(chunks))
    num_layers = len(calibration.layers)
    written = [_side_by_side(_tokens(kv, num_layers)) for kv in sequences]
    return {
        "logits": torch.cat(logits),
        "keys and values": torch.cat(written),
        "buffered keys and values": _side_by_side(_buffered(buffer)),
    }


def _tokens(kv: SequenceKv, num_layers: int) -> Iterator[Tensor]:
    """Yield the tokens of each layer and component, [tokens, kv_heads, dim]."""
    for component in kv.components:
        for layer_index in range(num_layers):
            yield component.read(layer_index, 0, kv.num_tokens)


def _buffered(buffer: WriteBuffer) -> Iterator[Tensor]:
    """Yield the tokens of each layer and component, [tokens, kv_heads, dim]."""
    slots = torch.tensor(buffer.slots_of(0, buffer.end_token), device=buffer.device)
    for component in buffer.components:
        for layer in component.layers:
            yield layer[slots]


def _side_by_side(tokens: Iterator[Tensor]) -> Tensor:
    """Return tensors of the same tokens as one, [tokens, n] float32 on the CPU."""
    return torch.cat([part.flatten(1).float().cpu() for part in tokens], dim=1)
