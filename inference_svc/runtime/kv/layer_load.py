"""Load: arena slots -> slab, with keys embedded at the positions of this turn.

Pure copying, layer by layer: it may run on a copy thread while `step` runs other sequences, or
waits at the slab's gate for the very next layer. A key is read once and written once from and to
memory: what happens between is done in pieces that fit a core's cache. Source: CachedAttention,
sections 3.2.1 (layer-wise pre-loading) and 3.4 (positions decoupled from stored keys).
"""

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inference_svc.runtime.kv.arena_rows import ArenaRows, SlotRun
from inference_svc.runtime.kv.kv_slab import KVSlab, WriteBuffer
from inference_svc.runtime.model.recipes import Calibration, LayerRecipe
from inference_svc.runtime.model.rotary import RotaryTable
from inference_svc.runtime.model.rotation import Turn
from shared.kv_layout import KVLayout
from shared.units import ceil_div

PIECE_ITEMS = 1 << 18  # elements of keys turned at once: 1 MiB in float32; 16 MiB are 25 % slower


class Span(Protocol):
    """Rows [start, start + num_tokens) of a slot, for positions from token_offset on."""

    @property
    def slot_id(self) -> int:
        """Which slot."""

    @property
    def start(self) -> int:
        """First row in the slot."""

    @property
    def num_tokens(self) -> int:
        """Number of rows."""

    @property
    def token_offset(self) -> int:
        """Position in the sequence of the first row."""


def check_spans(slab: KVSlab, spans: Sequence[Span], layout: KVLayout) -> int:
    """Return the position after the last span.

    Args:
        slab: to append to; the first span has to begin at its `num_tokens`.
        spans: in order, without gaps.
        layout: of the slots.

    Raises:
        ValueError: if the spans leave a gap, leave the slot or the slab.
    """
    end = slab.num_tokens
    for span in spans:
        is_inside = span.start >= 0 and 0 < span.num_tokens <= layout.block_tokens - span.start
        has_room = end + span.num_tokens <= slab.capacity_tokens
        if span.token_offset != end or not is_inside or not has_room:
            raise ValueError(
                f"rows {span.start}+{span.num_tokens} of a slot cannot be loaded at "
                f"{span.token_offset}; the slab has {end} of {slab.capacity_tokens} tokens"
            )
        end += span.num_tokens
    return end


class LayerLoader:
    """Loads spans into a slab, one layer at a time, in any order of layers.

    Counters are the caller's: it moves `slab.num_tokens` and `tail.end_token` to the end of the
    spans, at once if the slab has a gate, else after the last layer.
    """

    def __init__(
        self,
        slab: KVSlab,
        rows: ArenaRows,
        spans: Sequence[Span],
        calibration: Calibration,
        tail: WriteBuffer | None = None,
    ) -> None:
        """Prepare what all layers share.

        Args:
            slab: has room for the spans; who loads holds it.
            rows: of the arena that the slots are in; the caller holds their lease.
            spans: as `check_spans` wants them.
            calibration: of the model that the slab and the stored bytes belong to.
            tail: begins within the last span, or at its end: the span's rows from there on are
                kept as they are stored, since the next store replaces that block by a longer one.
        """
        self._slab = slab
        self._rows = rows
        self._layers = calibration.layers
        self._tail = tail
        self._tail_rows = _tail_rows(spans, tail)
        self._runs = list(_runs(spans))
        self._first = spans[0].token_offset if spans else 0
        self._num_tokens = sum(run.num_tokens for run in self._runs)
        self._pieces: dict[tuple[int, RotaryTable, tuple[int, int]], list[_Piece]] = {}

    @torch.inference_mode()
    def load(self, layer_index: int) -> None:
        """Load one layer of all spans, whose bytes are in the slots."""
        recipe = self._layers[layer_index]
        keys, values = self._slab.keys[layer_index][0], self._slab.values[layer_index][0]
        if recipe.rotary is None:
            self._place(layer_index, 0, keys)
        else:
            for piece in self._pieces_of(recipe, layer_index):
                self._turn(layer_index, piece, recipe.rotary, keys)
        self._place(layer_index, 1, values)
        if self._tail is not None and self._tail_rows is not None:
            slot_id, start, count = self._tail_rows
            for component, kept in enumerate((self._tail.keys, self._tail.values)):
                stored = self._rows.view(layer_index, component)[slot_id, start : start + count]
                kept[layer_index][:count].copy_(stored)

    def _place(self, layer_index: int, component: int, layer_rows: Tensor) -> None:
        """Copy rows as they are to their place in `layer_rows`, [heads, capacity, dim]."""
        first = self._first
        for run in self._runs:
            self._rows.gather(layer_index, component, run, _by_slot(layer_rows, first, run))
            first += run.num_tokens

    def _turn(
        self, layer_index: int, piece: "_Piece", rotary: RotaryTable, layer_keys: Tensor
    ) -> None:
        """Gather a piece's keys, and write them after RoPE to `layer_keys`."""
        for run, place in piece.gathers:
            self._rows.gather(layer_index, 0, run, place)
        out = layer_keys.narrow(1, piece.first, len(piece.keys)).transpose(0, 1)
        if piece.turn is not None:
            piece.turn.into(out)
        else:
            rotary.rotate_into(piece.keys.to(out.device), piece.first, out)

    def _pieces_of(self, recipe: LayerRecipe, layer_index: int) -> "list[_Piece]":
        """Return the pieces of keys of a kind, cut for this thread's scratch."""
        rotary = recipe.rotary
        assert rotary is not None  # noqa: S101 - for the type checker
        kind = (threading.get_ident(), rotary, recipe.shape.key)
        if kind not in self._pieces:
            heads, dim = recipe.shape.key
            is_on_cpu = self._slab.keys[layer_index].device.type == "cpu"
            pieces = self._pieces[kind] = []
            first = self._first
            for runs in _balanced(self._runs, self._num_tokens, PIECE_ITEMS // (heads * dim)):
                count = sum(run.num_tokens for run in runs)
                keys = self._rows.scratch(layer_index, 0, count)
                turn = rotary.turn(keys, first) if is_on_cpu else None
                pieces.append(_Piece(first, keys, list(_places(keys, runs)), turn))
                first += count
        return self._pieces[kind]


def move_layer(source: KVSlab, target: KVSlab, layer_index: int, num_tokens: int) -> None:
    """Copy the first rows of one layer to another slab of the same shapes."""
    for old, new in ((source.keys, target.keys), (source.values, target.values)):
        new[layer_index].narrow(2, 0, num_tokens).copy_(old[layer_index].narrow(2, 0, num_tokens))


class _Piece(NamedTuple):
    """Keys that are turned in one go.

    Attributes:
        first: position of the first.
        keys: [n, heads, dim], scratch to gather them into.
        gathers: runs and their places in `keys`.
        turn: of `keys`; None: they have to go to another device before.
    """

    first: int
    keys: Tensor
    gathers: list[tuple[SlotRun, Tensor]]
    turn: Turn | None


def _runs(spans: Sequence[Span]) -> Iterator[SlotRun]:
    """Put successive spans of the same rows together: all full blocks, then the last one."""
    slot_ids: list[int] = []
    rows = (0, 0)
    for span in spans:
        if slot_ids and (span.start, span.num_tokens) != rows:
            yield SlotRun(slot_ids, *rows)
            slot_ids = []
        rows = (span.start, span.num_tokens)
        slot_ids.append(span.slot_id)
    if slot_ids:
        yield SlotRun(slot_ids, *rows)


def _balanced(runs: Sequence[SlotRun], num_tokens: int, max_tokens: int) -> Iterator[list[SlotRun]]:
    """Divide runs into groups of about equal size, of `max_tokens` and less than a slot at most."""
    num_groups = max(1, ceil_div(num_tokens, max(1, max_tokens)))
    # Rounded up by a slot: else what the groups lack in whole slots would be one group more.
    size = ceil_div(num_tokens, num_groups) + max((run.num_rows - 1 for run in runs), default=0)
    group: list[SlotRun] = []
    count = 0
    for run in runs:
        for part in run.split(size):
            if group and count + part.num_tokens > size:
                yield group
                group, count = [], 0
            group.append(part)
            count += part.num_tokens
    if group:
        yield group


def _places(keys: Tensor, runs: Sequence[SlotRun]) -> Iterator[tuple[SlotRun, Tensor]]:
    """Pair each run with its part of `keys`, [slots, rows, heads, dim]."""
    first = 0
    for run in runs:
        part = keys.narrow(0, first, run.num_tokens)
        yield run, part.view(len(run.slot_ids), run.num_rows, *part.shape[1:])
        first += run.num_tokens


def _by_slot(layer_rows: Tensor, first: int, run: SlotRun) -> Tensor:
    """View tokens from `first` on of [heads, capacity, dim] as [slots, rows, heads, dim]."""
    per_head, per_token, per_item = layer_rows.stride()
    heads, _, dim = layer_rows.shape
    return layer_rows.as_strided(  # one call instead of three
        (len(run.slot_ids), run.num_rows, heads, dim),
        (run.num_rows * per_token, per_token, per_head, per_item),
        layer_rows.storage_offset() + first * per_token,
    )


def _tail_rows(spans: Sequence[Span], tail: WriteBuffer | None) -> tuple[int, int, int] | None:
    """Return (slot, first row, number of rows) that the tail keeps, if any."""
    if tail is None or not spans:
        return None
    last = spans[-1]
    skipped = tail.first_token - last.token_offset
    count = last.num_tokens - skipped
    if not 0 <= skipped <= last.num_tokens or count > tail.capacity_tokens:
        raise AssertionError(
            f"a tail of {tail.capacity_tokens} rows from {tail.first_token} on, for a last span "
            f"of {last.num_tokens} at {last.token_offset}"
        )
    return (last.slot_id, last.start + skipped, count) if count else None
