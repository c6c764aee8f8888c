"""ModelRunner: one forward of the model over a ragged batch of sequences.

All chunks lie one after another in a batch of one: input_ids and position_ids are [1, tokens].
Linear layers see one long sequence; rotary embedding goes by position_ids; each chunk attends to
its own slab only. Layer by layer a forward

1. writes the new rows to slabs and write buffers,
2. opens its clock, so that a save may follow it,
3. waits for the gates of slabs that are still being loaded,
4. attends.

Invariants: 1. `num_tokens` of slabs and `end_token` of write buffers move only after the whole
forward succeeded; 2. a position is a row of the slab; 3. exactly one thread calls `step`, and it
alone appends in the meantime.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from inference_svc.runtime.compute.attention import AttentionBackend, AttentionOptions, Part
from inference_svc.runtime.compute.torch_attention import TorchAttention
from inference_svc.runtime.kv.copy_stream import StepClock
from inference_svc.runtime.kv.kv_slab import KVSlab, WriteBuffer
from inference_svc.runtime.model.capture import CaptureCache, RotaryTap, under
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.recipes import Calibration


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one sequence.

    Attributes:
        slab: they are appended to it.
        token_ids: at least one.
        want_logits: of the last of them.
        write_buffer: they are appended to it too, except tokens before its first; None: the
            sequence is not going to be stored.
    """

    slab: KVSlab
    token_ids: list[int]
    want_logits: bool
    write_buffer: WriteBuffer | None = None

    @property
    def end_token(self) -> int:
        """Position after the last token, before the step."""
        return self.slab.num_tokens + len(self.token_ids)

    @property
    def first_written_token(self) -> int:
        """Position of the first token for the write buffer; `end_token` if there is none."""
        if self.write_buffer is None:
            return self.end_token
        return min(max(self.slab.num_tokens, self.write_buffer.first_token), self.end_token)


class ModelRunner:
    """Runs steps of one calibrated model."""

    def __init__(
        self,
        loaded: LoadedModel,
        calibration: Calibration,
        attention: AttentionBackend | None = None,
    ) -> None:
        """Store the parts; without `attention`, the portable one."""
        self._loaded = loaded
        self._calibration = calibration
        self._attention = attention or TorchAttention()

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk], clock: StepClock | None = None) -> Tensor:
        """Compute all chunks in one forward and append them to their slabs and write buffers.

        Args:
            chunks: of different slabs, with room for them.
            clock: opened layer by layer, once all chunks' rows of a layer are written; left as it
                is if the step fails.

        Returns:
            [chunks that want logits, vocab] float32 on the CPU: the logits after each such chunk's
            last token. To be believed only once the slabs' gates are confirmed.

        Raises:
            whatever the model or a gate raises; slabs and write buffers are then as they were.
        """
        _check(chunks)
        device = self._loaded.device
        ends = list(accumulate(len(chunk.token_ids) for chunk in chunks))
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        positions = [
            position
            for chunk in chunks
            for position in range(chunk.slab.num_tokens, chunk.end_token)
        ]
        wanted = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.want_logits]
        with under(_StepForward(self._calibration, self._attention, chunks, clock)):
            answer = self._loaded.model(
                input_ids=torch.tensor([token_ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                past_key_values=CaptureCache(),
                use_cache=True,
                # A tensor even if empty: an int makes some models drop queries of layers that share
                # KV.
                logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=device),
            )
        logits: Tensor = answer.logits[0].float().cpu()
        for chunk in chunks:
            if chunk.write_buffer is not None:
                chunk.write_buffer.end_token = max(chunk.write_buffer.first_token, chunk.end_token)
            chunk.slab.num_tokens = chunk.end_token
        return logits


def _check(chunks: Sequence[Chunk]) -> None:
    if len({id(chunk.slab) for chunk in chunks}) != len(chunks):
        raise AssertionError("a slab is in the batch twice")
    for chunk in chunks:
        if not 0 < len(chunk.token_ids) <= chunk.slab.free_tokens:
            raise AssertionError(
                f"{len(chunk.token_ids)} tokens for a slab with room for {chunk.slab.free_tokens}"
            )
        buffer = chunk.write_buffer
        if buffer is not None and buffer.end_token != max(
            buffer.first_token, chunk.slab.num_tokens
        ):
            raise AssertionError(
                f"a write buffer up to token {buffer.end_token} beside a slab up to token "
                f"{chunk.slab.num_tokens}"
            )


class _StepForward:
    """The forward of one step.

    Written for few Python and torch calls: at decode they cost as much as the arithmetic. Hence
    views of all layers are cut at once and rows of all sequences are copied in one call.
    """

    def __init__(
        self,
        calibration: Calibration,
        attention: AttentionBackend,
        chunks: Sequence[Chunk],
        clock: StepClock | None,
    ) -> None:
        self._calibration = calibration
        self._clock = clock
        self._sizes = [len(chunk.token_ids) for chunk in chunks]
        self._gates = [chunk.slab.gate for chunk in chunks if chunk.slab.gate is not None]
        # Of chunks with tokens for a write buffer: index and how many tokens come before these.
        self._written = [
            (index, chunk.first_written_token - chunk.slab.num_tokens)
            for index, chunk in enumerate(chunks)
            if chunk.first_written_token < chunk.end_token
        ]
        self._places = _places(chunks)
        self._step_attention = attention.prepare(
            [Part(chunk.slab, len(chunk.token_ids)) for chunk in chunks]
        )
        self._calls: list[tuple[tuple[Any, ...], Any]] = []  # apply calls since the last `cached`
        self._num_cached = 0
        self._num_attended = 0

    def rotated(
        self, _tap: RotaryTap, args: tuple[Any, ...], _options: dict[str, Any], result: Any
    ) -> None:
        """Keep the call until the layer caches its key."""
        self._calls.append((args, result))

    def cached(self, layer_index: int, key: Tensor, value: Tensor) -> None:
        """Write the layer's new rows of all sequences, then let others have them."""
        if layer_index != self._num_cached:
            raise AssertionError(f"layer {layer_index} is cached after {self._num_cached} layers")
        self._num_cached += 1
        sizes = self._sizes
        rows = [*key.split_with_sizes(sizes, 2), *value.split_with_sizes(sizes, 2)]
        if self._written:
            for stored in (self._free_rows(layer_index, key), value[0].transpose(0, 1)):
                pieces = stored.split_with_sizes(sizes)
                rows += [pieces[i][skip:] if skip else pieces[i] for i, skip in self._written]
        torch._foreach_copy_(self._places[layer_index], rows)
        self._calls.clear()
        if self._clock is not None:
            self._clock.enqueued(self._num_cached)

    def attend(
        self, query: Tensor, _key: Tensor, _value: Tensor, _mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attend each part to its own slab; returns [1, tokens, heads, value_dim]."""
        call = self._calibration.attention_calls[self._num_attended]
        self._num_attended += 1
        for gate in self._gates:
            gate.wait(call.layer_index)
        asked = AttentionOptions(
            options.get("scaling"), options.get("softcap"), options.get("s_aux"), call.window
        )
        return self._step_attention.attend(query, call.layer_index, asked)

    def masked(self, _allowed: Callable[..., Tensor]) -> None:
        """Never called."""
        raise AssertionError("our attention name has no mask function")

    def _free_rows(self, layer_index: int, key: Tensor) -> Tensor:
        """Return the layer's keys before RoPE, [tokens, kv_heads, dim]."""
        source = self._calibration.layers[layer_index].source
        return key[0].transpose(0, 1) if source is None else source.free_rows(self._calls, key)


def _places(chunks: Sequence[Chunk]) -> list[tuple[Tensor, ...]]:
    """Return per layer where new rows go: keys, values, then those of write buffers."""
    slabs = [(chunk.slab, chunk.slab.num_tokens, len(chunk.token_ids)) for chunk in chunks]
    written = [
        chunk.write_buffer.cut(first, chunk.end_token - first)
        for chunk in chunks
        if chunk.write_buffer is not None and (first := chunk.first_written_token) < chunk.end_token
    ]
    return list(
        zip(
            *[slab.keys.cut(first, num_tokens) for slab, first, num_tokens in slabs],
            *[slab.values.cut(first, num_tokens) for slab, first, num_tokens in slabs],
            *[keys for keys, _ in written],
            *[values for _, values in written],
            strict=True,
        )
    )
