"""The chunks of a step: which running requests are computed, as far as there is room for their KV.

There has to be room in two places:

    the write ring   for tokens that are saved. A request that waits for a ring that stands still
                     is computed without being saved
    held rows        of layers with a window (`HeldRows`). If they are full, rows behind the window
                     are released. While another request copies the turn's KV, this has to wait,
                     and so does the turn. A turn that would write to pages that others hold, too,
                     gets other pages
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inference_svc.core.scheduling.request import ActiveRequests, Request, RequestState
from inference_svc.core.scheduling.residents import Residents
from inference_svc.core.scheduling.slot_budget import SlotBudget
from inference_svc.core.scheduling.step_plan import (
    Drafts,
    PlannedChunk,
    SchedulerLimits,
    plan_chunks,
)
from inference_svc.core.scheduling.write_slots import WriteSlots


@dataclass(frozen=True)
class StepChunks:
    """The chunks of a step, and the requests whose state they change.

    Attributes:
        chunks: the chunks.
        stalled: see `StepPlan`.
        unsaved: see `StepPlan`.
        patience_ns: time until which stalled requests wait for the write ring; None: none is
            stalled.
        moved: requests that got other pages for their next tokens.
    """

    chunks: tuple[PlannedChunk, ...]
    stalled: tuple[Request, ...]
    unsaved: tuple[Request, ...] = ()
    patience_ns: int | None = None
    moved: tuple[Request, ...] = ()


class ChunkPlanner:
    """Chooses the chunks of a step, and moves the windows and pages of the requests in it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        active: ActiveRequests,
        slots: SlotBudget,
        residents: Residents,
        write_slots: WriteSlots,
    ) -> None:
        self._limits = limits
        self._active = active
        self._slots = slots
        self._residents = residents
        self._write_slots = write_slots

    def plan(self, now_ns: int, drafts: Drafts) -> StepChunks:
        """Choose the chunks of a step, and release rows that fall behind their windows."""
        running = [
            request
            for request in self._active.in_state(RequestState.RUNNING)
            if not self._waits_for_copy(request, drafts)
        ]
        found = self._chunks(now_ns, running, drafts)
        moved = []
        for chunk in found.chunks:
            request, num_tokens = chunk.request, chunk.request.computed_tokens
            request.window_from = self.window_from(request.window_from, num_tokens, chunk.num_fed)
            if self._slots.write_window(request, num_tokens + chunk.num_fed):
                moved.append(request)
        return replace(found, moved=tuple(moved)) if moved else found

    def window_from(self, window_from: int, num_tokens: int, num_new: int | None = None) -> int:
        """Return the first token that layers with a window hold once there is room for new tokens.

        Args:
            window_from: the first token they hold now.
            num_tokens: number of the sequence's tokens.
            num_new: number of tokens to be appended; None: the most that ever come in a step.
        """
        rows = self._limits.held_rows
        if rows is None:
            return window_from
        num_new = rows.step_tokens if num_new is None else num_new
        return rows.first_held(window_from, num_tokens, num_new)

    def _waits_for_copy(self, request: Request, drafts: Drafts) -> bool:
        """Return whether the next tokens would replace rows of KV that is being copied."""
        if not self._residents.is_busy(request.key):
            return False
        num_new = min(request.chunk_tokens, self._limits.chunk_tokens)
        num_new += len(drafts.get(request.number, ()))
        first = self.window_from(request.window_from, request.computed_tokens, num_new)
        return first > request.window_from

    def _chunks(self, now_ns: int, running: Sequence[Request], drafts: Drafts) -> StepChunks:
        """Choose the chunks, and stop saving requests that wait for a ring that stands still."""
        limits, slots = self._limits, self._write_slots
        chunks, stalled = plan_chunks(running, limits, slots.num_free, drafts)
        patience_ns = slots.note_stall(now_ns, is_stalled=bool(stalled))
        if patience_ns is None or patience_ns > now_ns:
            return StepChunks(chunks, stalled, patience_ns=patience_ns)
        for request in stalled:
            request.is_saved = False
        chunks, still_stalled = plan_chunks(running, limits, slots.num_free, drafts)
        return StepChunks(chunks, still_stalled, unsaved=stalled)
