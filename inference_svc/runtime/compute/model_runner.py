"""ModelRunner: runs the model over the next tokens of several sequences, in the calibrated mode.

A forward takes chunks one after another in a batch of one: input_ids and position_ids are
[1, tokens]. Linear layers see one long sequence, rotary embedding uses position_ids, and each chunk
attends to its own KV only. The mode (`Calibration.mode`) decides how many chunks a forward takes
and how they attend:

    ragged   all chunks; attention reads each sequence's KV in place
    latent   all chunks; attention reads each sequence's latents in place
    indexed  as many as fit into one context window; like latent, over chosen tokens only
    gather   all chunks; attention reads KV gathered from all sequences
    masked   as many as fit into one context window; the model's own attention, masked
    single   one; the model's own attention, masks and positions
    own      one; like single, over the model's own cache (`own_forward.py`)

Modules with recurrent states run sequence by sequence (`step_states.py`).

`step_forward.py` describes what happens within a forward. A forward of mode ragged may be compiled
(`compiled_forward.py`). Steps for which a graph was captured are replayed (`decode_graphs.py`) and
give the same numbers.

Invariants:
1. `num_tokens` of sequences' KV, their states, and `end_token` of write buffers advance only after
   all forwards of a step have succeeded;
2. a position is a token slot of the sequence's KV;
3. exactly one thread calls `step`, and nothing else appends to the sequences meanwhile.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from inference_svc.runtime.attention.attention import AttentionBackend, TorchAttention
from inference_svc.runtime.compute.chunk import Chunk, check_chunks, commit_chunks
from inference_svc.runtime.compute.compiled_forward import CompiledForward
from inference_svc.runtime.compute.decode_graphs import DecodeGraphs
from inference_svc.runtime.compute.gathered_forward import (
    GatheredForward,
    LatentForward,
    block_causal_mask,
)
from inference_svc.runtime.compute.own_forward import OwnForward
from inference_svc.runtime.compute.step_forward import RaggedForward, StepForward
from inference_svc.runtime.kv.layer_gate import StepClock
from inference_svc.runtime.memory import copy_to_device, copy_to_host
from inference_svc.runtime.model.capture import ForwardCall, taking_states
from inference_svc.runtime.model.forward import forward_context
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import MASKED_MODES, Calibration


class ModelRunner:
    """Runs steps of one calibrated model.

    Attributes:
        graphs: the captured decode steps; None: every step is computed.
        compiled: the compiled forward; None: forwards run operation by operation.
        num_replayed: number of steps that were replayed from a graph.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        calibration: Calibration,
        attention: AttentionBackend | None = None,
        graphs: DecodeGraphs | None = None,
        compiled: CompiledForward | None = None,
    ) -> None:
        """Store the parts.

        Args:
            loaded: the model.
            calibration: the model's calibration.
            attention: the attention back-end; None: attention in plain torch.
            graphs: the captured decode steps; None: every step is computed.
            compiled: the compiled forward; None: forwards run operation by operation.
        """
        self.graphs = graphs
        self.compiled = compiled
        self.num_replayed = 0
        self._loaded = loaded
        self._calibration = calibration
        self._call = ForwardCall(loaded.model)
        self._attention = attention or TorchAttention()

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk], clock: StepClock | None = None) -> Tensor:
        """Compute all chunks and append them to their KV and write buffers.

        Args:
            chunks: chunks of different sequences, whose KV has room for them.
            clock: a gate that is opened layer by layer, once all chunks' tokens of a layer are
                written; left as it is if the step fails.

        Returns:
            [n, vocab] logits, float32 on the CPU: those after the last token of each chunk that
            wants them, or after each of its tokens (`Chunk.want_all`), chunk by chunk. The caller
            may use them only once the sequences' gates are confirmed.

        Raises:
            Exception: from the model or a gate; KV and write buffers are then as they were.
        """
        check_chunks(chunks)
        logits = None if self.graphs is None else self.graphs.step(chunks, clock)
        if logits is None:
            logits = self._compute(chunks, clock)
        else:
            self.num_replayed += 1
        commit_chunks(chunks)
        return logits

    def _compute(self, chunks: Sequence[Chunk], clock: StepClock | None) -> Tensor:
        """Run as many forwards as the mode needs; see `step`."""
        groups = list(self._groups(chunks))
        # A layer of the step is written once the last forward has written it.
        clocks = [None] * (len(groups) - 1) + [clock]
        logits = [
            self._run(group, group_clock) for group, group_clock in zip(groups, clocks, strict=True)
        ]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _groups(self, chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
        """Divide the chunks among forwards, in order."""
        mode, window = self._calibration.mode, self._loaded.context_window
        if mode in {"ragged", "latent", "gather"} or len(chunks) == 1:
            yield chunks
            return
        group: list[Chunk] = []
        num_tokens = 0
        for chunk in chunks:
            if group and (mode in {"single", "own"} or num_tokens + chunk.end_token > window):
                yield group
                group, num_tokens = [], 0
            group.append(chunk)
            num_tokens += chunk.end_token
        yield group

    def _run(self, chunks: Sequence[Chunk], clock: StepClock | None) -> Tensor:
        """Run one forward; return [n, vocab] logits as `step` does."""
        mode, device = self._calibration.mode, self._loaded.device
        ends = list(accumulate(len(chunk.token_ids) for chunk in chunks))
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        positions = [
            position for chunk in chunks for position in range(chunk.kv.num_tokens, chunk.end_token)
        ]
        row_indices = [
            index
            for end, chunk in zip(ends, chunks, strict=True)
            for index in range(end - chunk.num_rows, end)
        ]
        options: dict[str, Any] = {}
        if mode in MASKED_MODES:
            options["attention_mask"] = block_causal_mask(
                chunks, self._loaded.dtype, device, new_last=self._calibration.is_new_last
            )
        forward = self._make_forward(chunks, clock)
        # A model that makes its own masks and positions asks the cache how long the history is.
        claimed = chunks[0].kv.num_tokens if mode == "single" else 0
        cache = forward.cache if isinstance(forward, OwnForward) else self._call.cache(claimed)
        inputs = (
            copy_to_device(device, torch.tensor([token_ids])),
            copy_to_device(device, torch.tensor([positions])),
            copy_to_device(device, torch.tensor(row_indices, dtype=torch.long)),
        )
        with forward_context(forward), _pooling_context(chunks):
            logits = None
            if self.compiled is not None and not _needs_inside(chunks):
                logits = self.compiled(*inputs)
            if logits is None:
                logits = self._call(*inputs, cache, **options)
        forward.finish()
        logits = logits.float()
        return logits if logits.device.type == "cpu" else copy_to_host(logits)

    def _make_forward(self, chunks: Sequence[Chunk], clock: StepClock | None) -> StepForward:
        """Make the forward object that the model's capture hooks call."""
        if self._calibration.mode == "ragged":
            return RaggedForward(self._calibration, self._attention, chunks, clock)
        if self._calibration.mode == "own":
            return OwnForward(self._calibration, chunks[0], clock, self._loaded.model.config)
        if self._calibration.expansions:
            return LatentForward(self._calibration, chunks, clock)
        return GatheredForward(self._calibration, chunks, clock)


def _needs_inside(chunks: Sequence[Chunk]) -> bool:
    """Whether a chunk keeps tensors from inside of the forward, where a compiler reuses memory."""
    return any(chunk.scores is not None or chunk.pooler is not None for chunk in chunks)


def _pooling_context(chunks: Sequence[Chunk]) -> AbstractContextManager[None]:
    if all(chunk.pooler is None for chunk in chunks):
        return nullcontext()
    return taking_states(partial(_pool, chunks))


def _pool(chunks: Sequence[Chunk], states: Tensor) -> Tensor:
    """Pass hidden states to the chunks' poolers.

    Args:
        chunks: the chunks of the forward.
        states: [1, rows, hidden] hidden states of the last layer, the chunks' rows in order.

    Returns:
        [1, rows, hidden] of the chunks without a pooler, for which logits are computed.
    """
    rows = states[0].split_with_sizes([chunk.num_rows for chunk in chunks])
    for chunk, chunk_rows in zip(chunks, rows, strict=True):
        if chunk.pooler is not None:
            chunk.pooler.note(chunk_rows, chunk.end_token)
    unpooled = [
        chunk_rows for chunk, chunk_rows in zip(chunks, rows, strict=True) if chunk.pooler is None
    ]
    return torch.cat(unpooled).unsqueeze(0) if unpooled else states[:, :0]
