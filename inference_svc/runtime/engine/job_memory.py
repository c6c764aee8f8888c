"""What memory a job has, and how it goes back; the scheduler's account of it.

    sequence KV   released when the job ends without an answer, or given to a resident
    write buffer  released when its save is over, which may be long after the job's end
    resident      released when the scheduler evicts it or its session ends

Everything here runs on the event loop. Invariants: 1. every row that is given back is given back to
the scheduler in the same call; 2. a save is opened with the write buffer it reads and outlives it
never.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from inference_svc.core.counters import Counters
from inference_svc.core.discards import Range
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.runtime.engine.engine_job import EngineJob
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.sequence_kv import WriteBuffer
from inference_svc.runtime.store.save_stream import SaveStream
from inference_svc.runtime.store.saves import DiscardLink, Saves
from inference_svc.runtime.store.session_store import SessionStore
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey

# Each has up to a block of rows beside the scheduler's account: for its tail.
MOST_RESIDENTS = 128


class JobMemory:
    """See the module docstring.

    Args:
        changed: called when rows came back.

    Attributes:
        num_saving: saves under way, and discards and ends of sessions that the store is being told.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: KVPool,
        residents: ResidentSequences,
        saves: Saves,
        store: SessionStore,
        counters: Counters,
        tasks: asyncio.TaskGroup,
        changed: Callable[[], None],
    ) -> None:
        self.num_saving = 0
        self._scheduler = scheduler
        self._pool = pool
        self._residents = residents
        self._saves = saves
        self._store = store
        self._counters = counters
        self._tasks = tasks
        self._changed = changed

    # ---------------------------------------------------------------------------- write buffers

    def open_save(self, job: EngineJob, buffer: WriteBuffer) -> None:
        """Begin to save a buffer that is about to be filled."""
        stream = job.saves = self._saves.open(job.key, buffer, job.request.lineage)
        self.num_saving += 1
        self._tasks.create_task(self._save(job, stream, buffer), context=job.context.copy())

    async def _save(self, job: EngineJob, stream: SaveStream, buffer: WriteBuffer) -> None:
        try:
            await self._saves.run(job.key, stream)
            if job.is_kept and job.is_final and job.saves is stream:
                await self._store.end_session(job.key)
        except asyncio.CancelledError:  # the engine stops: there is nobody left to account to
            self._pool.release(buffer)
            raise
        self._pool.release(buffer)
        self._scheduler.release_write(job.request)
        self.num_saving -= 1
        self._changed()

    async def _end_session(self, key: SessionKey) -> None:
        await self._store.end_session(key)
        self.num_saving -= 1
        self._changed()

    def discard_stored(
        self,
        key: SessionKey,
        token_ids: bytes,
        ranges: Sequence[Range],
        lineage: Lineage | None,
    ) -> None:
        """Have the store drop tokens, behind the session's saves; nobody waits for that."""
        link = self._saves.open_discard(key)
        self.num_saving += 1
        self._tasks.create_task(self._discard(key, link, token_ids, ranges, lineage))

    async def _discard(
        self,
        key: SessionKey,
        link: DiscardLink,
        token_ids: bytes,
        ranges: Sequence[Range],
        lineage: Lineage | None,
    ) -> None:
        await self._saves.run_discard(key, link, token_ids, ranges, lineage)
        self.num_saving -= 1
        self._changed()

    # ----------------------------------------------------------------------------- sequence KV

    def keep(self, job: EngineJob, token_ids: Sequence[int]) -> None:
        """The job is over: save the first of its tokens; its KV may stay as a resident.

        Of a session that has ended nothing stays, and the store is told once the save is over.
        """
        job.is_kept = True
        if not job.is_final:
            self._keep_resident(job, token_ids)
        if job.saves is not None:
            job.saves.finish(job.token_bytes(len(token_ids)))
        elif job.is_final:
            self.num_saving += 1
            self._tasks.create_task(self._end_session(job.key))
        self.release_kv(job)

    def preempt(self, job: EngineJob) -> None:
        """The job waits again: its KV is a resident now, and all of it is saved."""
        self._leave_resident(job, job.write_buffer)

    def overflow(self, job: EngineJob) -> None:
        """The same, but rows of it are about to be dropped: its last block is not going to grow."""
        self._leave_resident(job, None)

    def _leave_resident(self, job: EngineJob, buffer: WriteBuffer | None) -> None:
        num_tokens = job.request.computed_tokens
        self._become_resident(job, num_tokens, buffer)
        if job.saves is not None:
            job.saves.finish(job.token_bytes(num_tokens))
        job.detach()

    def void(self, job: EngineJob) -> None:
        """What the job computed cannot be believed: nothing of it is kept or saved."""
        if job.kv is not None:
            self._pool.release(job.kv)
        if job.saves is not None:
            job.saves.abandon()
        job.detach()

    def give_up(self, job: EngineJob) -> None:
        """The job has no answer: nothing more is saved, its memory goes back.

        What its KV has of the session's history is as good as it was, and stays if it may: not
        if the turn has dropped something while it was answered, which no other turn will.
        """
        num_tokens = min(job.request.computed_tokens, job.request.history_tokens)
        if not job.discards:
            self._keep_resident(job, job.request.token_ids[:num_tokens])
        if job.saves is not None:
            job.saves.abandon()
        elif job.write_buffer is not None:  # it was cancelled before its save was opened
            self._pool.release(job.write_buffer)
        self.release_kv(job)
        if job.discards:
            self.release_resident(job.key)

    def release_kv(self, job: EngineJob) -> None:
        """Give the sequence's KV back, if it is still the job's."""
        if job.kv is not None:
            self._pool.release(job.kv)
            job.kv = None
        self._scheduler.release_kv(job.request)
        self._changed()

    # -------------------------------------------------------------------------------- residents

    def _keep_resident(self, job: EngineJob, token_ids: Sequence[int]) -> None:
        """Let the KV of a job that is over stay with its rows of these tokens, if it may.

        Not if some of them may never arrive, nor if the position-free rows of the last block are
        gone with an earlier write buffer: its growth could not be stored.
        """
        kv, buffer = job.kv, job.write_buffer
        is_whole = kv is not None and kv.gate is None and 0 < len(token_ids) <= kv.num_tokens
        has_tail = buffer is None or buffer.first_token <= len(token_ids)
        if not is_whole or not has_tail:
            return
        if self._scheduler.keep_resident(job.request, token_ids, time.monotonic_ns()):
            self._become_resident(job, len(token_ids), job.write_buffer)
            for key in self._scheduler.evict_surplus(MOST_RESIDENTS):
                self.evict(key)

    def _become_resident(self, job: EngineJob, num_tokens: int, buffer: WriteBuffer | None) -> None:
        assert job.kv is not None, "a job that has computed has a sequence's KV"  # noqa: S101
        self._residents.put(job.key, job.kv, num_tokens, buffer)
        job.kv = None

    def evict(self, key: SessionKey) -> None:
        """The scheduler evicted a resident."""
        self._counters.add("residents_evicted")
        self._residents.release(key)

    def end_move(self, job: EngineJob) -> None:
        """A resident's rows are in the job's KV, or nobody wants them: the old ones can go."""
        self._scheduler.resident_moved(job.request)
        self._residents.release(job.key)
        self._changed()

    def release_resident(self, key: SessionKey) -> None:
        """Give up a session's resident, if it has one that is not in use."""
        if self._scheduler.drop_resident(key):
            self._residents.release(key)
            self._changed()
