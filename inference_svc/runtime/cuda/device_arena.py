"""DeviceArena: an arena whose slots are copied from and to a device without the CPU's help.

    registered slots   one launch reads them where they are, for a component of a layer, or writes
                       them, for a component of all layers that are there
    others             through staging memory that is locked in place, gathered there by the CPU

Every copy is enqueued on the calling thread's current stream, and is done when that is: callers
mark and wait for streams, as `CopyStream` does.

*Source:* CachedAttention, section 3.2 (load and save streams over pinned memory).
"""

import threading
import weakref
from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from inference_svc.runtime.cuda.driver import Driver
from inference_svc.runtime.cuda.slot_copies import TokensInSlots, TokensOnDevice
from inference_svc.runtime.kv.arena_kv import Arena, ArenaKv
from inference_svc.runtime.kv.copy_stream import Mark, mark_enqueued
from inference_svc.runtime.kv.layer_tensors import Places
from inference_svc.runtime.kv.slot_runs import ScatteredTokens, SlotRun
from shared.cuda.registered_memory import RegisteredMemory
from shared.types.kv_layout import KVLayout

STAGING_BYTES = 32 << 20  # of one thread; what is larger goes in several pieces


class DeviceArena(ArenaKv):
    """See the module docstring; any thread may copy tokens that its lease covers."""

    def __init__(
        self,
        arena: Arena,
        layout: KVLayout,
        driver: Driver,
        device: torch.device,
        *,
        registers: bool = True,
    ) -> None:
        """View the arena, and begin to register its slots.

        Args:
            arena: where the slots are mapped.
            layout: of their blocks.
            driver: of the device.
            device: that copies go to and come from.
            registers: whether slots are registered here; else all go through staging memory.

        Raises:
            ValueError: as ArenaKv.
        """
        super().__init__(arena, layout)
        self._driver = driver
        self._device = device
        self._threads = threading.local()
        self.registered: RegisteredMemory | None = None
        if registers:
            memory = arena.memory[: arena.slot_bytes * arena.num_slots]
            self.registered = RegisteredMemory(driver, memory, arena.slot_bytes)
            gone = weakref.finalize(self, self.registered.close)
            gone.atexit = False  # the system unlocks what a process leaves

    def gather(
        self, layer_index: int, component_index: int, run: SlotRun | ScatteredTokens, out: Tensor
    ) -> None:
        """Enqueue copies of a run's tokens to the device; see `ArenaKv.gather`."""
        if self._has_registered(run):
            target = out if out.is_contiguous() else out.new_empty(out.shape)
            slots = self._tokens_in_slots((layer_index,), component_index, run)
            self._driver.gather(slots, TokensOnDevice(run.by_token(target)))
            if target is not out:
                out.copy_(target)
            return
        parts: Sequence[SlotRun | ScatteredTokens] = run.split(
            fitting_tokens(run, out, STAGING_BYTES)
        )
        for part, rows in zip(parts, rows_of(parts, out), strict=True):
            staging = self._staging()
            staged = staging.of(rows)
            super().gather(layer_index, component_index, part, staged)
            rows.copy_(staged, non_blocking=True)
            staging.in_use = mark_enqueued(self._device)

    def gather_to(
        self,
        layer_index: int,
        component_index: int,
        run: SlotRun | ScatteredTokens,
        region: Tensor,
        places: Tensor,
    ) -> None:
        """Enqueue copies of a run's tokens to places of a region; see `ArenaKv.gather_to`."""
        if self._has_registered(run) and region[0].is_contiguous():
            slots = self._tokens_in_slots((layer_index,), component_index, run)
            self._driver.gather(slots, TokensOnDevice(region, places))
            return
        super().gather_to(layer_index, component_index, run, region, places)

    def scatter(self, layer_index: int, component_index: int, run: SlotRun, source: Tensor) -> None:
        """Copy tokens of the device to a run's slots, by staging memory; see `ArenaKv.scatter`.

        They are copied on return.
        """
        parts = run.split(fitting_tokens(run, source, STAGING_BYTES))
        for part, rows in zip(parts, rows_of(parts, source), strict=True):
            staging = self._staging()
            staged = staging.of(rows)
            staged.copy_(rows, non_blocking=True)
            mark_enqueued(self._device).synchronize()
            super().scatter(layer_index, component_index, part, staged)

    def scatter_layers(
        self,
        layers: Sequence[int],
        component_index: int,
        run: SlotRun,
        tensors: Sequence[Tensor],
        places: Places,
    ) -> None:
        """Copy tokens of some layers to a run's slots; see `ArenaKv.scatter_layers`.

        Where slots are registered the copies are enqueued, in one piece for layers of one shape.
        """
        if not self._has_registered(run):
            super().scatter_layers(layers, component_index, run, tensors, places)
            return
        by_shape: dict[tuple[torch.Size, tuple[int, ...]], list[int]] = {}
        for layer_index in layers:
            tensor = tensors[layer_index]
            by_shape.setdefault((tensor.shape, tensor.stride()), []).append(layer_index)
        for alike in by_shape.values():
            memory, index = places.of(tensors[alike[0]])
            first = tensors[alike[0]].data_ptr()
            apart = [tensors[layer_index].data_ptr() - first for layer_index in alike]
            here = TokensOnDevice(memory, index, apart)
            self._driver.scatter(here, self._tokens_in_slots(alike, component_index, run))

    def _has_registered(self, run: SlotRun | ScatteredTokens) -> bool:
        return self.registered is not None and self.registered.has(run.last_slot)

    def _tokens_in_slots(
        self, layers: Sequence[int], component_index: int, run: SlotRun | ScatteredTokens
    ) -> TokensInSlots:
        """Return where a run's tokens are, of layers whose tokens have one shape."""
        view = self.view(layers[0], component_index)
        bytes_apart, token_bytes = (stride * view.itemsize for stride in view.stride()[:2])
        offsets = run.distances_on(self._device, bytes_apart, token_bytes)
        first, *others = (
            self.layout.component_offset(layer_index, component_index) for layer_index in layers
        )
        apart = [0, *(offset - first for offset in others)]
        return TokensInSlots(view.data_ptr(), offsets, gcd(bytes_apart, token_bytes), apart)

    def _staging(self) -> "Staging":
        """Return this thread's staging memory, which nothing is copied from any more."""
        if not hasattr(self._threads, "staging"):
            self._threads.staging = Staging(self._driver.staging(STAGING_BYTES))
        staging: Staging = self._threads.staging
        staging.wait()
        return staging


class Staging:
    """Memory between the arena and KV, for some tokens at a time; one thread uses it.

    Attributes:
        in_use: when what was copied from it is done; None: nothing was.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.in_use: Mark | None = None

    def wait(self) -> None:
        """Wait until nothing is copied from it any more."""
        if self.in_use is not None:
            self.in_use.synchronize()
            self.in_use = None

    def of(self, rows: Tensor) -> Tensor:
        """View its beginning as a tensor of the shape and dtype of `rows`."""
        if rows.nbytes > len(self._memory):  # a slot's tokens of one component are that large
            self._memory = self._memory.new_empty(rows.nbytes)
        return self._memory[: rows.nbytes].view(rows.dtype).view(rows.shape)


def fitting_tokens(run: SlotRun | ScatteredTokens, tokens: Tensor, num_bytes: int) -> int:
    """Return how many tokens of a run fit in so many bytes; `tokens` are those, by rows."""
    return num_bytes // (tokens[0].nbytes // run.tokens_per_slot)


def rows_of(parts: Sequence[SlotRun | ScatteredTokens], tokens: Tensor) -> Sequence[Tensor]:
    """Cut the rows of all tokens of a run to those of its parts."""
    return tokens.split_with_sizes([part.num_tokens // part.tokens_per_slot for part in parts])
