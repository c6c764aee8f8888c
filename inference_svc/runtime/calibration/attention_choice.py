"""Attention choice: the attention back-end of a model, by device, installed packages and proof.

    torch   torch's functions for the device, one call per sequence; supports every call
    triton  one call over the pages of all sequences; needs Triton, KV on pages, and a GPU
            (TRITON_INTERPRET=1 runs it on a CPU, slowly)
    cpp     all sequences of a step in one call of a kernel for CPUs, those with one new token in
            another one; needs g++

Before the triton kernel serves, it is run over the model's own layers: chunks, a history of several
splits, single tokens of several sequences. If its logits differ from those of `torch`, or it fails,
`torch` serves. The cpp kernel is run over random tensors of the model's shapes, since on a CPU the
other proof would take seconds. The choice does not depend on models' names.
"""

from collections.abc import Sequence
from typing import Literal

import structlog
import torch
from torch import Tensor

from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.runtime.attention.attention import AttentionBackend, TorchAttention
from inference_svc.runtime.attention.paged_attention import PagedAttention
from inference_svc.runtime.calibration.kernels import is_gpu, no_kernels_on, reason_of
from inference_svc.runtime.calibration.proof import new_pool
from inference_svc.runtime.calibration.stock import is_same, logits_distance
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.cpu.attention_kernel import AttentionKernel, why_unsupported, why_wrong
from inference_svc.runtime.cpu.cpu_attention import CpuAttention
from inference_svc.runtime.cpu.native_library import NativeLibraryError
from inference_svc.runtime.kv.layer_groups import LayerGroups
from inference_svc.runtime.kv.page_pool import PagePool
from inference_svc.runtime.kv.sequence_kv import SequenceKv
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration
from shared.types.errors import ConfigError
from shared.types.units import ceil_div

AttentionName = Literal["auto", "torch", "triton", "cpp"]
PROOF_TOKENS = 600  # tokens of the longer sequence: more than two splits of the kernel
SHORT_TOKENS = 40  # tokens of the shorter sequence
LAST_TOKENS = 3  # last tokens of each, which are computed one by one

log = structlog.get_logger()


def choose_attention(
    name: AttentionName,
    loaded: LoadedModel,
    calibration: Calibration,
    groups: LayerGroups | None,
) -> AttentionBackend:
    """Return a back-end that is proven for the model.

    Args:
        name: the back-end, or "auto" for the fastest one that is proven.
        loaded: the model, set to the attention of the calibration's mode.
        calibration: the model's calibration.
        groups: the groups of layers that have pages in common; None: working KV is not on pages.

    Raises:
        ConfigError: the named back-end cannot serve here, or gives other logits.
    """
    if name == "torch":
        return TorchAttention()
    fastest: AttentionName = "triton" if is_gpu(loaded.device) else "cpp"
    wanted = fastest if name == "auto" else name
    prove = _prove_triton if wanted == "triton" else _prove_cpp
    backend = prove(loaded, calibration, groups)
    if not isinstance(backend, str):
        log.info("attention_chosen", attention=wanted)
        return backend
    if name == wanted:
        raise ConfigError(
            f"model.attention = {name} cannot be used: {backend}", "set it to auto or torch"
        )
    report = log.warning if is_gpu(loaded.device) else log.info
    report("attention_chosen", attention="torch", reason=backend)
    return TorchAttention()


def _prove_triton(
    loaded: LoadedModel, calibration: Calibration, groups: LayerGroups | None
) -> AttentionBackend | str:
    """Return the triton back-end, or why it cannot serve."""
    reason = _why_unsupported(loaded.device, calibration, groups)
    if reason or groups is None:
        return reason
    paged = _paged_attention()
    return _why_refuted(loaded, calibration, paged, groups) or paged


def _prove_cpp(
    loaded: LoadedModel, calibration: Calibration, _groups: LayerGroups | None
) -> AttentionBackend | str:
    """Return the cpp back-end, or why it cannot serve."""
    if loaded.device.type != "cpu":
        return f"device {loaded.device} is not a CPU"
    if calibration.mode != "ragged":
        return f"the model runs in mode {calibration.mode}, which it does not take"
    shapes = [layer.shape for layer in calibration.layers]
    reason = why_unsupported(shapes, loaded.dtype)
    if reason:
        return reason
    try:
        kernel = AttentionKernel.load()
    except NativeLibraryError as error:
        return str(error)
    return why_wrong(kernel, shapes, loaded.dtype) or CpuAttention(kernel)


def _why_unsupported(
    device: torch.device, calibration: Calibration, groups: LayerGroups | None
) -> str:
    """Return why the triton back-end cannot run here; "": it can."""
    if calibration.mode != "ragged":
        return f"the model runs in mode {calibration.mode}, which this back-end does not support"
    if groups is None:
        return "scheduler.working_kv is contiguous instead of pages"
    return no_kernels_on(device)


def _paged_attention() -> PagedAttention:
    """Make the triton back-end; imports Triton, which may not be installed."""
    from inference_svc.runtime.cuda.page_attention import attend_pages

    return PagedAttention(attend_pages)


def _why_refuted(
    loaded: LoadedModel, calibration: Calibration, paged: PagedAttention, groups: LayerGroups
) -> str:
    """Return why a back-end must not serve the model; "": its logits are those of torch."""
    try:
        expected = _logits(loaded, calibration, TorchAttention(), None)
        logits = _logits(loaded, calibration, paged, groups)
    except Exception as error:  # noqa: BLE001 - compilers and drivers may raise anything
        return reason_of(error)
    if is_same(logits, expected, loaded.dtype, calibration.rounding):
        return ""
    distance = logits_distance(logits, expected, loaded.dtype)
    return f"its logits differ from those of torch by {distance:.1e}"


def _logits(
    loaded: LoadedModel,
    calibration: Calibration,
    attention: AttentionBackend,
    groups: LayerGroups | None,
) -> Tensor:
    """Compute two sequences in a batch, in chunks and then token by token; return [n, vocab]."""
    runner = ModelRunner(loaded, calibration, attention)
    long = min(PROOF_TOKENS, loaded.context_window)
    lengths = (long, min(SHORT_TOKENS, long // 2))
    token_ids = [(37 * number + 11) % loaded.vocab_size for number in range(long)]
    sequences = _sequences(loaded, calibration, lengths, groups)
    ends = [(length // 2, length - LAST_TOKENS) for length in lengths]
    ends = [(*found, *range(found[1] + 1, found[1] + LAST_TOKENS + 1)) for found in ends]
    logits = []
    for step_ends in zip(*ends, strict=True):
        chunks = [
            Chunk(kv, token_ids[kv.num_tokens : end], want_logits=True)
            for kv, end in zip(sequences, step_ends, strict=True)
        ]
        logits.append(runner.step(chunks))
    return torch.cat(logits)


def _sequences(
    loaded: LoadedModel,
    calibration: Calibration,
    lengths: Sequence[int],
    groups: LayerGroups | None,
) -> list[SequenceKv]:
    """Return empty KV for sequences of these lengths; pages are assigned last page first."""
    if groups is None:
        pool = new_pool(loaded, calibration, sum(lengths))
        return [pool.new_kv(length) for length in lengths]
    groups = groups.holding_all()  # no token's slot may be overwritten by a later token
    page_tokens, pages_of = groups.page_tokens, groups.pages
    counts = [pages_of.num_pages(ceil_div(length, page_tokens)) for length in lengths]
    paged = PagePool(
        [layer.shape for layer in calibration.layers],
        PagedSlots(sum(counts), page_tokens, pages_of),
        1,
        device=loaded.device,
        dtype=loaded.dtype,
        states=calibration.state_shapes,
        groups=groups,
    )
    pages = list(range(sum(counts)))
    return [
        paged.new_kv(length, [pages.pop() for _ in range(count)])
        for length, count in zip(lengths, counts, strict=True)
    ]
