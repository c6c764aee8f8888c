"""Discards: dropping tokens of a session's context from its KV in memory and from the store.

    between turns   `discard`: the session's resident is compacted in place, the store notified
    mid-turn        `truncate`: a turn whose window is full waits until its KV is compacted; then
                    it is admitted again and resumes

The store is notified in the background, after the saves of what was computed before; the session's
next load and its next save come after that. KV is compacted on the load thread, while other
sequences are computed. KV that cannot be compacted (a norm behind RoPE, a failure) is dropped: the
turn loads, or recomputes.

Everything here runs on the event loop. Invariants: 1. the scheduler protects a resident whose KV is
being moved until its KV matches its tokens and lineage again, or it is gone, even if the caller is
cancelled meanwhile; 2. a discard that is repeated finds the result of the first, and changes
nothing.
"""

import asyncio
from collections.abc import Callable, Sequence

from inference_svc.core.counters import Counters
from inference_svc.core.ranges import Range, kept_runs, merge_ranges, without
from inference_svc.core.scheduling.held_slots import PageCopy
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.turn_record import OVERFLOW, Discard
from inference_svc.runtime.engine.engine_request import ContextCut, EngineRequest
from inference_svc.runtime.engine.requests import RequestMemory
from inference_svc.runtime.transfer.compaction import Compactor
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from shared.process.log import get_logger
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey

log = get_logger(__name__)


class Discards:
    """Drops tokens of sessions' contexts.

    Args:
        tasks: the engine's task group.
        on_change: callback when a resident may be used again.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        memory: RequestMemory,
        residents: ResidentSequences,
        compactor: Compactor,
        counters: Counters,
        tasks: asyncio.TaskGroup,
        on_change: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._residents = residents
        self._compactor = compactor
        self._counters = counters
        self._tasks = tasks
        self._on_change = on_change
        self._over: dict[SessionKey, asyncio.Event] = {}  # set when a compaction under way ends

    @property
    def num_compacting(self) -> int:
        """Number of residents that are being compacted."""
        return len(self._over)

    async def wait_for_compaction(self, key: SessionKey) -> None:
        """Wait until no KV of a session is being compacted."""
        while (over := self._over.get(key)) is not None:
            await over.wait()

    async def discard(self, key: SessionKey, cut: ContextCut) -> None:
        """Drop tokens of a session, see EngineLoop.discard; `cut.ranges` are merged, not empty.

        All bookkeeping is done before the first wait: a request that is queued by then finds the
        resident busy. While its KV moves, a resident has its old lineage, which no request matches.
        """
        self._memory.discard_stored(key, cut)
        await self.wait_for_compaction(key)
        resident, after = self._scheduler.residents.get(key), cut.lineage_after
        if resident is None or resident.lineage == after != cut.lineage:  # done before
            return
        held_ids = resident.token_ids
        if resident.lineage != cut.lineage or held_ids != tuple(cut.token_ids[: len(held_ids)]):
            self._memory.release_resident(key)  # it is of another context, and useless from now on
        elif self._scheduler.residents.begin_compaction(key):
            await asyncio.shield(self._start_compaction(key, held_ids, cut.ranges, after))

    def is_end(self, request: EngineRequest) -> bool:
        """Whether an answer ends because its window is full, and nothing may be dropped.

        If its window is full and something may be dropped, `request.to_drop` is set.

        Raises:
            InvalidDiscardError: for a range that is empty, or outside what is computed.
        """
        if not request.is_overflowing:
            return False
        ranges = request.truncate(request.token_ids) if request.truncate is not None else ()
        request.to_drop = merge_ranges(ranges, request.computed_tokens)
        if not request.to_drop:
            request.sink.on_window_full()
        return not request.to_drop

    def truncate(self, request: EngineRequest) -> None:
        """Drop `to_drop` of a request that overflowed; its KV becomes a resident, and it waits."""
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
        """Start to compact the resident of these tokens; it ends up with `lineage`, or released."""
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
        """Compact a resident, or drop it; `copies` None: there is no room for the page copies."""
        kept, num_left = kept_runs(ranges, len(token_ids)), 0
        try:
            if copies is not None:
                num_left = await self._residents.discard(key, kept, self._compactor, copies)
        except Exception:  # the KV is dropped; the tokens left can be loaded or recomputed
            log.exception("shift_failed", session=str(key))
        finally:
            left_ids = without(token_ids, ranges)[:num_left]
            self._counters.add("shifts" if num_left or not kept else "shifts_failed")
            if not self._scheduler.residents.end_compaction(key, left_ids, lineage, ranges):
                self._residents.release(key)
            self._over.pop(key).set()
            self._on_change()
