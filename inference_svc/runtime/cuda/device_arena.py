"""DeviceArena: an arena whose slots are copied from and to a device without the CPU's help.

    registered slots   one kernel for a component of a layer reads them, or writes them, in place
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
from inference_svc.runtime.cuda.slot_copies import SlotPieces
from inference_svc.runtime.kv.arena_kv import Arena, ArenaKv, ScatteredTokens, SlotRun
from inference_svc.runtime.kv.copy_stream import Mark, mark_enqueued
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
        if isinstance(run, SlotRun) and self._has_registered(run):
            target = out if out.is_contiguous() else out.new_empty(out.shape)
            self._driver.gather(self._pieces(layer_index, component_index, run), target)
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

    def scatter(self, layer_index: int, component_index: int, run: SlotRun, source: Tensor) -> None:
        """Copy tokens of the device to a run's slots; see `ArenaKv.scatter`.

        Where slots are registered the copies are enqueued, else they are done on return.
        """
        if self._has_registered(run):
            pieces = self._pieces(layer_index, component_index, run)
            self._driver.scatter(source.contiguous(), pieces)
            return
        parts = run.split(fitting_tokens(run, source, STAGING_BYTES))
        for part, rows in zip(parts, rows_of(parts, source), strict=True):
            staging = self._staging()
            staged = staging.of(rows)
            staged.copy_(rows, non_blocking=True)
            mark_enqueued(self._device).synchronize()
            super().scatter(layer_index, component_index, part, staged)

    def _has_registered(self, run: SlotRun) -> bool:
        return self.registered is not None and self.registered.has(max(run.slot_ids))

    def _pieces(self, layer_index: int, component_index: int, run: SlotRun) -> SlotPieces:
        """Return where a run's pieces are, one for each slot."""
        view = self.view(layer_index, component_index)
        bytes_apart, token_bytes = (stride * view.itemsize for stride in view.stride()[:2])
        first = view.data_ptr() + run.start * token_bytes
        piece_bytes = run.tokens_per_slot * token_bytes
        return SlotPieces(first, bytes_apart, run.indices_on(self._device), piece_bytes)

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

