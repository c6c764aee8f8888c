"""Dropping tokens of a session's context: of its rows in memory, and of what the store has.

    between turns   `discard`: the session's resident closes up in place, and the store is told
    mid-turn        `truncate`: a turn whose window is full waits until its KV has closed up; then
                    it is admitted again and goes on

The store is told in the background, behind the saves of what was computed before; the session's
next load and its next save come after that. Rows close up on the load thread, while steps of others
go on. Rows that cannot (a norm behind RoPE, a failure) are given up: the turn loads, or recomputes.

Everything here runs on the event loop. Invariants: 1. a resident whose rows are moved is protected
by the scheduler until it is what its tokens and its lineage say, or gone; whoever asked for that
may be cancelled meanwhile; 2. a discard that is repeated finds what it has left, and leaves it so.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inference_svc.core.counters import Counters
from inference_svc.core.discards import OVERFLOW, Discard, Range, kept_runs, merge_ranges, without
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.runtime.engine.engine_job import EngineJob, as_token_bytes
from inference_svc.runtime.engine.job_memory import JobMemory
from inference_svc.runtime.transfer.compaction import Compactor
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from shared.process.log import get_logger
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey

log = get_logger(__name__)


@dataclass(frozen=True)
class ContextCut:
    """What a turn drops before it begins.

    Attributes:
        token_ids: of the session's context before, those that were computed.
        ranges: positions in these; merged.
        lineage: of these.
    """

    token_ids: Sequence[int]
    ranges: tuple[Range, ...]
    lineage: Lineage | None


class Discards:
    """See the module docstring.

    Args:
        tasks: of the engine.
        changed: called when a resident may be used again.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        memory: JobMemory,
        residents: ResidentSequences,
        shifts: Compactor,
        counters: Counters,
        tasks: asyncio.TaskGroup,
        changed: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._residents = residents
        self._shifts = shifts
        self._counters = counters
        self._tasks = tasks
        self._changed = changed
        self._over: dict[SessionKey, asyncio.Event] = {}  # of the shifts under way

    @property
    def num_shifting(self) -> int:
        """Residents whose rows are closing up."""
        return len(self._over)

    async def settled(self, key: SessionKey) -> None:
        """Wait until nothing of a session is being moved by a discard."""
        while (over := self._over.get(key)) is not None:
            await over.wait()

    async def discard(
        self,
        key: SessionKey,
        token_ids: Sequence[int],
        ranges: Sequence[Range],
        lineage: Lineage | None,
    ) -> None:
        """See EngineLoop.discard.

        Up to the first wait everything is noted: who is queued before finds the resident busy. One
        that is being moved keeps its lineage: nobody will match it.
        """
        given = as_token_bytes(token_ids)
        after = None if lineage is None else lineage.after(given, ranges)
        self._memory.discard_stored(key, given, ranges, lineage)
        await self.settled(key)
        resident = self._scheduler.residents.get(key)
        if resident is None or resident.lineage == after != lineage:  # it has been done before
            return
        ours = resident.token_ids
        if resident.lineage != lineage or ours != tuple(token_ids[: len(ours)]):
            self._memory.release_resident(key)  # it is of another context: of no use from now on
        elif self._scheduler.residents.begin_shift(key):
            await asyncio.shield(self._start_closing_up(key, ours, ranges, after))

    def is_end(self, job: EngineJob) -> bool:
        """Whether an answer ends because its window is full, and nothing may be dropped.

        Else the job knows what it is about to drop, if its window is full.

        Raises:
            InvalidDiscardError: for a range that is empty, or outside what is computed.
        """
        if not job.request.is_overflowing:
            return False
        ranges = job.truncate(job.request.token_ids) if job.truncate is not None else ()
        job.to_drop = merge_ranges(ranges, job.request.computed_tokens)
        if not job.to_drop:
            job.sink.window_full()
        return not job.to_drop

    def truncate(self, job: EngineJob) -> None:
        """Drop that of a job that overflowed, whose request waits: its KV is resident now."""
        ranges, job.to_drop = job.to_drop, ()
        request, num_computed = job.request, job.request.computed_tokens
        computed_ids = request.token_ids[:num_computed]
        self._memory.overflow(job)
        self._memory.discard_stored(job.key, job.token_bytes(num_computed), ranges, request.lineage)
        job.discards.append(Discard(ranges, job.input_tokens + request.num_sampled, OVERFLOW))
        job.context_cut(ranges)
        self._scheduler.truncated(request, ranges)
        self._start_closing_up(job.key, computed_ids, ranges, request.lineage)

    def _start_closing_up(
        self,
        key: SessionKey,
        token_ids: Sequence[int],
        ranges: Sequence[Range],
        lineage: Lineage | None,
    ) -> asyncio.Task[None]:
        """Drop rows of the resident of these tokens; then it is of this lineage, or gone."""
        self._over[key] = asyncio.Event()
        return self._tasks.create_task(self._close_up(key, token_ids, ranges, lineage))

    async def _close_up(
        self,
        key: SessionKey,
        token_ids: Sequence[int],
        ranges: Sequence[Range],
        lineage: Lineage | None,
    ) -> None:
        kept, num_left = kept_runs(ranges, len(token_ids)), 0
        try:
            num_left = await self._residents.discard(key, kept, self._shifts)
        except Exception:  # what is left can be loaded or recomputed
            log.exception("shift_failed", session=str(key))
        finally:
            left_ids = without(token_ids, ranges)[:num_left]
            self._counters.add("shifts" if num_left or not kept else "shifts_failed")
            if not self._scheduler.residents.end_shift(key, left_ids, lineage):
                self._residents.release(key)
            self._over.pop(key).set()
            self._changed()
