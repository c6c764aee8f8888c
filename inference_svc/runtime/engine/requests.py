"""The requests of the engine, their memory, and how they end without an answer.

    sequence KV   released when the request ends without an answer, or given to a resident
    write buffer  grows with each chunk, shrinks as blocks are stored; released when its save is
                  over, which may be long after the request's end
    resident      released when the scheduler evicts it or its session ends

Where the write ring has no room for more tokens, `make_room` makes some: full blocks are stored
without waiting for their group; if nothing is being stored, the longest partial block is stored as
it is; and a save that fails or makes no progress is abandoned.

Everything here runs on the event loop. Invariants: 1. a token slot is released in the scheduler's
account in the same call in which its memory is; 2. a save is opened with the write buffer that it
reads, and never outlives it.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import Context

from inference_svc.core.counters import Counters
from inference_svc.core.errors import DeadlineExceededError
from inference_svc.core.retention import NO_RETENTION
from inference_svc.core.scheduling.request import Request, RequestEvent, RequestState
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.runtime.engine.engine_request import ContextCut, EngineRequest
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.kv.write_ring import WriteRing
from inference_svc.runtime.store.saves import Saves, SaveStream
from inference_svc.runtime.store.session_store import SessionStore
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from shared.types.session_key import SessionKey


class RequestMemory:
    """The memory of all requests, and the scheduler's account of it.

    Args:
        on_change: callback when token slots were released.

    Attributes:
        num_saving: number of calls to the store under way: saves, discards, retentions and ends of
            sessions.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: KVPool,
        ring: WriteRing,
        residents: ResidentSequences,
        saves: Saves,
        store: SessionStore,
        counters: Counters,
        tasks: asyncio.TaskGroup,
        on_change: Callable[[], None],
    ) -> None:
        self.num_saving = 0
        self._scheduler = scheduler
        self._pool = pool
        self._ring = ring
        self._residents = residents
        self._saves = saves
        self._store = store
        self._counters = counters
        self._tasks = tasks
        self._on_change = on_change

    # ---------------------------------------------------------------------------- write buffers

    def open_save(
        self, request: EngineRequest, buffer: WriteBuffer, shared_from: SessionKey | None
    ) -> None:
        """Open the save of a write buffer that is about to be filled.

        Args:
            request: the request that fills it.
            buffer: the buffer; the save releases its memory when it is over.
            shared_from: the session whose saves store the tokens before the buffer's; None: the
                request's own.
        """
        buffer.load_ends = request.load_ends or (request.prompt_tokens,)
        stream = self._saves.open(
            request.key, buffer, request.lineage, self._on_change, shared_from=shared_from
        )
        request.saves = stream
        self._start(self._save(request, stream, buffer), request.context.copy())

    async def _save(self, request: EngineRequest, stream: SaveStream, buffer: WriteBuffer) -> None:
        """Run a save to its end, and release its write buffer."""
        try:
            await self._saves.run(request.key, stream)
        finally:
            buffer.memory.release()
            self._on_change()
        if request.is_kept and request.saves is stream:
            await self._report(request)

    async def _report(self, request: EngineRequest) -> None:
        """Report to the store how long to retain the session, or that it has ended."""
        if request.retention != NO_RETENTION:
            prefix = request.token_bytes(request.prefix_tokens)
            await self._store.retain(request.key, request.retention, prefix)
        if request.is_final:
            await self._store.end_session(request.key)

    def extend(self, request: EngineRequest, num_tokens: int) -> None:
        """Take slots of the write ring for a request's next tokens; the plan has reserved them."""
        if request.write_buffer is not None:
            self._ring.extend(request.write_buffer, request.computed_tokens + num_tokens)

    def make_room(self, running: Iterable[EngineRequest]) -> None:
        """Make room in the write ring: store what can be stored now of these requests.

        Args:
            running: the running requests, at least one of which has stalled.
        """
        self._counters.add("write_stalls")
        waiting = []
        for request in running:
            stream, kv = request.saves, request.kv
            if stream is None or kv is None or kv.gate is not None:
                continue
            if stream.refused_reason != "":
                self.abandon_save(request)
            elif stream.should_follow(kv.num_tokens, is_tight=True):
                stream.follow(request.token_bytes(kv.num_tokens), None)
            elif stream.num_unsaved:
                waiting.append((stream.num_unsaved, request.number, request))
        if waiting and self._saves.is_idle:
            request = max(waiting)[-1]
            if request.saves is not None:
                self._counters.add("saves_cut_short")
                request.saves.cut_short(request.token_bytes(request.computed_tokens))
                block_tokens = self._scheduler.limits.block_tokens
                request.note_block_end(request.computed_tokens, block_tokens)

    def abandon_save(self, request: EngineRequest) -> None:
        """Save nothing more of a request's KV; the request itself continues."""
        if request.saves is not None:
            self._counters.add("save_dropped")
            request.saves.abandon()
        request.is_saved = False
        request.saves = request.write_buffer = None
        self._on_change()

    def discard_stored(self, key: SessionKey, cut: ContextCut) -> None:
        """Drop tokens from the store in the background, after the session's saves."""
        link = self._saves.open_discard(key)
        self._start(self._saves.run_discard(key, link, cut.token_bytes, cut.ranges, cut.lineage))

    def _start(self, saving: Coroutine[None, None, None], context: Context | None = None) -> None:
        """Run calls to the store in the background, and count them in `num_saving`."""
        self.num_saving += 1
        self._tasks.create_task(self._count(saving), context=context)

    async def _count(self, saving: Coroutine[None, None, None]) -> None:
        # No `finally`: this raises only when the engine stops, and then the count is not read.
        await saving
        self.num_saving -= 1
        self._on_change()

    # ----------------------------------------------------------------------------- sequences' KV

    def keep(self, request: EngineRequest, token_ids: Sequence[int]) -> None:
        """Save the first tokens of a finished request; its KV may stay in memory as a resident.

        Nothing stays in memory of a session that has ended. Its end, and the retention that its
        client asks for, are reported to the store after the save.

        Args:
            request: the request, whose answer was accepted.
            token_ids: its first tokens, all computed.
        """
        request.is_kept = True
        if request.kv is not None and request.kv.num_tokens == len(token_ids):
            request.note_state()
        if not request.is_final:
            self._keep_resident(request, token_ids)
        if request.saves is not None:
            request.saves.finish(request.token_bytes(len(token_ids)))
        else:
            self._start(self._report(request))
        self.release_kv(request)

    def preempt(self, request: EngineRequest) -> None:
        """Make the KV of a preempted request a resident, and save all of it."""
        self._turn_into_resident(request, request.write_buffer)

    def overflow(self, request: EngineRequest) -> None:
        """Make the KV of a request whose window is full a resident, and save all of it.

        Tokens of it are about to be dropped. So its last block will not grow, and the resident
        needs no tail.
        """
        self._turn_into_resident(request, None)

    def _turn_into_resident(self, request: EngineRequest, buffer: WriteBuffer | None) -> None:
        """Make all KV of a request a resident, save it, and let the request wait again."""
        num_tokens = request.computed_tokens
        request.note_state()
        self._become_resident(request, num_tokens, buffer)
        if request.saves is not None:
            request.saves.finish(request.token_bytes(num_tokens))
        request.detach()

    def void(self, request: EngineRequest) -> None:
        """Throw away what a request computed over a history that did not arrive."""
        if request.kv is not None:
            self._pool.release(request.kv)
        if request.saves is not None:
            request.saves.abandon()
        request.detach()

    def release(self, request: EngineRequest) -> None:
        """Release the memory of a request that has no answer, and save nothing more.

        Its KV of the session's history is still valid, and stays as a resident if it may. It does
        not stay if the request dropped tokens while it was answered: no other turn has the context
        that is left.
        """
        num_tokens = min(request.computed_tokens, request.history_tokens)
        if not request.discards:
            self._keep_resident(request, request.token_ids[:num_tokens])
        if request.saves is not None:
            request.saves.abandon()
        elif request.write_buffer is not None:  # cancelled before its save was opened
            request.write_buffer.memory.release()
        self.release_kv(request)
        # If it was preempted, a resident holds its KV.
        if request.discards or not request.is_stored:
            self.release_resident(request.key)

    def release_kv(self, request: EngineRequest) -> None:
        """Release the sequence's KV, if it is still the request's."""
        if request.kv is not None:
            self._pool.release(request.kv)
            request.kv = None
        self._scheduler.release_kv(request)
        self._on_change()

    # -------------------------------------------------------------------------------- residents

    def _keep_resident(self, request: EngineRequest, token_ids: Sequence[int]) -> None:
        """Keep the KV of a request's first tokens as a resident, if the scheduler allows it.

        It is not kept while a load may still fail to bring some of it. A partial block whose
        pre-RoPE keys are gone, because it is stored already with other tokens, is left out: its
        growth could not be stored.
        """
        kv = request.kv
        token_ids = token_ids[: self._residents.kept_tokens(request.write_buffer, len(token_ids))]
        if kv is None or kv.gate is not None or not 0 < len(token_ids) <= kv.num_tokens:
            return
        if kv.states is not None and len(token_ids) < kv.num_tokens:  # a state covers all tokens
            return
        if self._scheduler.keep_resident(request, token_ids, time.monotonic_ns()):
            self._become_resident(request, len(token_ids), request.write_buffer)
            residents, rank = self._scheduler.residents, self._scheduler.queue.rank
            for key in residents.take_surplus(rank):
                self.evict(key)

    def _become_resident(
        self, request: EngineRequest, num_tokens: int, buffer: WriteBuffer | None
    ) -> None:
        """Hand a request's KV over to the residents."""
        assert request.kv is not None, "a request that has computed has a sequence's KV"  # noqa: S101
        boundary = self._residents.put(request.key, request.kv, num_tokens, buffer)
        self._scheduler.residents.note_boundary(request.key, boundary)
        request.kv = None

    def evict(self, key: SessionKey) -> None:
        """Release a resident that the scheduler has evicted."""
        self._counters.add("residents_evicted")
        self._residents.release(key)

    def end_copy(self, request: EngineRequest) -> None:
        """End the copy of a resident to the request's KV; release one of the session's own."""
        if self._scheduler.residents.end_copy(request):
            self._residents.release(request.key)
        self._on_change()

    def release_resident(self, key: SessionKey) -> None:
        """Release a session's resident, unless it has none or that is in use."""
        if self._scheduler.residents.drop(key):
            self._residents.release(key)
            self._on_change()


class Requests:
    """The table of the engine's requests, and how a request ends without an answer.

    Invariants: 1. a request is in the table from its submission until it is kept or released;
    2. memory that a load uses is released by that load, when it ends.

    Args:
        on_change: callback when a request has left the table.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        memory: RequestMemory,
        counters: Counters,
        on_change: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._counters = counters
        self._on_change = on_change
        self._requests: dict[int, EngineRequest] = {}  # by number
        self._dropped: list[EngineRequest] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(self._requests.values())

    def has(self, key: SessionKey) -> bool:
        """Whether the session has a request in the table."""
        return any(request.key == key for request in self)

    def get(self, request: Request) -> EngineRequest:
        """Return the EngineRequest of a request that the scheduler names."""
        return self._requests[request.number]

    def kv_of(self, key: SessionKey) -> SequenceKv:
        """Return the KV of the session's request that is ready, running or finished."""
        states = (RequestState.READY, RequestState.RUNNING, RequestState.FINISHED)
        (request,) = (found for found in self if found.key == key and found.state in states)
        assert request.kv is not None, "whoever has run has a sequence's KV"  # noqa: S101
        return request.kv

    def add(self, request: EngineRequest) -> None:
        """Add a request that was submitted."""
        self._requests[request.number] = request

    def forget(self, request: EngineRequest) -> bool:
        """Remove a request that is over; return False if it was removed before."""
        is_known = self._requests.pop(request.number, None) is not None
        self._on_change()
        return is_known

    def drop(self, request: EngineRequest) -> bool:
        """Cancel a request before the next step; return False if it is kept or released already."""
        if request.is_kept or request.number not in self._requests:
            return False
        self._dropped.append(request)
        return True

    def settle_dropped(self) -> None:
        """End the requests that were dropped, and release them unless a load uses their memory.

        Called while no step is under way.
        """
        dropped, self._dropped = self._dropped, []
        for request in dropped:
            if not request.is_over:
                self._scheduler.end(request, RequestEvent.CANCEL, time.monotonic_ns())
            self.release(request)

    def restart(self, request: EngineRequest) -> None:
        """Queue a request again whose history did not arrive; what it computed is thrown away."""
        request.num_failed_loads += 1
        self._memory.void(request)
        self._scheduler.restart(request)

    def expire(self, request: EngineRequest) -> None:
        """Fail a request whose deadline has passed; the scheduler has ended it already."""
        self._counters.add("expired")
        request.end(
            DeadlineExceededError(
                "the turn's deadline passed before it was complete",
                "submit it again with more time, or when the service is less busy",
            )
        )
        self.release(request)

    def fail(self, request: EngineRequest, error: Exception) -> None:
        """End a request with an error."""
        if not request.is_over:
            self._scheduler.end(request, RequestEvent.FAIL, time.monotonic_ns())
        request.end(error)
        self.release(request)

    def release(self, request: EngineRequest) -> None:
        """Release a request that has no answer; a load under way releases it when it ends."""
        request.in_batch.set()  # a load that waits for this event resumes, and then ends
        if request.load is None and self.forget(request):
            self._memory.release(request)
