"""ArenaKv: the mapped arena of one layout as tensors, and copies from and to its slots.

A slot holds a block: per layer and component (keys, values) `block_tokens` tokens, [tokens, *shape]
in the component's dtype, in a layout's order. One tensor per layer and component spans all slots,
so that tokens of many slots move in one call instead of one per slot.

Owns the views; knows no sequences and no positions.

Invariant: the views keep the arena mapped (`shared.kvd_client.arena_map`). Their memory stays
readable as long as they live, but its contents are valid only under a lease.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inference_svc.runtime.kv.layer_tensors import Places
from inference_svc.runtime.kv.slot_runs import ScatteredTokens, SlotRun
from shared.types.granted_slots import GrantedWindow
from shared.types.kv_layout import ITEM_BYTES, KVLayout


class Arena(Protocol):
    """A mapped arena."""

    @property
    def memory(self) -> memoryview:
        """The bytes of all slots, one after another."""

    @property
    def slot_bytes(self) -> int:
        """Distance between slots, in bytes."""

    @property
    def num_slots(self) -> int:
        """Number of slots."""


class Block(Protocol):
    """The first tokens of a slot, and their position in a sequence."""

    @property
    def slot_id(self) -> int:
        """Index of the slot in the arena."""

    @property
    def token_offset(self) -> int:
        """Position in the sequence of the first token."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""


@dataclass(frozen=True)
class SlotTokens:
    """Tokens [start, start + num_tokens) of a slot, for positions from `token_offset` on.

    Serves both as a block and as a span of it.
    """

    slot_id: int
    token_offset: int
    num_tokens: int
    start: int = 0


def part_of(windows: Sequence[GrantedWindow], part: int) -> list[SlotTokens]:
    """Return the slots of one part of granted windows.

    Args:
        windows: the windows, whose KV is divided between several slots.
        part: index into a window's slots.
    """
    return [
        SlotTokens(window.slot_ids[part], window.token_offset, window.num_tokens, window.start)
        for window in windows
    ]


class ArenaKv:
    """An arena's tensors; any thread may copy tokens that its lease covers."""

    def __init__(self, arena: Arena, layout: KVLayout) -> None:
        """View the arena; done once per arena, since it takes some microseconds per component.

        Raises:
            ValueError: the arena is closed, or its slots are too small for a block.
        """
        if arena.slot_bytes < layout.block_bytes:
            raise ValueError(
                f"the arena has slots of {arena.slot_bytes} bytes, but blocks have "
                f"{layout.block_bytes}"
            )
        self.layout = layout
        self.num_slots = arena.num_slots
        memory = arena.memory
        num_bytes = arena.slot_bytes * arena.num_slots
        slots = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)
        self._slots = slots.view(arena.num_slots, arena.slot_bytes)[:, : layout.block_bytes]
        dtypes = {component.dtype for layer in layout.layers for component in layer.components}
        flat = {
            dtype: torch.frombuffer(
                memory, dtype=getattr(torch, dtype), count=num_bytes // ITEM_BYTES[dtype]
            )
            for dtype in dtypes
        }
        self._views = [
            [
                self._view(flat[component.dtype], arena.slot_bytes, layer_index, index)
                for index, component in enumerate(layer.components)
            ]
            for layer_index, layer in enumerate(layout.layers)
        ]

    def view(self, layer_index: int, component_index: int) -> Tensor:
        """View one component of all slots, [num_slots, block_tokens, *shape]."""
        return self._views[layer_index][component_index]

    def gather(
        self, layer_index: int, component_index: int, run: SlotRun | ScatteredTokens, out: Tensor
    ) -> None:
        """Copy a run's tokens out of the arena.

        Args:
            layer_index: index of the layer in the layout.
            component_index: 0: keys, before RoPE; 1: values; 2: index keys.
            run: the slots and their tokens.
            out: [slots, tokens_per_slot, *shape], or [n, *shape] for scattered tokens; of the
                component's dtype, with any strides, on any device.
        """
        if isinstance(run, ScatteredTokens):
            self._gather_scattered(self._views[layer_index][component_index], run, out)
            return
        tokens = self._tokens(layer_index, component_index, run)
        if run.is_consecutive:
            out.copy_(tokens.narrow(0, run.slot_ids[0], len(run.slot_ids)))
        elif out.device.type == "cpu":
            torch.index_select(tokens, 0, run.indices, out=out)
        else:
            out.copy_(tokens.index_select(0, run.indices))

    def gather_to(
        self,
        layer_index: int,
        component_index: int,
        run: SlotRun | ScatteredTokens,
        region: Tensor,
        places: Tensor,
    ) -> None:
        """Copy a run's tokens to any slots of a memory region.

        Args:
            layer_index: see `gather`.
            component_index: see `gather`.
            run: see `gather`.
            region: [slots, *shape] on any device; it holds tokens of other sequences too.
            places: [num_tokens] int64 on its device: the slots in `region`.
        """
        tokens = region.new_empty(run.num_tokens, *region.shape[1:])
        self.gather(layer_index, component_index, run, run.by_slot(tokens))
        region.index_copy_(0, places, tokens)

    def distances(
        self, layer_index: int, component_index: int, runs: Sequence[SlotRun | ScatteredTokens]
    ) -> Tensor:
        """Return the distances of tokens from the first one of `view`, [n] int64, in elements.

        Raises:
            IndexError: a slot is not one of the arena's.
        """
        per_slot, per_token = self.view(layer_index, component_index).stride()[:2]
        found = torch.cat([run.distances(per_slot, per_token) for run in runs])
        if int(found.min()) < 0 or int(found.max()) >= self.num_slots * per_slot:
            raise IndexError(f"slots outside of an arena of {self.num_slots}")
        return found

    def read_state(self, slot_ids: Sequence[int]) -> Tensor:
        """Copy a state out of its slots, [state_bytes] uint8."""
        return self._slots[list(slot_ids)].flatten()[: self.layout.state_bytes]

    def write_state(self, slot_ids: Sequence[int], packed: Tensor) -> None:
        """Copy a state, [state_bytes] uint8 on any device, to its slots, a part to each in order.

        The remaining bytes of the last slot are set to zero: whole slots are stored, and must not
        leak earlier contents.
        """
        size = self.layout.block_bytes
        host = packed.cpu()
        for index, slot_id in enumerate(slot_ids):
            part = host[index * size : (index + 1) * size]
            self._slots[slot_id, : len(part)] = part
            self._slots[slot_id, len(part) :] = 0

    def clear_unwritten(self, windows: Sequence[GrantedWindow]) -> None:
        """Set those bytes of windows' slots to zero to which no KV of their tokens is written.

        Whole slots are stored, and must not leak earlier contents.
        """
        for window in windows:
            for layers, slot_id in zip(self.layout.window_parts, window.slot_ids, strict=True):
                for start, end in self._gaps(layers, window.num_tokens):
                    self._slots[slot_id, start:end] = 0

    def _gaps(self, layers: Sequence[int], num_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield byte ranges [start, end) of a slot that `num_tokens` tokens of these layers leave.

        They lie behind the tokens of each component.
        """
        written = 0
        for layer_index in layers:
            for index, component in enumerate(self.layout.layers[layer_index].components):
                start = self.layout.component_offset(layer_index, index)
                if written < start:
                    yield written, start
                written = start + num_tokens * component.token_bytes
        if written < self.layout.block_bytes:
            yield written, self.layout.block_bytes

    def _gather_scattered(self, view: Tensor, run: ScatteredTokens, out: Tensor) -> None:
        """Copy single tokens, by one index if the slot stride is a whole number of tokens."""
        tokens_apart, odd = divmod(view.stride(0), view.stride(1))
        if odd or self.num_slots == 0:
            out.copy_(view[run.slot_ids, run.offsets])
            return
        num_tokens = (self.num_slots - 1) * tokens_apart + view.shape[1]
        flat = view.as_strided((num_tokens, *view.shape[2:]), view.stride()[1:])
        indices = run.slot_ids * tokens_apart + run.offsets
        if out.device.type == "cpu":
            torch.index_select(flat, 0, indices, out=out)
        else:
            out.copy_(flat.index_select(0, indices))

    def scatter(self, layer_index: int, component_index: int, run: SlotRun, source: Tensor) -> None:
        """Copy `source`, shaped like `out` of `gather`, to a run's tokens; no other byte changes.

        Args:
            layer_index: see `gather`.
            component_index: see `gather`.
            run: see `gather`.
            source: [slots, tokens_per_slot, *shape], on any device.
        """
        tokens = self._tokens(layer_index, component_index, run)
        if run.is_consecutive:  # five times as fast as an index for a few slots
            tokens.narrow(0, run.slot_ids[0], len(run.slot_ids)).copy_(source)
        else:
            tokens.index_copy_(0, run.indices, source.cpu())

    def scatter_layers(
        self,
        layers: Sequence[int],
        component_index: int,
        run: SlotRun,
        tensors: Sequence[Tensor],
        places: Places,
    ) -> None:
        """Copy tokens of some layers to a run's slots; no other byte changes.

        Args:
            layers: indices of the layers.
            component_index: index of the component.
            run: the slots and their tokens.
            tensors: by layer, [slots, *shape].
            places: the slots of the run's tokens in each tensor.
        """
        for layer_index in layers:
            tokens = places.read(tensors[layer_index])
            self.scatter(layer_index, component_index, run, run.by_slot(tokens))

    def _tokens(self, layer_index: int, component_index: int, run: SlotRun) -> Tensor:
        """View the run's tokens of every slot, [num_slots, tokens_per_slot, *shape]."""
        return self._views[layer_index][component_index].narrow(1, run.start, run.tokens_per_slot)

    def _view(self, flat: Tensor, slot_bytes: int, layer_index: int, index: int) -> Tensor:
        layout = self.layout
        component = layout.layers[layer_index].components[index]
        item_bytes = ITEM_BYTES[component.dtype]
        strides = [1]
        for size in reversed((layout.block_tokens, *component.shape)[1:]):
            strides.append(strides[-1] * size)
        return flat.as_strided(
            (self.num_slots, layout.block_tokens, *component.shape),
            (slot_bytes // item_bytes, *reversed(strides)),
            layout.component_offset(layer_index, index) // item_bytes,
        )


# Makes the views of an arena: for copies by the CPU, or by a device (`cuda/device_arena.py`).
OpenArena = Callable[[Arena, KVLayout], ArenaKv]
