"""DeviceArena: an arena whose registered slots a device copies without the CPU.

    registered slots   one kernel launch reads a component of a layer from them in place, or writes
                       a component of several layers to them
    other slots        go through pinned staging memory, which the CPU gathers and scatters

Every copy is enqueued on the calling thread's current stream, and is complete when that stream's
work is: callers record marks and wait for them, as `CopyStream` does.

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

STAGING_BYTES = 32 << 20  # per thread; larger copies are divided into pieces


class DeviceArena(ArenaKv):
    """An arena copied by a device; any thread may copy tokens that its lease covers."""

    def __init__(
        self,
        arena: Arena,
        layout: KVLayout,
        driver: Driver,
        device: torch.device,
        *,
        registers: bool = True,
    ) -> None:
        """View the arena, and start to register its slots in the background.

        Args:
            arena: the mapped arena.
            layout: the layout of its blocks.
            driver: the device's driver.
            device: the device.
            registers: whether to register slots; otherwise all copies go through staging memory.

        Raises:
            ValueError: see ArenaKv.
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
            gone.atexit = False  # at its end the system unlocks a process's memory itself

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
        """Enqueue copies of a run's tokens to slots of a region; see `ArenaKv.gather_to`."""
        if self._has_registered(run) and region[0].is_contiguous():
            slots = self._tokens_in_slots((layer_index,), component_index, run)
            self._driver.gather(slots, TokensOnDevice(region, places))
            return
        super().gather_to(layer_index, component_index, run, region, places)

    def scatter(self, layer_index: int, component_index: int, run: SlotRun, source: Tensor) -> None:
        """Copy tokens from the device to a run's slots through staging memory.

        Complete on return; see `ArenaKv.scatter`.
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

        If the slots are registered, the copies are enqueued, by one launch for layers of one shape.
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
            layer_offsets = [tensors[layer_index].data_ptr() - first for layer_index in alike]
            here = TokensOnDevice(memory, index, layer_offsets)
            self._driver.scatter(here, self._tokens_in_slots(alike, component_index, run))

    def _has_registered(self, run: SlotRun | ScatteredTokens) -> bool:
        return self.registered is not None and self.registered.has(run.last_slot)

    def _tokens_in_slots(
        self, layers: Sequence[int], component_index: int, run: SlotRun | ScatteredTokens
    ) -> TokensInSlots:
        """Return the addresses of a run's tokens in layers whose tokens have the same shape."""
        view = self.view(layers[0], component_index)
        bytes_apart, token_bytes = (stride * view.itemsize for stride in view.stride()[:2])
        offsets = run.distances_on(self._device, bytes_apart, token_bytes)
        first, *further = (
            self.layout.component_offset(layer_index, component_index) for layer_index in layers
        )
        layer_offsets = [0, *(offset - first for offset in further)]
        return TokensInSlots(view.data_ptr(), offsets, gcd(bytes_apart, token_bytes), layer_offsets)

    def _staging(self) -> "Staging":
        """Return this thread's staging memory, once copies from it are complete."""
        if not hasattr(self._threads, "staging"):
            self._threads.staging = Staging(self._driver.staging(STAGING_BYTES))
        staging: Staging = self._threads.staging
        staging.wait()
        return staging


class Staging:
    """Staging memory between the arena and KV; used by one thread.

    Attributes:
        in_use: the mark at which copies from it are complete; None: there are none.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.in_use: Mark | None = None

    def wait(self) -> None:
        """Wait until copies from it are complete."""
        if self.in_use is not None:
            self.in_use.synchronize()
            self.in_use = None

    def of(self, rows: Tensor) -> Tensor:
        """View its beginning as a tensor of the shape and dtype of `rows`."""
        if rows.nbytes > len(self._memory):  # a single slot's tokens of a component do not fit
            self._memory = self._memory.new_empty(rows.nbytes)
        return self._memory[: rows.nbytes].view(rows.dtype).view(rows.shape)


def fitting_tokens(run: SlotRun | ScatteredTokens, tokens: Tensor, num_bytes: int) -> int:
    """Return how many tokens of a run fit into `num_bytes`.

    Args:
        run: the run.
        tokens: its tokens as rows, [slots, tokens_per_slot, *shape] or [n, *shape].
        num_bytes: bytes of memory.
    """
    return num_bytes // (tokens[0].nbytes // run.tokens_per_slot)


def rows_of(parts: Sequence[SlotRun | ScatteredTokens], tokens: Tensor) -> Sequence[Tensor]:
    """Divide the rows of a run's tokens between its parts."""
    return tokens.split_with_sizes([part.num_tokens // part.tokens_per_slot for part in parts])
