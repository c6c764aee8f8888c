"""Load: arena slots -> sequence KV, with keys embedded at the positions of this turn.

    arena slots   per layer and component [num_slots, block_tokens, kv_heads, dim], keys before RoPE
    sequence KV   per layer [1, kv_heads, capacity_tokens, dim], keys after RoPE

Pure copying, layer by layer: it may run on a copy thread while `step` runs other sequences, or
waits at the KV's gate for the very next layer. A key goes from memory to memory in one copy, which
waits for reads and writes at once, and is turned where it then lies: in pieces that are still in
the core's cache. On a device keys land beside it, and a kernel turns them while it writes them to
their token slots.

Source: CachedAttention, sections 3.2.1 (layer-wise pre-loading) and 3.4 (positions decoupled from
stored keys).
"""

import threading
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.runtime.kv.arena_kv import ArenaKv, part_of
from inference_svc.runtime.kv.layer_tensors import TokenTensors
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.kv.slot_runs import ScatteredTokens, SlotRun
from inference_svc.runtime.memory import copy_to_device
from inference_svc.runtime.positions.recipes import Calibration, PostRotary
from inference_svc.runtime.positions.rotary import RotaryTable
from inference_svc.runtime.positions.rotation import EmbedKernel, Rotator, Tables
from inference_svc.runtime.transfer.spans import Span
from shared.types.granted_slots import GrantedWindow
from shared.types.units import ceil_div

PIECE_ITEMS = 1 << 17  # elements turned at once: 512 KiB in float32; twice as much is slower
# Elsewhere than on a CPU, where calls cost more than what they read: 16 MiB in float32, of scratch.
DEVICE_PIECE_ITEMS = 1 << 22
SHORT_RUN = 64  # tokens; a run costs as much as its tokens one by one, if it is so short

Run = SlotRun | ScatteredTokens


class LayerLoader:
    """Loads spans into a sequence's KV, one layer at a time, in any order of layers.

    Counters are the caller's: it moves `kv.num_tokens` and `tail.end_token` to the end of the
    spans, at once if the sequence's KV has a gate, else after the last layer.
    """

    def __init__(
        self,
        kv: SequenceKv,
        arena: ArenaKv,
        spans: Sequence[Span],
        calibration: Calibration,
        tail: WriteBuffer | None = None,
        embed: EmbedKernel | None = None,
        *,
        windows: Sequence[GrantedWindow] = (),
    ) -> None:
        """Prepare what all layers share.

        Args:
            kv: the sequence's KV, with room for the spans; the caller holds it.
            arena: the arena of the slots; the caller holds their lease.
            spans: the spans, at least one, as `check_spans` accepts them.
            calibration: what is known of the model that the KV and the stored bytes belong to.
            tail: a write buffer that begins within the last span, or at its end: the span's tokens
                from there on are kept as they are stored, since the next store replaces that block
                by a longer one.
            embed: what embeds keys that no norm follows; None: torch, where they lie.
            windows: of the last tokens, which is all that layers with a window are loaded of; they
                may begin before the first span.
        """
        self._kv = kv
        self._arena = arena
        self._layout = calibration.layout
        self._layers = calibration.layers
        self._tail = tail
        self._kernel = embed
        num_parts = calibration.layout.window_slots
        parts = [spans, *(part_of(windows, part) for part in range(num_parts))]
        self._sources = [_Source(part, tail) if part else None for part in parts]

    @torch.inference_mode()
    def load(self, layer_index: int) -> None:
        """Load one layer of all spans, or of its window, whose bytes are in the slots."""
        part = self._layout.part_of(layer_index)
        source = self._sources[part]
        if source is None:  # of what is followed by another grant a window has nothing
            return
        for component, recipe in enumerate(self._layers[layer_index].components):
            if recipe.rotary is None:
                self._place(source, layer_index, component)
            elif self._kernel is None or recipe.post is not None:
                self._embed(source, layer_index, component, recipe.rotary, recipe.post)
            else:
                self._land(source, layer_index, component, recipe.rotary, self._kernel)
        if self._tail is not None and source.tail_run is not None:
            places = source.places_in_tail(self._tail, source.tail_run)
            for component in range(len(self._layers[layer_index].components)):
                kept = self._tail.components[component][layer_index]
                self._arena.gather_to(layer_index, component, source.tail_run, kept, places)

    def _place(self, source: "_Source", layer_index: int, component: int) -> None:
        """Copy tokens as they are to their token slots."""
        tokens = self._kv.components[component]
        if self._kernel is not None:  # there are kernels for these, too
            region = tokens.region(layer_index)
            for run, places in source.places_in(tokens, layer_index):
                self._arena.gather_to(layer_index, component, run, region, places)
            return
        for run, first in _placed(source.runs, source.first):
            with tokens.filling(layer_index, first, run.num_tokens) as place:
                self._arena.gather(layer_index, component, run, _place_of(run, place, 0))

    def _embed(
        self,
        source: "_Source",
        layer_index: int,
        component: int,
        rotary: RotaryTable,
        post: PostRotary | None,
    ) -> None:
        """Copy a component to its token slots piece by piece, and turn it there."""
        tokens = self._kv.components[component]
        for piece in self._pieces_of(source, layer_index, component, rotary):
            with tokens.filling(layer_index, piece.first, piece.num_tokens) as keys:
                for run, first in piece.runs:
                    place = _place_of(run, keys, first - piece.first)
                    self._arena.gather(layer_index, component, run, place)
                piece.rotator.rotate_in_place(keys)
                if post is not None:
                    post.apply_to(keys)

    def _land(
        self,
        source: "_Source",
        layer_index: int,
        component: int,
        rotary: RotaryTable,
        kernel: EmbedKernel,
    ) -> None:
        """Copy a component to memory of its own, from where the kernel takes it, piece by piece."""
        tokens = self._kv.components[component]
        region = tokens.region(layer_index)
        for landing in self._landings_of(source, layer_index, component, rotary):
            keys = region.new_empty(len(landing.slots), *region.shape[1:])
            for run, first in landing.runs:
                self._arena.gather(layer_index, component, run, _place_of(run, keys, first))
            kernel(keys, landing.tables, region, landing.slots)

    def _pieces_of(
        self, source: "_Source", layer_index: int, component: int, rotary: RotaryTable
    ) -> "list[_Piece]":
        """Return the pieces of a kind of component, with this thread's scratch."""
        heads, dim = self._layers[layer_index].shape.parts[component]
        kind = (threading.get_ident(), rotary, (heads, dim))
        if kind not in source.pieces:
            pieces = source.pieces[kind] = []
            dtype = self._kv.components[component].dtype
            for first, count, runs in self._cut(source, layer_index, component):
                like = torch.empty(count, heads, dim, dtype=dtype, device="meta")
                rotator = rotary.rotator(like, first)
                pieces.append(_Piece(first, count, list(_placed(runs, first)), rotator))
        return source.pieces[kind]

    def _landings_of(
        self, source: "_Source", layer_index: int, component: int, rotary: RotaryTable
    ) -> "list[_Landing]":
        """Return the pieces of a kind of component, and where they go; made on this thread."""
        tokens = self._kv.components[component]
        kind = (threading.get_ident(), rotary, tokens.group_of(layer_index))
        if kind not in source.landings:
            source.landings[kind] = [
                _Landing(
                    list(_placed(runs, 0)),
                    rotary.tables(first, count),
                    tokens.slot_index(layer_index, first, count),
                )
                for first, count, runs in self._cut(source, layer_index, component)
            ]
        return source.landings[kind]

    def _cut(
        self, source: "_Source", layer_index: int, component: int
    ) -> Iterator[tuple[int, int, list[Run]]]:
        """Cut a component into pieces; yields the first position, number of tokens and runs."""
        heads, dim = self._layers[layer_index].shape.parts[component]
        is_cpu = self._kv.components[component].device.type == "cpu"
        items = PIECE_ITEMS if is_cpu else DEVICE_PIECE_ITEMS
        first = source.first
        for runs in _balanced(source.runs, source.num_tokens, max(1, items // (heads * dim))):
            count = sum(run.num_tokens for run in runs)
            yield first, count, runs
            first += count


def copy_layer(source: SequenceKv, target: SequenceKv, layer_index: int, num_tokens: int) -> None:
    """Copy the first `num_tokens` tokens of one layer to other KV of the same shapes.

    Of a layer with a window those that both hold.

    Raises:
        AssertionError: if the model has states and more tokens than these: they are of no use
            without the state behind them.
    """
    if source.states is not None and num_tokens < source.num_tokens:
        raise AssertionError("a part of a sequence with a state is copied to another")
    for old, new in zip(source.components, target.components, strict=True):
        first = max(old.first_token(layer_index), new.first_token(layer_index))
        with new.filling(layer_index, first, num_tokens - first) as copied:
            copied.copy_(old.read(layer_index, first, num_tokens - first))


class _Source:
    """Tokens in slots, in order, without gaps; shared by all layers that lie there.

    Attributes:
        first: position of the first token.
        runs: what can be gathered in one call each.
        tail_run: those of the last slot that the tail keeps, if any.
        pieces: what is turned in one go, by thread, table and shape of a key.
        landings: the same for a kernel, by thread, table and group of layers.
    """

    def __init__(self, spans: Sequence[Span], tail: WriteBuffer | None) -> None:
        self.first = spans[0].token_offset
        self.runs = list(_runs(spans))
        self.num_tokens = sum(run.num_tokens for run in self.runs)
        self.tail_run = _tail_run(spans, tail)
        self.pieces: dict[tuple[int, RotaryTable, tuple[int, int]], list[_Piece]] = {}
        self.landings: dict[tuple[int, RotaryTable, int], list[_Landing]] = {}
        self._places: dict[tuple[int, int], list[tuple[Run, Tensor]]] = {}
        self._tail_places: dict[int, Tensor] = {}

    def places_in(self, tokens: TokenTensors, layer_index: int) -> list[tuple[Run, Tensor]]:
        """Return the runs, and where each goes, [n] int64 on the device; made on this thread."""
        kind = (threading.get_ident(), tokens.group_of(layer_index))
        if kind not in self._places:
            self._places[kind] = [
                (run, tokens.slot_index(layer_index, first, run.num_tokens))
                for run, first in _placed(self.runs, self.first)
            ]
        return self._places[kind]

    def places_in_tail(self, tail: WriteBuffer, run: SlotRun) -> Tensor:
        """Return where the tail keeps its first tokens, [n] int64 on the device; as `places_in`."""
        thread = threading.get_ident()
        if thread not in self._tail_places:
            slots = tail.slots_of(tail.first_token, run.num_tokens)
            self._tail_places[thread] = copy_to_device(tail.device, torch.tensor(slots))
        return self._tail_places[thread]


class _Piece(NamedTuple):
    """Tokens that are turned in one go.

    Attributes:
        first: position of the first token.
        num_tokens: how many they are.
        runs: what they are copied from, and the position of the first token of each.
        rotator: the prepared rotation of them.
    """

    first: int
    num_tokens: int
    runs: list[tuple[Run, int]]
    rotator: Rotator


class _Landing(NamedTuple):
    """Tokens that a kernel embeds in one go.

    Attributes:
        runs: what they are copied from, and how many of the tokens come before each.
        tables: factors of their positions.
        slots: [n] int64 on the device, where they go.
    """

    runs: list[tuple[Run, int]]
    tables: Tables
    slots: Tensor


def _runs(spans: Sequence[Span]) -> Iterator[Run]:
    """Put spans together that can be gathered in one call.

    Usually all full blocks, then the last one. After discards of tokens here and there no two spans
    are of the same places in their slots: tokens of short runs are gathered one by one.
    """
    short: list[SlotRun] = []
    for run in _equal_runs(spans):
        if run.num_tokens < SHORT_RUN:
            short.append(run)
            continue
        yield from _joined(short)
        short = []
        yield run
    yield from _joined(short)


def _joined(short: Sequence[SlotRun]) -> Iterator[Run]:
    """Make one of several short runs."""
    if len(short) < 2:
        yield from short
        return
    slot_ids = [slot for run in short for slot in run.slot_ids for _ in range(run.tokens_per_slot)]
    offsets = [
        offset
        for run in short
        for _ in run.slot_ids
        for offset in range(run.start, run.start + run.tokens_per_slot)
    ]
    yield ScatteredTokens(torch.tensor(slot_ids), torch.tensor(offsets))


def _equal_runs(spans: Sequence[Span]) -> Iterator[SlotRun]:
    """Put successive spans of the same places in their slots together."""
    for place, group in groupby(spans, lambda span: (span.start, span.num_tokens)):
        yield SlotRun([span.slot_id for span in group], *place)


def _balanced(runs: Sequence[Run], num_tokens: int, max_tokens: int) -> Iterator[list[Run]]:
    """Divide runs, at least one, into as few groups as there are `max_tokens`, of about one size.

    None has more than `max_tokens` and less than a slot.
    """
    # Rounded up by a slot: else what the groups lack in whole slots would be one group more.
    size = ceil_div(num_tokens, ceil_div(num_tokens, max_tokens))
    size += max(run.tokens_per_slot for run in runs) - 1
    group: list[Run] = []
    count = 0
    for run in runs:
        for part in run.split(size):
            if group and count + part.num_tokens > size:
                yield group
                group, count = [], 0
            group.append(part)
            count += part.num_tokens
    yield group


def _placed(runs: Sequence[Run], first: int) -> Iterator[tuple[Run, int]]:
    """Pair each run with the position of its first token, that of the first run being `first`."""
    for run in runs:
        yield run, first
        first += run.num_tokens


def _place_of(run: Run, tokens: Tensor, first: int) -> Tensor:
    """View the part of [n, kv_heads, dim] that begins at `first` as `gather` fills it."""
    if isinstance(run, ScatteredTokens):
        return tokens.narrow(0, first, run.num_tokens)
    per_token, per_head, per_item = tokens.stride()
    _, heads, dim = tokens.shape
    return tokens.as_strided(  # one call instead of two
        (len(run.slot_ids), run.tokens_per_slot, heads, dim),
        (run.tokens_per_slot * per_token, per_token, per_head, per_item),
        tokens.storage_offset() + first * per_token,
    )


def _tail_run(spans: Sequence[Span], tail: WriteBuffer | None) -> SlotRun | None:
    """Return those tokens of the last span that the tail keeps, if any."""
    if tail is None:
        return None
    last = spans[-1]
    skipped = tail.first_token - last.token_offset
    count = last.num_tokens - skipped
    if not 0 <= skipped <= last.num_tokens or tail.first_token + count > tail.room_end:
        raise AssertionError(
            f"a tail with room for tokens {tail.first_token} to {tail.room_end}, for a last span "
            f"of {last.num_tokens} at {last.token_offset}"
        )
    return SlotRun([last.slot_id], last.start + skipped, count) if count else None
