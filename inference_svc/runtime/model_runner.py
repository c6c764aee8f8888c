"""ModelRunner: one forward of the model over a ragged batch of sequences.

All chunks lie one after another in a batch of one: input_ids and position_ids are [1, tokens].
Linear layers see one long sequence; rotary embedding goes by position_ids; each chunk attends to
its own slab only.

Invariants: 1. a slab's `num_tokens` moves only after the whole forward succeeded; 2. a position is
a row of the slab;
3. exactly one thread calls `step`, and it alone appends to slabs in the meantime.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from inference_svc.runtime.attention import AttentionOptions, attend, attend_one, visible_mask
from inference_svc.runtime.capture import CaptureCache, RotaryTap, under
from inference_svc.runtime.kv_slab import KVSlab, allocate_slab
from inference_svc.runtime.model_loader import LoadedModel
from inference_svc.runtime.recipes import Calibration


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one sequence; they are appended to its slab."""

    slab: KVSlab
    token_ids: list[int]
    want_logits: bool


class ModelRunner:
    """Runs steps of one calibrated model."""

    def __init__(self, loaded: LoadedModel, calibration: Calibration) -> None:
        self._loaded = loaded
        self._calibration = calibration

    def new_slab(self, capacity_tokens: int, *, save: bool) -> KVSlab:
        """Allocate an empty slab for one sequence.

        Args:
            capacity_tokens: history, new tokens and answer together.
            save: keep keys before RoPE too, so that the slab can be stored.
        """
        loaded = self._loaded
        shapes = [layer.shape for layer in self._calibration.layers]
        return allocate_slab(
            shapes, capacity_tokens, device=loaded.device, dtype=loaded.dtype, save=save
        )

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute all chunks in one forward and append them to their slabs.

        Args:
            chunks: of different slabs, each with at least one token and room for it.

        Returns:
            [chunks that want logits, vocab] float32 on the CPU: the logits after each such chunk's
            last token.

        Raises:
            whatever the model raises; the slabs are then as they were.
        """
        _check(chunks)
        device = self._loaded.device
        ends = list(accumulate(len(chunk.token_ids) for chunk in chunks))
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        positions = [
            position
            for chunk in chunks
            for position in range(
                chunk.slab.num_tokens, chunk.slab.num_tokens + len(chunk.token_ids)
            )
        ]
        wanted = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.want_logits]
        with under(_StepForward(self._calibration, chunks)):
            answer = self._loaded.model(
                input_ids=torch.tensor([token_ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                past_key_values=CaptureCache(),
                use_cache=True,
                # A tensor even if empty: an int makes some models drop queries of layers that share
                # KV.
                logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=device),
            )
        for chunk in chunks:
            chunk.slab.num_tokens += len(chunk.token_ids)
        logits: Tensor = answer.logits[0].float().cpu()
        return logits


def _check(chunks: Sequence[Chunk]) -> None:
    if len({id(chunk.slab) for chunk in chunks}) != len(chunks):
        raise AssertionError("a slab is in the batch twice")
    for chunk in chunks:
        if not 0 < len(chunk.token_ids) <= chunk.slab.free_tokens:
            raise AssertionError(
                f"{len(chunk.token_ids)} tokens for a slab with room for {chunk.slab.free_tokens}"
            )


class _StepForward:
    """The forward of one step: writes rows to slabs and attends over them.

    Written for few Python and torch calls: at decode they cost as much as the arithmetic. Hence
    views of all layers are cut at once, rows of all sequences are copied in one call, and decode
    has a path of its own.
    """

    def __init__(self, calibration: Calibration, chunks: Sequence[Chunk]) -> None:
        self._calibration = calibration
        self._parts = [_Part(chunk.slab, len(chunk.token_ids)) for chunk in chunks]
        self._sizes = [part.num_tokens for part in self._parts]
        self._is_decode = max(self._sizes) == 1
        self._calls: list[tuple[tuple[Any, ...], Any]] = []  # apply calls since the last `cached`
        self._num_attended = 0
        self._visible: dict[int | None, list[tuple[Sequence[Tensor], Sequence[Tensor]]]] = {}
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def rotated(
        self, _tap: RotaryTap, args: tuple[Any, ...], _options: dict[str, Any], result: Any
    ) -> None:
        """Keep the call until the layer caches its key."""
        self._calls.append((args, result))

    def cached(self, layer_index: int, key: Tensor, value: Tensor) -> None:
        """Write the layer's new rows of all sequences."""
        sizes, parts = self._sizes, self._parts
        rows = [*key.split_with_sizes(sizes, 2), *value.split_with_sizes(sizes, 2)]
        places = [part.new_keys[layer_index] for part in parts]
        places += [part.new_values[layer_index] for part in parts]
        source = self._calibration.layers[layer_index].source
        if source is not None:
            free_rows = source.free_rows(self._calls, key).split_with_sizes(sizes)
            for part, piece in zip(parts, free_rows, strict=True):
                if part.new_free_keys is not None:
                    places.append(part.new_free_keys[layer_index])
                    rows.append(piece)
        torch._foreach_copy_(places, rows)
        self._calls.clear()

    def attend(
        self, query: Tensor, _key: Tensor, _value: Tensor, _mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attend each part to its own slab; returns [1, tokens, heads, value_dim]."""
        call = self._calibration.attention_calls[self._num_attended]
        self._num_attended += 1
        asked = AttentionOptions(
            options.get("scaling"), options.get("softcap"), options.get("s_aux"), call.window
        )
        if self._is_decode and asked.is_plain:
            return self._attend_decode(query, call.layer_index, asked)
        visible = self._visible_rows(None)
        attended = [
            self._attend_part(part, piece, keys[call.layer_index], values[call.layer_index], asked)
            for part, piece, (keys, values) in zip(
                self._parts, query.split_with_sizes(self._sizes, 2), visible, strict=True
            )
        ]
        return torch.cat(attended, dim=2).transpose(1, 2)

    def masked(self, _allowed: Callable[..., Tensor]) -> None:
        """Never called."""
        raise AssertionError("our attention name has no mask function")

    def _attend_decode(self, query: Tensor, layer_index: int, asked: AttentionOptions) -> Tensor:
        """Attend when every part is one token; the same arithmetic as in a mixed step."""
        _, heads, num_parts, dim = query.shape
        kv_heads = self._calibration.layers[layer_index].shape.key[0]
        grouped = query[0].transpose(0, 1).reshape(num_parts, kv_heads, -1, dim)
        visible = self._visible_rows(asked.window)
        attended = [
            attend_one(row, keys[layer_index], values[layer_index], asked.scale)
            for row, (keys, values) in zip(
                grouped.split_with_sizes(self._sizes), visible, strict=True
            )
        ]
        return torch.cat(attended).view(1, num_parts, heads, -1)

    def _attend_part(
        self, part: "_Part", query: Tensor, keys: Tensor, values: Tensor, asked: AttentionOptions
    ) -> Tensor:
        """Attend one part of a mixed step; returns [1, heads, tokens, value_dim]."""
        window = asked.window
        if part.num_tokens == 1 and asked.is_plain:
            if window is not None:
                keys, values = keys[:, :, -window:], values[:, :, -window:]
            grouped = query.reshape(1, keys.shape[1], -1, query.shape[3])
            return attend_one(grouped, keys, values, asked.scale).reshape(1, query.shape[1], 1, -1)
        is_whole = part.num_tokens == part.length and (window is None or window >= part.length)
        mask = None if is_whole else self._mask(part, window)
        return attend(query, keys, values, asked, mask)

    def _visible_rows(self, window: int | None) -> list[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Return what each part's last token sees; cut once for all layers of this window."""
        if window not in self._visible:
            self._visible[window] = [part.visible(window) for part in self._parts]
        return self._visible[window]

    def _mask(self, part: "_Part", window: int | None) -> Tensor:
        """Return the part's mask, the same for all layers with this window."""
        key = (id(part), window)
        if key not in self._masks:
            device = part.slab.keys[0].device
            self._masks[key] = visible_mask(part.num_tokens, part.length, window, device)
        return self._masks[key]


class _Part:
    """One chunk of the step: its rows [length - num_tokens, length) of `slab` are new."""

    def __init__(self, slab: KVSlab, num_tokens: int) -> None:
        first = slab.num_tokens
        self.slab = slab
        self.num_tokens = num_tokens
        self.length = first + num_tokens
        self.new_keys = slab.keys.cut(first, num_tokens)
        self.new_values = slab.values.cut(first, num_tokens)
        self.new_free_keys = (
            None if slab.free_keys is None else slab.free_keys.cut(first, num_tokens)
        )

    def visible(self, window: int | None) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return keys and values, per layer, that the last token sees."""
        first = max(0, self.length - window) if window is not None else 0
        return (
            self.slab.keys.cut(first, self.length - first),
            self.slab.values.cut(first, self.length - first),
        )
