"""Dropping tokens of a session's context: of its KV in memory, and of what the store has.

    between turns   `discard`: the session's resident is compacted in place, the store notified
    mid-turn        `truncate`: a turn whose window is full waits until its KV is compacted; then
                    it is admitted again and resumes

The store is notified in the background, behind the saves of what was computed before; the session's
next load and its next save come after that. KV is compacted on the load thread, while steps of
others go on. KV that cannot be compacted (a norm behind RoPE, a failure) is dropped: the turn
loads, or recomputes.

Everything here runs on the event loop. Invariants: 1. a resident whose KV is moved is protected
by the scheduler until it is what its tokens and its lineage say, or gone; whoever asked for that
may be cancelled meanwhile; 2. a discard that is repeated finds what it has left, and leaves it so.
"""

import asyncio
from collections.abc import Callable, Sequence

from inference_svc.core.counters import Counters
from inference_svc.core.discards import OVERFLOW, Discard, Range, kept_runs, merge_ranges, without
from inference_svc.core.scheduling.held_slots import PageCopy
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.runtime.engine.engine_request import ContextCut, EngineRequest
from inference_svc.runtime.engine.requests import RequestMemory
from inference_svc.runtime.transfer.compaction import Compactor
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from shared.process.log import get_logger
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey

log = get_logger(__name__)


class Discards:
    """Drops tokens of sessions' contexts; see the module docstring.

    Args:
        tasks: the engine's task group.
        changed: callback when a resident may be used again.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        memory: RequestMemory,
        residents: ResidentSequences,
        compactor: Compactor,
        counters: Counters,
        tasks: asyncio.TaskGroup,
        changed: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._residents = residents
        self._compactor = compactor
        self._counters = counters
        self._tasks = tasks
        self._changed = changed
        self._over: dict[SessionKey, asyncio.Event] = {}  # set when a compaction under way ends

    @property
    def num_compacting(self) -> int:
        """Number of residents that are being compacted."""
        return len(self._over)

    async def settled(self, key: SessionKey) -> None:
        """Wait until nothing of a session is being moved by a discard."""
        while (over := self._over.get(key)) is not None:
            await over.wait()

    async def discard(self, key: SessionKey, cut: ContextCut) -> None:
        """Drop tokens of a session, see EngineLoop.discard; `cut.ranges` are merged, not empty.

        Up to the first wait everything is noted: who is queued before finds the resident busy. One
        that is being moved keeps its lineage: nobody will match it.
        """
        self._memory.discard_stored(key, cut)
        await self.settled(key)
        resident, after = self._scheduler.residents.get(key), cut.lineage_after
        if resident is None or resident.lineage == after != cut.lineage:  # it has been done before
            return
        ours = resident.token_ids
        if resident.lineage != cut.lineage or ours != tuple(cut.token_ids[: len(ours)]):
            self._memory.release_resident(key)  # it is of another context: of no use from now on
        elif self._scheduler.residents.begin_compaction(key):
            await asyncio.shield(self._start_compaction(key, ours, cut.ranges, after))

    def is_end(self, request: EngineRequest) -> bool:
        """Whether an answer ends because its window is full, and nothing may be dropped.

        Else, if its window is full, `request.to_drop` is set.

        Raises:
            InvalidDiscardError: for a range that is empty, or outside what is computed.
        """
        if not request.is_overflowing:
            return False
        ranges = request.truncate(request.token_ids) if request.truncate is not None else ()
        request.to_drop = merge_ranges(ranges, request.computed_tokens)
        if not request.to_drop:
            request.sink.window_full()
        return not request.to_drop

    def truncate(self, request: EngineRequest) -> None:
        """Drop `to_drop` of a request that overflowed; it waits, and its KV is resident now."""
        ranges, request.to_drop = request.to_drop, ()
        computed_ids = request.token_ids[: request.computed_tokens]
        self._memory.overflow(request)
        cut = ContextCut(computed_ids, ranges, request.lineage)
        self._memory.discard_stored(request.key, cut)
        num_before = request.input_tokens + request.num_sampled
        request.discards.append(Discard(ranges, num_before, OVERFLOW))
        self._scheduler.truncate(request, ranges)
        self._start_compaction(request.key, computed_ids, ranges, request.lineage)

    def _start_compaction(
        self,
        key: SessionKey,
        token_ids: Sequence[int],
        ranges: Sequence[Range],
        lineage: Lineage | None,
    ) -> asyncio.Task[None]:
        """Compact the resident of these tokens; then it has this lineage, or is released."""
        self._over[key] = asyncio.Event()
        copies = self._scheduler.residents.make_private(key, ranges[0][0])
        return self._tasks.create_task(self._compact(key, token_ids, ranges, lineage, copies))

    async def _compact(
        self,
        key: SessionKey,
        token_ids: Sequence[int],
        ranges: Sequence[Range],
        lineage: Lineage | None,
        copies: Sequence[PageCopy] | None,
    ) -> None:
        """Compact, or drop the KV where there is no room for pages that have to be copied."""
        kept, num_left = kept_runs(ranges, len(token_ids)), 0
        try:
            if copies is not None:
                num_left = await self._residents.discard(key, kept, self._compactor, copies)
        except Exception:  # what is left can be loaded or recomputed
            log.exception("shift_failed", session=str(key))
        finally:
            left_ids = without(token_ids, ranges)[:num_left]
            self._counters.add("shifts" if num_left or not kept else "shifts_failed")
            if not self._scheduler.residents.end_compaction(key, left_ids, lineage, ranges):
                self._residents.release(key)
            self._over.pop(key).set()
            self._changed()
