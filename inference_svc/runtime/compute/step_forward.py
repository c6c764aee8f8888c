"""The forward of one step: writes each layer's new rows, and attends to slabs directly.

Layer by layer it 1. writes the new rows to slabs and write buffers, 2. opens its clock, so that a
save may follow it, 3. waits for the gates of slabs that are still being loaded, 4. attends.

Written for few Python and torch calls: at decode they cost as much as the arithmetic. Hence views
of all layers are cut at once and rows of all sequences are copied in one call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from inference_svc.runtime.attention.attention import AttentionBackend, AttentionOptions, Part
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.kv.copy_stream import StepClock
from inference_svc.runtime.model.capture import RotaryTap
from inference_svc.runtime.positions.recipes import Calibration


class StepForward:
    """What the forwards of all modes share: they write rows."""

    def __init__(
        self, calibration: Calibration, chunks: Sequence[Chunk], clock: StepClock | None
    ) -> None:
        """Cut where new rows go; nothing is written yet."""
        self._layers = calibration.layers
        self._attention_calls = calibration.attention_calls
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
        self._calls: list[tuple[tuple[Any, ...], Any]] = []  # apply calls since the last `cached`
        self._num_cached = 0
        self._num_attended = 0

    def rotated(
        self, _tap: RotaryTap, args: tuple[Any, ...], _options: dict[str, Any], result: Any
    ) -> None:
        """Keep the call until the layer caches its key."""
        self._calls.append((args, result))

    def cached(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the layer's new rows of all sequences, then let others have them."""
        if layer_index != self._num_cached:
            raise AssertionError(f"layer {layer_index} is cached after {self._num_cached} layers")
        self._num_cached += 1
        sizes = self._sizes
        rows = [*key.split_with_sizes(sizes, 2), *value.split_with_sizes(sizes, 2)]
        if self._written:
            recipe = self._layers[layer_index]
            for component, made in zip(recipe.components, (key, value), strict=True):
                pieces = component.free_rows(self._calls, made).split_with_sizes(sizes)
                rows += [pieces[i][skip:] if skip else pieces[i] for i, skip in self._written]
        torch._foreach_copy_(self._places[layer_index], rows)
        self._calls.clear()
        if self._clock is not None:
            self._clock.enqueued(self._num_cached)
        return key, value

    def attend(
        self, _query: Tensor, _key: Tensor, _value: Tensor, _mask: Any, _options: dict[str, Any]
    ) -> Tensor:
        """Attend; only where the model's attention is ours."""
        raise AssertionError("a forward with stock attention was asked to attend")

    def masked(self, _allowed: Callable[..., Tensor]) -> None:
        """Never called."""
        raise AssertionError("our attention name has no mask function")


class PagedForward(StepForward):
    """Attends each part to its own slab, where its rows lie."""

    def __init__(
        self,
        calibration: Calibration,
        attention: AttentionBackend,
        chunks: Sequence[Chunk],
        clock: StepClock | None,
    ) -> None:
        """Plan the step."""
        super().__init__(calibration, chunks, clock)
        self._step_attention = attention.prepare(
            [Part(chunk.slab, len(chunk.token_ids)) for chunk in chunks]
        )

    def attend(
        self, query: Tensor, _key: Tensor, _value: Tensor, _mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attend each part to its own slab; returns [1, tokens, heads, value_dim]."""
        call = self._attention_calls[self._num_attended]
        self._num_attended += 1
        for gate in self._gates:
            gate.wait(call.layer_index)
        return self._step_attention.attend(query, call.layer_index, call.options(options))


class ScoredForward(PagedForward):
    """A paged forward that also tells of its attention calls."""

    def __init__(
        self,
        calibration: Calibration,
        attention: AttentionBackend,
        chunks: Sequence[Chunk],
        clock: StepClock | None,
    ) -> None:
        """Plan the step."""
        super().__init__(calibration, attention, chunks, clock)
        self._chunks = chunks
        self._keys = [chunk.slab.keys.cut(0, chunk.end_token) for chunk in chunks]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attend as a paged forward does, then tell who asked."""
        attended = super().attend(query, key, value, mask, options)
        call = self._attention_calls[self._num_attended - 1]
        keys = [cut[call.layer_index][0] for cut in self._keys]
        queries = query.split_with_sizes(self._sizes, 2)
        tell(self._chunks, self._num_attended - 1, queries, keys, call.options(options))
        return attended


def tell(
    chunks: Sequence[Chunk],
    call_index: int,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    options: AttentionOptions,
) -> None:
    """Tell those who keep scores of an attention call.

    Args:
        chunks: of the forward.
        call_index: of the call in it.
        queries: per chunk [1, heads, n, dim].
        keys: per chunk [kv_heads, length, dim].
        options: of the call.
    """
    for chunk, query, rows in zip(chunks, queries, keys, strict=True):
        if chunk.scores is not None:
            chunk.scores.note(call_index, query[0], rows, options, chunk.slab.num_tokens)


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
