"""Load: arena slots -> sequence KV, with keys embedded at the positions of this turn.

    arena slots   per layer and component [num_slots, block_tokens, kv_heads, dim], keys before RoPE
    sequence KV   per layer [1, kv_heads, capacity_tokens, dim], keys after RoPE

Only copies, layer by layer: it may run on a copy thread while `step` computes other sequences, or
waits at the KV's gate for the very next layer. On a CPU a kernel copies all tokens of a layer in
one call, and rotates keys on the way. Where there is none, torch copies a key from memory to memory
and rotates it in place, in pieces that are still in the core's cache. On a device keys land in
scratch memory, and a kernel rotates them while it writes them to their token slots.

Source: CachedAttention, sections 3.2.1 (layer-wise pre-loading) and 3.4 (positions decoupled from
stored keys).
"""

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.runtime.kv.arena_kv import ArenaKv, part_of
from inference_svc.runtime.kv.layer_tensors import TokenRoom, TokenTensors
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.kv.slot_runs import SlotRun
from inference_svc.runtime.memory import copy_to_device
from inference_svc.runtime.positions.recipes import Calibration, ComponentRecipe, PostRotary
from inference_svc.runtime.positions.rotary import RotaryTable
from inference_svc.runtime.positions.rotation import (
    BY_TORCH,
    EmbedKernel,
    LoadKernels,
    Rotator,
    Tables,
    TokenCopy,
)
from inference_svc.runtime.transfer.spans import Span
from inference_svc.runtime.transfer.token_runs import Run, balanced, place_of, placed, token_runs
from shared.types.granted_slots import GrantedWindow

PIECE_ITEMS = 1 << 17  # elements rotated at once: 512 KiB in float32; twice as much is slower
# On a device, where a call costs more than the memory it reads: 16 MiB of scratch in float32.
DEVICE_PIECE_ITEMS = 1 << 22


class LayerLoader:
    """Loads spans into a sequence's KV, one layer at a time, in any order of layers.

    The caller keeps the counters: it moves `kv.num_tokens` and `tail.end_token` to the end of the
    spans, at once if the sequence's KV has a gate, else after the last layer.
    """

    def __init__(
        self,
        kv: SequenceKv,
        arena: ArenaKv,
        spans: Sequence[Span],
        calibration: Calibration,
        tail: WriteBuffer | None = None,
        kernels: LoadKernels = BY_TORCH,
        *,
        windows: Sequence[GrantedWindow] = (),
    ) -> None:
        """Prepare the copies.

        On a CPU that is all that takes operations of torch. Each gives up the interpreter's lock,
        for which a copy thread would then have to wait beside a forward.

        Args:
            kv: the sequence's KV, with room for the spans; the caller holds it.
            arena: the arena of the slots; the caller holds their lease.
            spans: the spans, at least one, as `check_spans` accepts them.
            calibration: the layout and recipes of the model that the KV and the stored bytes
                belong to.
            tail: a write buffer that begins within the last span, or at its end. It keeps the
                span's tokens from there on as they are stored, before RoPE, since the next store
                replaces that block by a longer one. None: nothing is saved.
            kernels: those that load tokens; keys that a norm follows are left to torch.
            windows: the windows of the last tokens, which layers with a window are loaded from;
                they may begin before the first span.
        """
        self._kv = kv
        self._arena = arena
        self._layout = calibration.layout
        self._layers = calibration.layers
        self._tail = tail
        self._embed_kernel, self._load_kernel = kernels.embed, kernels.load
        num_parts = calibration.layout.window_slots
        parts = [spans, *(part_of(windows, part) for part in range(num_parts))]
        self._sources = [_Source(part, tail) if part else None for part in parts]
        self._copies: list[list[TokenCopy]] = []
        if self._load_kernel is not None:
            self._copies = [list(self._copies_of(index)) for index in range(len(self._layers))]

    @torch.inference_mode()
    def load(self, layer_index: int) -> None:
        """Load one layer of all spans, or of its window, whose bytes are in the slots."""
        part = self._layout.part_of(layer_index)
        source = self._sources[part]
        if source is None:  # a grant that another one follows has no windows
            return
        for component, recipe in enumerate(self._layers[layer_index].components):
            if self._loads_by_kernel(recipe):
                continue
            if recipe.rotary is None:
                self._place(source, layer_index, component)
            elif self._embed_kernel is None or recipe.post is not None:
                self._embed(source, layer_index, component, recipe.rotary, recipe.post)
            else:
                self._land(source, layer_index, component, recipe.rotary, self._embed_kernel)
        if self._load_kernel is not None:
            self._load_kernel(self._copies[layer_index])
        elif self._tail is not None and source.tail_run is not None:
            places = source.places_in_tail(self._tail, source.tail_run)
            for component in range(len(self._layers[layer_index].components)):
                kept = self._tail.components[component][layer_index]
                self._arena.gather_to(layer_index, component, source.tail_run, kept, places)

    def _loads_by_kernel(self, recipe: ComponentRecipe) -> bool:
        """Whether the kernel of a CPU copies a component and embeds it; no norm may follow."""
        return self._load_kernel is not None and recipe.post is None

    def _copies_of(self, layer_index: int) -> Iterator[TokenCopy]:
        """Yield what the kernel copies: a layer's tokens, and those that the tail keeps."""
        source = self._sources[self._layout.part_of(layer_index)]
        if source is None:
            return
        for component, recipe in enumerate(self._layers[layer_index].components):
            slots = self._arena.view(layer_index, component)
            if self._loads_by_kernel(recipe):
                tokens = self._kv.components[component]
                distances = source.distances(self._arena, layer_index, component)
                tables = None if recipe.rotary is None else source.tables(recipe.rotary)
                room = tokens.room(layer_index, source.first, source.num_tokens)
                yield TokenCopy(slots, distances, room, tables)
            if self._tail is not None and source.tail_run is not None:
                kept = self._tail.components[component]
                places = source.places_in_tail(self._tail, source.tail_run)
                room = TokenRoom(kept[layer_index], kept.token_dim, slots=places)
                distances = source.distances(self._arena, layer_index, component, of_tail=True)
                yield TokenCopy(slots, distances, room, None)

    def _place(self, source: "_Source", layer_index: int, component: int) -> None:
        """Copy a component that is not rotated to its token slots."""
        tokens = self._kv.components[component]
        if self._embed_kernel is not None:  # on a device a kernel gathers these, too
            region = tokens.region(layer_index)
            for run, places in source.places_in(tokens, layer_index):
                self._arena.gather_to(layer_index, component, run, region, places)
            return
        for run, first in placed(source.runs, source.first):
            with tokens.filling(layer_index, first, run.num_tokens) as place:
                self._arena.gather(layer_index, component, run, place_of(run, place, 0))

    def _embed(
        self,
        source: "_Source",
        layer_index: int,
        component: int,
        rotary: RotaryTable,
        post: PostRotary | None,
    ) -> None:
        """Copy a component to its token slots piece by piece, and rotate it there."""
        tokens = self._kv.components[component]
        for piece in self._pieces_of(source, layer_index, component, rotary):
            with tokens.filling(layer_index, piece.first, piece.num_tokens) as keys:
                for run, first in piece.runs:
                    place = place_of(run, keys, first - piece.first)
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
        """Copy a component to scratch memory piece by piece; the kernel takes it from there."""
        tokens = self._kv.components[component]
        region = tokens.region(layer_index)
        for landing in self._landings_of(source, layer_index, component, rotary):
            keys = region.new_empty(len(landing.slots), *region.shape[1:])
            for run, first in landing.runs:
                self._arena.gather(layer_index, component, run, place_of(run, keys, first))
            kernel(keys, landing.tables, region, landing.slots)

    def _pieces_of(
        self, source: "_Source", layer_index: int, component: int, rotary: RotaryTable
    ) -> "list[_Piece]":
        """Return the pieces of a component; prepared once per thread, rotation and shape."""
        heads, dim = self._layers[layer_index].shape.parts[component]
        kind = (threading.get_ident(), rotary, (heads, dim))
        if kind not in source.pieces:
            pieces = source.pieces[kind] = []
            dtype = self._kv.components[component].dtype
            for first, count, runs in self._cut(source, layer_index, component):
                like = torch.empty(count, heads, dim, dtype=dtype, device="meta")
                rotator = rotary.rotator(like, first)
                pieces.append(_Piece(first, count, list(placed(runs, first)), rotator))
        return source.pieces[kind]

    def _landings_of(
        self, source: "_Source", layer_index: int, component: int, rotary: RotaryTable
    ) -> "list[_Landing]":
        """Return the pieces for the kernel; prepared once per thread, rotation and layer group."""
        tokens = self._kv.components[component]
        kind = (threading.get_ident(), rotary, tokens.group_of(layer_index))
        if kind not in source.landings:
            source.landings[kind] = [
                _Landing(
                    list(placed(runs, 0)),
                    rotary.tables(first, count),
                    tokens.slot_index(layer_index, first, count),
                )
                for first, count, runs in self._cut(source, layer_index, component)
            ]
        return source.landings[kind]

    def _cut(
        self, source: "_Source", layer_index: int, component: int
    ) -> Iterator[tuple[int, int, list[Run]]]:
        """Cut a component into pieces; yield the first position, number of tokens and runs."""
        heads, dim = self._layers[layer_index].shape.parts[component]
        is_cpu = self._kv.components[component].device.type == "cpu"
        items = PIECE_ITEMS if is_cpu else DEVICE_PIECE_ITEMS
        first = source.first
        for runs in balanced(source.runs, source.num_tokens, max(1, items // (heads * dim))):
            count = sum(run.num_tokens for run in runs)
            yield first, count, runs
            first += count


def copy_layer(source: SequenceKv, target: SequenceKv, layer_index: int, num_tokens: int) -> None:
    """Copy the first tokens of one layer to other KV of the same shapes.

    Of a layer with a window only those tokens are copied that both hold.

    Args:
        source: the KV to copy from.
        target: the KV to copy to.
        layer_index: the layer.
        num_tokens: number of tokens, from position 0 on.

    Raises:
        AssertionError: if the source has a state and more tokens than these: without the state
            behind them they are useless.
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
        runs: groups of slots that can be gathered in one call each.
        num_tokens: number of tokens of all runs.
        tail_run: the tokens of the last slot that the tail keeps; None: it keeps none.
        pieces: tokens that are rotated at once, by thread, table and shape of a key.
        landings: the same for a kernel, by thread, table and group of layers.
    """

    def __init__(self, spans: Sequence[Span], tail: WriteBuffer | None) -> None:
        self.first = spans[0].token_offset
        self.runs = list(token_runs(spans))
        self.num_tokens = sum(run.num_tokens for run in self.runs)
        self.tail_run = _tail_run(spans, tail)
        self.pieces: dict[tuple[int, RotaryTable, tuple[int, int]], list[_Piece]] = {}
        self.landings: dict[tuple[int, RotaryTable, int], list[_Landing]] = {}
        self._distances: dict[tuple[int, ...], Tensor] = {}
        self._tables: dict[RotaryTable, Tables] = {}
        self._places: dict[tuple[int, int], list[tuple[Run, Tensor]]] = {}
        self._tail_places: dict[int, Tensor] = {}

    def distances(
        self, arena: ArenaKv, layer_index: int, component: int, *, of_tail: bool = False
    ) -> Tensor:
        """Return the distances of all tokens, or of the tail's; see `ArenaKv.distances`."""
        kind = (*arena.view(layer_index, component).stride(), of_tail)
        if kind not in self._distances:
            runs = [self.tail_run] if of_tail and self.tail_run else self.runs
            self._distances[kind] = arena.distances(layer_index, component, runs)
        return self._distances[kind]

    def tables(self, rotary: RotaryTable) -> Tables:
        """Return a rotation's factors at the tokens' positions."""
        if rotary not in self._tables:
            self._tables[rotary] = rotary.tables(self.first, self.num_tokens)
        return self._tables[rotary]

    def places_in(self, tokens: TokenTensors, layer_index: int) -> list[tuple[Run, Tensor]]:
        """Return the runs, and the token slots of each, [n] int64 on the device.

        They are made once per thread, since each thread copies on streams of its own.
        """
        kind = (threading.get_ident(), tokens.group_of(layer_index))
        if kind not in self._places:
            self._places[kind] = [
                (run, tokens.slot_index(layer_index, first, run.num_tokens))
                for run, first in placed(self.runs, self.first)
            ]
        return self._places[kind]

    def places_in_tail(self, tail: WriteBuffer, run: SlotRun) -> Tensor:
        """Return the slots of the tail's first tokens, [n] int64 on the device; as `places_in`."""
        # A CPU has no streams, and there another thread prepares the slots than the one that loads.
        thread = 0 if tail.device.type == "cpu" else threading.get_ident()
        if thread not in self._tail_places:
            slots = tail.slots_of(tail.first_token, run.num_tokens)
            self._tail_places[thread] = copy_to_device(tail.device, torch.tensor(slots))
        return self._tail_places[thread]


class _Piece(NamedTuple):
    """Tokens that are rotated at once.

    Attributes:
        first: position of the first token.
        num_tokens: number of tokens.
        runs: the runs that they are copied from, and the position of each run's first token.
        rotator: their prepared rotation.
    """

    first: int
    num_tokens: int
    runs: list[tuple[Run, int]]
    rotator: Rotator


class _Landing(NamedTuple):
    """Tokens that a kernel embeds at once.

    Attributes:
        runs: the runs that they are copied from, and how many of the tokens come before each.
        tables: the rotation's factors at their positions.
        slots: [n] int64 on the device, the token slots that they go to.
    """

    runs: list[tuple[Run, int]]
    tables: Tables
    slots: Tensor


def _tail_run(spans: Sequence[Span], tail: WriteBuffer | None) -> SlotRun | None:
    """Return the tokens of the last span that the tail keeps; None: it keeps none."""
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
