"""The Engine service: decodes requests, calls the cache engine, encodes its answers.

The cache engine never waits. Waiting for SSD reads, for slots and for sessions that are being
fetched is done here.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from kvd.caches.caches import Caches
from kvd.config import Settings
from kvd.core.engine import CacheEngine
from kvd.core.records.errors import InvalidRequestError, UnknownSessionError
from kvd.core.records.records import LeaseState, LoadAnswer, StoreAnswer
from kvd.engines.attached import Engine, Engines
from kvd.engines.data_socket import DataSocket, EngineUsers
from kvd.errors import AttachDeniedError, StoppingError
from kvd.rpc.queue_replica import QueueStreams
from kvd.runtime.cache import Cache
from kvd.wire.messages import (
    graft_of,
    key_of,
    lineage_of,
    load_response,
    ns_of,
    session_message,
    store_response,
)
from shared.config.reload import LiveSettings
from shared.kvd_client.messages import layout_of
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.pb.kvd.v1 import kvd_pb2_grpc
from shared.process.log import get_logger
from shared.types.block_key import TOKEN_BYTES
from shared.types.granted_slots import Lookup
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S
from shared.version import __version__

MAX_WAIT_S = 60.0  # longest wait of one call, for any deadline of the caller
MAX_NAME = 128  # characters of an engine's name

T = TypeVar("T")

log = get_logger(__name__)


class Draining:
    """The drain of kvd before it stops.

    Attributes:
        deadline_s: seconds from the begin of the drain until kvd stops.
        begun: set once, when the drain begins.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.begun = asyncio.Event()

    def refuse(self) -> None:
        """Raise StoppingError if the drain has begun."""
        if self.begun.is_set():
            raise StoppingError("kvd is stopping", "continue without kvd, and attach again later")


class EngineService(kvd_pb2_grpc.EngineServicer):  # type: ignore[misc]  # the stubs are untyped
    """Servicer of inference engines.

    Args:
        caches: caches of all layouts.
        engines: registry of attachments.
        data_socket: gives attach tokens to processes that connect to it.
        live: settings in force.
        draining: once it has begun, nothing new is granted.
        users: tenants that each user's engines may name.
    """

    def __init__(
        self,
        caches: Caches,
        engines: Engines,
        data_socket: DataSocket,
        live: LiveSettings[Settings],
        draining: Draining,
        users: EngineUsers,
    ) -> None:
        self._caches = caches
        self._engines = engines
        self._data_socket = data_socket
        self._live = live
        self._draining = draining
        self._users = users
        self._queues = QueueStreams(engines, live.loaded.settings.limits.max_queue_jobs, users)

    async def Attach(self, request: pb.AttachRequest, _: Any) -> AsyncIterator[pb.AttachEvent]:  # noqa: N802
        """Attach the process to which the token was given, until its data connection ends."""
        self._draining.refuse()
        layout = layout_of(request.layout)
        connection = self._data_socket.claim(request.data_token)
        try:
            cache, arena = await self._caches.open(layout)
            # No await between open() and attach(): without an engine, another layout could take
            # the arena's memory there.
            if connection.gone.is_set():
                raise AttachDeniedError(
                    "the data connection has ended", "connect to the data socket again"
                )
            engine, confirmed, lost = self._engines.attach(
                request.engine_name[:MAX_NAME],
                cache,
                connection,
                request.instance,
                request.held_leases,
                version=request.version[:MAX_NAME],
            )
            yield pb.AttachEvent(
                attached=pb.Attached(
                    engine_id=engine.engine_id,
                    arena_id=arena.arena_id,
                    slot_bytes=arena.slots.slot_bytes,
                    num_slots=arena.slots.num_slots,
                    confirmed_leases=confirmed,
                    lost_leases=lost,
                    kvd_version=__version__,
                    copiers=self._live.loaded.settings.copier.enabled,
                    retention=True,
                    expectations=True,
                    grafts=layout.position_mode == "decoupled" and not layout.window,
                    states=True,
                    windows=True,
                    fetch_waits=True,
                    local_calls=True,
                    max_queue_jobs=self._live.loaded.settings.limits.max_queue_jobs,
                )
            )
            await _first_of(connection.gone, self._draining.begun)
            if self._draining.begun.is_set():
                deadline_s = self._draining.deadline_s
                yield pb.AttachEvent(draining=pb.Draining(deadline_s=deadline_s))
                await connection.gone.wait()
        finally:
            if not connection.gone.is_set():
                # The process may still be copying: its slots stay leased until it is gone (D10).
                log.info("attach_stream_ended", engine=request.engine_name, pid=connection.pid)

    async def PrepareLoad(self, request: pb.PrepareLoadRequest, _: Any) -> pb.PrepareLoadResponse:  # noqa: N802
        """Lease slots that hold the session's KV, after reading missing blocks from SSD."""
        self._draining.refuse()
        engine, key = self._caller_and_session(request)
        waited_s = await self._wait_for_fetch(engine, key, request)
        respond = partial(load_response, waited_s=waited_s, has_columns=request.span_columns)
        until = _deadline(request.deadline_s or self._live.loaded.settings.limits.load_wait)
        prepare = partial(_prepare_load, request, key)
        answer = self._act(engine, prepare)
        while answer.miss_reason == "busy" and await engine.cache.wait_for_change(
            _remaining_s(until)
        ):
            answer = self._act(engine, prepare)
        if answer.lookup is Lookup.PENDING:
            index = engine.cache.loads.index_of(answer.lease_id)
            if request.accept_pending and index is not None:
                return respond(answer, index)
            answer = await self._wait_for_reads(engine, answer.lease_id, until)
        return respond(answer)

    async def CompleteLoad(  # noqa: N802
        self, request: pb.CompleteLoadRequest, _: Any
    ) -> pb.CompleteLoadResponse:
        """End a load lease."""
        engine = self._engines.get(request.engine_id)
        engine.cache.act(lambda core: core.loads.complete(request.lease_id, engine.engine_id))
        return pb.CompleteLoadResponse()

    async def PrepareStore(  # noqa: N802
        self, request: pb.PrepareStoreRequest, _: Any
    ) -> pb.PrepareStoreResponse:
        """Lease slots to write to; wait for them if all are in use."""
        self._draining.refuse()
        engine, key = self._caller_and_session(request)
        until = _deadline(request.deadline_s or self._live.loaded.settings.limits.store_wait)
        prepare = partial(_prepare_store, request, key)
        answer = self._act(engine, prepare)
        while answer.refused == "wait" and await engine.cache.wait_for_change(_remaining_s(until)):
            answer = self._act(engine, prepare)
        response = store_response(answer, has_columns=request.block_columns)
        if answer.refused == "wait":
            response.refused_reason = "no_space"
        return response

    async def CompleteStore(  # noqa: N802
        self, request: pb.CompleteStoreRequest, _: Any
    ) -> pb.CompleteStoreResponse:
        """End a store lease: publish the written blocks, or forget them."""
        engine = self._engines.get(request.engine_id)
        stored = engine.cache.act(
            lambda core: core.stores.complete(
                request.lease_id, engine.engine_id, success=request.success
            )
        )
        return pb.CompleteStoreResponse(stored_tokens=stored)

    async def Discard(self, request: pb.DiscardRequest, _: Any) -> pb.DiscardResponse:  # noqa: N802
        """Drop token ranges of a session; changes metadata only."""
        engine, key = self._caller_and_session(request)
        ranges = [(item.start, item.end) for item in request.ranges]
        lineage = lineage_of(request)
        kept = engine.cache.act(
            lambda core: core.sessions.discard(key, request.token_ids, ranges, lineage=lineage)
        )
        return pb.DiscardResponse(kept_tokens=kept)

    async def Graft(self, request: pb.GraftRequest, _: Any) -> pb.GraftResponse:  # noqa: N802
        """Append KV of another session's tokens to a session; changes metadata only."""
        engine, key = self._caller_and_session(request)
        lineage, source = graft_of(request, key)
        grafted = engine.cache.act(
            lambda core: core.sessions.graft(key, request.token_ids, lineage, source)
        )
        return pb.GraftResponse(grafted_tokens=grafted)

    async def GetSession(self, request: pb.GetSessionRequest, _: Any) -> pb.SessionInfo:  # noqa: N802
        """Return what is stored of a session."""
        engine, key = self._caller_and_session(request)
        return engine.cache.act(partial(_session_message, engine.cache, key))

    async def EndSession(self, request: pb.EndSessionRequest, _: Any) -> pb.EndSessionResponse:  # noqa: N802
        """Record that a session will not come back."""
        engine, key = self._caller_and_session(request)
        engine.cache.act(lambda core: core.sessions.end(key))
        return pb.EndSessionResponse()

    async def RetainSession(  # noqa: N802
        self, request: pb.RetainSessionRequest, _: Any
    ) -> pb.RetainSessionResponse:
        """Protect a session, or a prefix that sessions share, from eviction for a while."""
        engine, key = self._caller_and_session(request)
        retain_ns, prefix = ns_of(request.retain_s), request.prefix_token_ids
        granted_ns = engine.cache.act(
            lambda core: (
                core.retention.retain_prefix(key, prefix, retain_ns)
                if prefix
                else core.retention.retain(key, retain_ns)
            )
        )
        return pb.RetainSessionResponse(retained_s=granted_ns / NS_PER_S)

    async def ExpectSession(  # noqa: N802
        self, request: pb.ExpectSessionRequest, _: Any
    ) -> pb.ExpectSessionResponse:
        """Record when a session is likely to return, or that it is superseded."""
        engine, key = self._caller_and_session(request)
        stored = engine.cache.act(
            lambda core: core.expectations.expect(
                key, request.awaited_tools, superseded=request.superseded
            )
        )
        return pb.ExpectSessionResponse(stored=stored)

    async def PushQueue(  # noqa: N802
        self, requests: AsyncIterator[pb.QueueSnapshot], _: Any
    ) -> AsyncIterator[pb.QueueAck]:
        """Receive the engine's queue as snapshots and changes."""
        async with aclosing(self._queues.serve(requests)) as acks:
            async for ack in acks:
                yield ack

    def _caller_and_session(self, request: Any) -> tuple[Engine, SessionKey]:
        """Return the calling engine and the session that it names.

        Raises:
            InvalidRequestError: the session is not of the engine's model.
            NotAttachedError: the engine is not attached.
            DeniedError: the engine's user may not name the session's tenant.
        """
        engine = self._engines.get(request.engine_id)
        key = key_of(request.session, engine.cache.layout.model)
        if key.model != engine.cache.layout.model:
            raise InvalidRequestError(
                f"the session belongs to model {key.model[:12]}, but the engine is attached for "
                f"model {engine.cache.layout.model[:12]}",
                "attach with the layout of the session's model",
            )
        self._users.check(engine.uid, key.tenant)
        return engine, key

    def _act(self, engine: Engine, step: Callable[[CacheEngine], T]) -> T:
        """Act for an engine, if it is still attached: it may have gone during a wait."""
        return self._engines.get(engine.engine_id).cache.act(step)

    async def _wait_for_fetch(
        self, engine: Engine, key: SessionKey, request: pb.PrepareLoadRequest
    ) -> float:
        """Wait for a session that is being fetched, if that pays; return the seconds waited."""
        wait_s = min(request.fetch_wait_s, self._live.loaded.settings.remote.wait)
        if not wait_s > 0:
            return 0.0
        cache, begun_s = engine.cache, asyncio.get_running_loop().time()
        num_tokens = len(request.token_ids) // TOKEN_BYTES
        history = min(request.history_tokens, num_tokens)

        since_ns = cache.act(lambda core: core.now_ns)
        share = cache.act(lambda core: core.wanting.missing_share(key, num_tokens, history))
        token_ns = wait_s * NS_PER_S / max(1, num_tokens)  # the longest wait, per token

        def is_awaited(core: CacheEngine) -> bool:
            return core.wanting.is_awaited(key, history, token_ns)

        if not share or not cache.act(is_awaited):
            return 0.0
        until = _deadline(share * wait_s)
        try:
            while await cache.wait_for_change(_remaining_s(until)) and self._act(
                engine, is_awaited
            ):
                pass
        finally:
            cache.act(lambda core: core.wanting.wait_ended(key, history, since_ns))
        return asyncio.get_running_loop().time() - begun_s

    async def _wait_for_reads(self, engine: Engine, lease_id: int, until: float) -> LoadAnswer:
        """Wait for a load's reads until the deadline; cut off blocks that have not arrived."""
        cache = engine.cache
        try:
            while cache.act(lambda core: core.loads.state_of(lease_id)) is LeaseState.PENDING:
                if not await cache.wait_for_change(_remaining_s(until)):
                    break
        except asyncio.CancelledError:  # the caller has cancelled, and will not complete the load
            if cache.act(lambda core: core.loads.state_of(lease_id)) is not LeaseState.LOST:
                cache.act(lambda core: core.loads.complete(lease_id, engine.engine_id))
            raise
        return cache.act(lambda core: core.loads.settle(lease_id))


def _prepare_load(request: pb.PrepareLoadRequest, key: SessionKey, core: CacheEngine) -> LoadAnswer:
    return core.loads.prepare(
        key,
        request.token_ids,
        request.from_token,
        request.engine_id,
        dram_only=request.dram_only,
        lineage=lineage_of(request),
    )


def _prepare_store(
    request: pb.PrepareStoreRequest, key: SessionKey, core: CacheEngine
) -> StoreAnswer:
    return core.stores.prepare(
        key,
        request.token_ids,
        request.from_token,
        request.engine_id,
        lineage=lineage_of(request),
        load_ends=request.load_ends,
    )


def _session_message(cache: Cache, key: SessionKey, core: CacheEngine) -> pb.SessionInfo:
    info = core.inspection.info(key)
    if info is None:
        raise UnknownSessionError(f"session {key} is not stored", "store its KV first")
    return session_message(info, cache.layout, core.now_ns)


def _deadline(wait_s: float) -> float:
    """Return the event loop's time in `wait_s` seconds, MAX_WAIT_S at most."""
    return asyncio.get_running_loop().time() + min(wait_s, MAX_WAIT_S)


def _remaining_s(until: float) -> float:
    return max(0.0, until - asyncio.get_running_loop().time())


async def _first_of(*events: asyncio.Event) -> None:
    """Return when one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
