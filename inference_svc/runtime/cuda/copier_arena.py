"""CopierArena: an arena whose slots kvd's copier copies to and from our GPU (`cuda_ipc`).

If the copier has not registered a slot yet, or is gone, copies go through staging memory as in
DeviceArena. So every call succeeds, also when the copier dies.
"""

from collections import deque
from itertools import cycle

import torch
from torch import Tensor

from inference_svc.runtime.cuda.copier_channel import CopierChannel, CopierGoneError, Place
from inference_svc.runtime.cuda.copier_link import CopierLink
from inference_svc.runtime.cuda.device_arena import DeviceArena, fitting_tokens, rows_of
from inference_svc.runtime.cuda.driver import Driver
from inference_svc.runtime.kv.arena_kv import Arena
from inference_svc.runtime.kv.copy_stream import mark_enqueued
from inference_svc.runtime.kv.slot_runs import ScatteredTokens, SlotRun
from shared.kvd_client.copy_jobs import MAX_JOB_SLOTS, Way
from shared.types.kv_layout import KVLayout

PLACES_AT_ONCE = 3  # places per call: one is being filled, one is waited for, one is being emptied


class CopierArena(DeviceArena):
    """An arena copied by the copier; any thread may copy tokens that its lease covers."""

    def __init__(
        self,
        arena: Arena,
        layout: KVLayout,
        driver: Driver,
        device: torch.device,
        link: CopierLink,
    ) -> None:
        """View the arena; see DeviceArena."""
        super().__init__(arena, layout, driver, device, registers=False)
        self._arena = arena
        self._link = link

    @property
    def is_ready(self) -> bool:
        """Whether the copier can copy all slots."""
        channel = self._link.channel
        return channel is not None and channel.has(self.num_slots - 1)

    def gather(
        self, layer_index: int, component_index: int, run: SlotRun | ScatteredTokens, out: Tensor
    ) -> None:
        """Enqueue copies of a run's tokens to the device; see `ArenaKv.gather`."""
        if isinstance(run, SlotRun):
            jobs = self._jobs(Way.LOAD, layer_index, component_index, run)
            if jobs is not None and jobs.copy(run, out):
                return
        super().gather(layer_index, component_index, run, out)

    def scatter(self, layer_index: int, component_index: int, run: SlotRun, source: Tensor) -> None:
        """Copy tokens from the device to a run's slots; complete on return.

        See `ArenaKv.scatter`.
        """
        jobs = self._jobs(Way.STORE, layer_index, component_index, run)
        if jobs is None or not jobs.copy(run, source):
            super().scatter(layer_index, component_index, run, source)

    def _jobs(
        self, way: Way, layer_index: int, component_index: int, run: SlotRun
    ) -> "_Jobs | None":
        """Return the jobs by which the copier copies a run; None: it cannot copy it now."""
        channel = self._link.channel
        token_bytes = self.view(layer_index, component_index)[0, 0].nbytes
        if (
            channel is None
            or channel.arena is not self._arena
            or not channel.has(max(run.slot_ids))
            or token_bytes * run.tokens_per_slot > channel.place_bytes
        ):
            return None
        offset = self.layout.component_offset(layer_index, component_index)
        return _Jobs(channel, way, self._device, offset + run.start * token_bytes)


class _Jobs:
    """The copier's jobs for one call, pipelined over several places of the ring."""

    def __init__(
        self, channel: CopierChannel, way: Way, device: torch.device, slot_offset: int
    ) -> None:
        self._channel = channel
        self._way = way
        self._device = device
        self._slot_offset = slot_offset
        self._under_way: deque[tuple[int, Place, Tensor]] = deque()

    def copy(self, run: SlotRun, tokens: Tensor) -> bool:
        """Copy a run's tokens.

        Args:
            run: the slots and their tokens.
            tokens: [slots, tokens_per_slot, *shape] on the device.

        Returns:
            Whether all were copied; False: the copier has died.
        """
        per_slot = run.tokens_per_slot
        fitting = fitting_tokens(run, tokens, self._channel.place_bytes)
        parts = run.split(min(fitting, MAX_JOB_SLOTS * per_slot))
        try:
            with self._channel.places(min(len(parts), PLACES_AT_ONCE)) as places:
                try:
                    for part, rows, place in zip(
                        parts, rows_of(parts, tokens), cycle(places), strict=False
                    ):
                        if len(self._under_way) == len(places):
                            self._finish_oldest()
                        self._submit(part, rows, place)
                finally:
                    # Also after an error: jobs must not use places that were given back.
                    while self._under_way:
                        self._finish_oldest()
        except CopierGoneError:
            return False
        return True

    def _submit(self, part: SlotRun, rows: Tensor, place: Place) -> None:
        if self._way is Way.STORE:
            place.of(rows).copy_(rows, non_blocking=True)
            mark_enqueued(self._device).synchronize()
        else:
            place.wait()
        piece_bytes = rows[0].nbytes
        job = self._channel.begin(self._way, place, part.slot_ids, self._slot_offset, piece_bytes)
        self._under_way.append((job, place, rows))

    def _finish_oldest(self) -> None:
        job, place, rows = self._under_way.popleft()
        self._channel.wait(job)
        if self._way is Way.LOAD:
            rows.copy_(place.of(rows), non_blocking=True)
            place.in_use = mark_enqueued(self._device)
