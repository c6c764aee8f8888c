"""kvd's replicas of engines' queues, updated by one PushQueue stream per engine.

    snapshot of the whole queue                         ─► the replica is up to date
    change that is based on the last applied update     ─► up to date, if the digests are equal
    any other change                                    ─► kvd requests a snapshot

A message is decoded and checked before any of it is applied. A message may report each request
once. Unknown requests, and changes without effect, are harmless. An invalid message ends its stream
with an error. When a stream ends, or its engine goes, the engine's requests are forgotten. A second
stream of an engine replaces the first one.

*Source:* snapshots and increments of DNS zones (IXFR, RFC 1995); the digest is an addition.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from math import isfinite
from operator import neg
from typing import TypeVar

from kvd.core.engine import CacheEngine
from kvd.core.records.errors import InvalidRequestError
from kvd.engines.attached import Engine, Engines
from kvd.engines.data_socket import EngineUsers
from kvd.errors import NotAttachedError, StreamReplacedError
from kvd.wire.messages import ns_of
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.queue_delta import (
    QueueChange,
    QueuedRequests,
    QueueUpdate,
    RunningRequest,
    columns_checksum,
)
from shared.types.session_key import DEFAULT_TENANT, session_keys

EQUAL_COLUMNS = "send columns of equal length, or leave a column out"

Number = TypeVar("Number", int, float)


class QueueReplica:
    """The state of one stream: decides whether an update follows from the last one. Pure.

    Args:
        apply: applies an update to the queue, and returns the queue's digest after it.
    """

    def __init__(self, apply: Callable[[QueueUpdate], int]) -> None:
        self._apply = apply
        self._sequence = 0  # sequence number of the newest update
        self._known_sequence = 0  # that of the last applied one; 0: the queue is not known

    def apply_update(self, update: QueueUpdate) -> bool:
        """Apply an update; return False if the engine must send a snapshot.

        Raises:
            InvalidRequestError: the update is out of order, or does not match its digest.
        """
        if update.sequence <= self._sequence:
            raise InvalidRequestError(
                f"queue snapshot {update.sequence} came after {self._sequence}",
                "number the snapshots of a stream in ascending order, from 1",
            )
        self._sequence = update.sequence
        if update.base_sequence and update.base_sequence != self._known_sequence:
            self._known_sequence = 0
            return False
        is_match = self._apply(update) == update.digest
        if not is_match and not update.base_sequence:
            raise _wrong_digest()
        self._known_sequence = update.sequence if is_match else 0
        return is_match


class QueueStreams:
    """The queue streams of all engines.

    Args:
        engines: the attached engines.
        max_requests: most requests that an engine may report.
        users: tenants that each user's engines may name.
    """

    def __init__(self, engines: Engines, max_requests: int, users: EngineUsers) -> None:
        self._engines = engines
        self._max_requests = max_requests
        self._users = users
        self._replicas: dict[int, QueueReplica] = {}  # engine id → replica of its newest stream

    async def serve(
        self, messages: AsyncIterator[pb.QueueSnapshot]
    ) -> AsyncGenerator[pb.QueueAck, None]:
        """Serve one stream to its end; acknowledge each message."""
        engine = replica = None
        try:
            async for message in messages:
                caller = self._engines.get(message.engine_id)
                if engine is None or replica is None:
                    engine, replica = caller, self._open(caller)
                if caller is not engine:
                    raise InvalidRequestError(
                        "one queue stream reports the queues of two engines",
                        "open a stream for each engine",
                    )
                if self._replicas.get(engine.engine_id) is not replica:
                    raise StreamReplacedError(
                        "the engine has opened another queue stream", "use that one"
                    )
                for tenant in _tenants(message):
                    self._users.check(engine.uid, tenant)
                update = queue_update(message, engine.cache.layout.model, self._max_requests)
                is_known = replica.apply_update(update)
                yield pb.QueueAck(sequence=message.sequence, send_full=not is_known)
        finally:
            if engine is not None and self._replicas.get(engine.engine_id) is replica:
                del self._replicas[engine.engine_id]
                self._forget(engine)

    def _open(self, engine: Engine) -> QueueReplica:
        """Begin a stream with an empty replica; it replaces the engine's earlier stream."""
        if engine.engine_id in self._replicas:
            self._forget(engine)
        replica = self._replicas[engine.engine_id] = QueueReplica(partial(self._apply, engine))
        return replica

    def _forget(self, engine: Engine) -> None:
        """Forget an engine's requests, unless the core has forgotten them with the engine."""
        try:
            self._engines.get(engine.engine_id)
        except NotAttachedError:
            return
        self._apply(engine, QueueUpdate(0, 0, QueueChange(), 0))

    def _apply(self, engine: Engine, update: QueueUpdate) -> int:
        """Apply an update in the core, and return the digest of the engine's queue."""
        digest, num_requests = engine.cache.act(partial(_apply_to_core, engine.engine_id, update))
        check_num_requests(num_requests, self._max_requests)
        return digest


def _tenants(message: pb.QueueSnapshot) -> list[str]:
    """Return the tenants of the sessions in a message; [] if it has no session."""
    if not (message.tenants or message.waiting.numbers or message.running.numbers):
        return []
    return [tenant or DEFAULT_TENANT for tenant in message.tenants] or [DEFAULT_TENANT]


def _apply_to_core(engine_id: int, update: QueueUpdate, core: CacheEngine) -> tuple[int, int]:
    """Apply an update; return the digest of the engine's queue, and its number of requests."""
    apply = core.engines.change_queue if update.base_sequence else core.engines.replace_queue
    return apply(engine_id, update.change), sum(core.engines.num_requests(engine_id))


def queue_update(message: pb.QueueSnapshot, model: str, max_requests: int) -> QueueUpdate:
    """Decode a message, and check all but the digest of the resulting queue.

    Args:
        message: an engine's message.
        model: fingerprint of the engine's model.
        max_requests: most requests that a message may report.

    Raises:
        InvalidInputError: the message is not valid, does not match its checksum, or reports too
            many requests.
    """
    waiting, running = message.waiting.numbers[:], message.running.numbers[:]
    num_requests = len(waiting) + len(running)
    check_num_requests(max(num_requests, len(message.left)), max_requests)
    if len({*waiting, *running, *message.left}) < num_requests + len(message.left):
        raise _invalid_snapshot(
            "a request that occurs twice", "report each number once: as waiting, running or left"
        )
    if message.left and not message.base_sequence:
        raise _invalid_snapshot(
            "both a whole queue and requests that have left",
            "when you send the whole queue, leave out those",
        )
    if message.start_interval_s < 0:
        raise _invalid_snapshot(
            f"an interval of {message.start_interval_s} s", "send 0 if it is not known"
        )
    queued = _waiting(message, waiting, model)
    tenants, session_ids = _names(message, message.running)
    change = QueueChange(
        queued,
        list(map(RunningRequest, running, session_keys(tenants, model, session_ids))),
        list(message.left),
        ns_of(message.start_interval_s),
    )
    return QueueUpdate(message.sequence, message.base_sequence, change, message.digest)


def check_num_requests(num_requests: int, max_requests: int) -> None:
    """Raise InvalidRequestError if an engine reports more requests than allowed."""
    if num_requests > max_requests:
        raise InvalidRequestError(
            f"the queue has {num_requests} requests, which is too many",
            f"send only the first {max_requests} (limits.max_queue_jobs)",
        )


def _waiting(message: pb.QueueSnapshot, numbers: Sequence[int], model: str) -> QueuedRequests:
    """Decode the waiting requests; their digest is used if it and they match the checksum."""
    columns = message.waiting
    num_requests = len(numbers)
    tags = _column(columns.start_tags, num_requests, 0.0)
    if not isfinite(sum(tags)) or min(tags, default=0.0) < 0:
        raise _invalid_snapshot("an invalid start tag", "send finite numbers of at least 0")
    priorities = _column(columns.priorities, num_requests, 0)
    ranks = list(zip(map(neg, priorities), tags, numbers, strict=True))
    history_tokens = _column(columns.history_tokens, num_requests, 0)
    tenants, session_ids = _names(message, columns)
    keys = session_keys(tenants, model, session_ids)
    if columns.digest and columns.checksum != columns_checksum(
        columns.digest, numbers, priorities, tags, tenants, session_ids
    ):
        raise _wrong_digest()
    return QueuedRequests(ranks, keys, history_tokens, columns.digest)


def _names(message: pb.QueueSnapshot, columns: pb.QueueJobs) -> tuple[Sequence[str], Sequence[str]]:
    """Return the tenants and the session ids of requests."""
    names = list(message.tenants) or [""]
    indexes = _column(columns.tenants, len(columns.numbers), 0)
    if max(indexes, default=0) >= len(names):
        raise _invalid_snapshot(
            "a tenant index outside `tenants`", "send the tenant's index in `tenants`"
        )
    session_ids = columns.session_ids[:]
    if len(session_ids) != len(columns.numbers):
        raise _invalid_snapshot(
            f"{len(columns.numbers)} requests, but {len(session_ids)} session ids", EQUAL_COLUMNS
        )
    return list(map(names.__getitem__, indexes)), session_ids


def _column(values: Sequence[Number], num_requests: int, default: Number) -> Sequence[Number]:
    """Return a column; an omitted one is filled with `default`."""
    if len(values) not in (0, num_requests):
        raise _invalid_snapshot(
            f"{num_requests} requests, but a column of {len(values)} values", EQUAL_COLUMNS
        )
    return values[:] or [default] * num_requests


def _wrong_digest() -> InvalidRequestError:
    return InvalidRequestError(
        "the queue's digest does not match its content",
        "check that kvd and the engine run the same release",
    )


def _invalid_snapshot(what: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"the queue snapshot has {what}", remedy)
