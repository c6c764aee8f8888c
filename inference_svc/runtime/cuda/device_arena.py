"""DeviceArena: an arena whose slots are copied from and to a device without the CPU's help.

    registered slots   one batch of copies for a component of a layer, a piece for each slot
    others             through staging memory that is locked in place, gathered there by the CPU

Every copy is enqueued on the calling thread's current stream, and is done when that is: callers
mark and wait for streams, as `CopyStream` does.

*Source:* CachedAttention, section 3.2 (load and save streams over pinned memory).
"""

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from inference_svc.runtime.cuda.driver import Driver
from inference_svc.runtime.cuda.registered_memory import RegisteredMemory
from inference_svc.runtime.kv.arena_kv import Arena, ArenaKv, ScatteredTokens, SlotRun
from inference_svc.runtime.kv.copy_stream import Mark, mark_enqueued
from shared.types.kv_layout import KVLayout

STAGING_BYTES = 32 << 20  # of one thread; what is larger goes in several pieces


class DeviceArena(ArenaKv):
    """See the module docstring; any thread may copy tokens that its lease covers."""

    def __init__(
        self, arena: Arena, layout: KVLayout, driver: Driver, device: torch.device
    ) -> None:
        """View the arena, and begin to register its slots.

        Args:
            arena: where the slots are mapped.
            layout: of their blocks.
            driver: of the device.
            device: that copies go to and come from.

        Raises:
            ValueError: as ArenaKv.
        """
        super().__init__(arena, layout)
        self._driver = driver
        self._device = device
        self._threads = threading.local()
        memory = arena.memory[: arena.slot_bytes * arena.num_slots]
        self.registered = RegisteredMemory(driver, memory, arena.slot_bytes)
        gone = weakref.finalize(self, self.registered.close)
        gone.atexit = False  # the system unlocks what a process leaves

    def gather(
        self, layer_index: int, component_index: int, run: SlotRun | ScatteredTokens, out: Tensor
    ) -> None:
        """Enqueue copies of a run's tokens to the device; see `ArenaKv.gather`."""
        if isinstance(run, SlotRun) and self.registered.has(max(run.slot_ids)):
            target = out if out.is_contiguous() else out.new_empty(out.shape)
            pieces = self._pieces(layer_index, component_index, run)
            self._driver.copy_batch(_addresses(target), *pieces)
            if target is not out:
                out.copy_(target)
            return
        parts: Sequence[SlotRun | ScatteredTokens] = run.split(_fitting_tokens(run, out))
        for part, rows in zip(parts, _rows_of(parts, out), strict=True):
            staging = self._staging()
            staged = staging.of(rows)
            super().gather(layer_index, component_index, part, staged)
            rows.copy_(staged, non_blocking=True)
            staging.in_use = mark_enqueued(self._device)

    def scatter(self, layer_index: int, component_index: int, run: SlotRun, source: Tensor) -> None:
        """Copy tokens of the device to a run's slots; see `ArenaKv.scatter`.

        Where slots are registered the copies are enqueued, else they are done on return.
        """
        if self.registered.has(max(run.slot_ids)):
            addresses, sizes = self._pieces(layer_index, component_index, run)
            self._driver.copy_batch(addresses, _addresses(source.contiguous()), sizes)
            return
        parts = run.split(_fitting_tokens(run, source))
        for part, rows in zip(parts, _rows_of(parts, source), strict=True):
            staging = self._staging()
            staged = staging.of(rows)
            staged.copy_(rows, non_blocking=True)
            mark_enqueued(self._device).synchronize()
            super().scatter(layer_index, component_index, part, staged)

    def _pieces(
        self, layer_index: int, component_index: int, run: SlotRun
    ) -> tuple[list[int], list[int]]:
        """Return the addresses and sizes of a run's pieces, one for each slot."""
        view = self.view(layer_index, component_index)
        apart, token_bytes = (stride * view.itemsize for stride in view.stride()[:2])
        first = view.data_ptr() + run.start * token_bytes
        sizes = [run.tokens_per_slot * token_bytes] * len(run.slot_ids)
        return [first + slot_id * apart for slot_id in run.slot_ids], sizes

    def _staging(self) -> "_Staging":
        """Return this thread's staging memory, which nothing is copied from any more."""
        if not hasattr(self._threads, "staging"):
            self._threads.staging = _Staging(self._driver.staging(STAGING_BYTES))
        staging: _Staging = self._threads.staging
        if staging.in_use is not None:
            staging.in_use.synchronize()
        return staging


class _Staging:
    """Memory that is locked in place, of one thread.

    Attributes:
        in_use: when what was copied from it is done; None: nothing was.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.in_use: Mark | None = None

    def of(self, rows: Tensor) -> Tensor:
        """View its beginning as a tensor of the shape and dtype of `rows`."""
        if rows.nbytes > len(self._memory):  # a slot's tokens of one component are that large
            self._memory = self._memory.new_empty(rows.nbytes)
        return self._memory[: rows.nbytes].view(rows.dtype).view(rows.shape)


def _fitting_tokens(run: SlotRun | ScatteredTokens, tokens: Tensor) -> int:
    """Return how many tokens of a run fit in staging memory; `tokens` are those, by rows."""
    return STAGING_BYTES // (tokens[0].nbytes // run.tokens_per_slot)


def _rows_of(parts: Sequence[SlotRun | ScatteredTokens], tokens: Tensor) -> Sequence[Tensor]:
    """Cut the rows of all tokens of a run to those of its parts."""
    return tokens.split_with_sizes([part.num_tokens // part.tokens_per_slot for part in parts])


def _addresses(tokens: Tensor) -> list[int]:
    """Return the address of each row of a contiguous tensor."""
    first, apart = tokens.data_ptr(), tokens.stride(0) * tokens.itemsize
    return [first + row * apart for row in range(len(tokens))]
