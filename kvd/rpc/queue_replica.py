"""kvd's replica of each engine's queue: one PushQueue stream an engine, applied in its order.

    all of the queue ─► known
    a change of what was taken last ─► known, if its digest is that of the result
    any other change ─► all of the queue is asked for

A message is decoded and checked before anything of it is applied. A request may be reported once in
a message; everything else that a message may say is harmless: requests that kvd does not know,
changes that change nothing. What makes no sense ends its stream with an error. When a stream ends,
however it does, its requests are forgotten, as they are when its engine goes. An engine that opens
a second stream has left the first one.

*Source:* as snapshots and increments of DNS zones (IXFR, RFC 1995), with a digest besides.
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
from shared.types.queue_delta import QueueChange, QueuedRequest, QueueUpdate, RunningRequest
from shared.types.session_key import DEFAULT_TENANT, SessionKey, session_keys

EQUAL_COLUMNS = "send columns of one length, or leave one out"

Number = TypeVar("Number", int, float)


class QueueReplica:
    """What one stream has reported: whether the next update follows from it. Pure.

    Args:
        apply: applies an update; returns the digest of the queue after it.
    """

    def __init__(self, apply: Callable[[QueueUpdate], int]) -> None:
        self._apply = apply
        self._sequence = 0  # of the newest update
        self._taken = 0  # of the update up to which the queue is known; 0: it is not

    def take(self, update: QueueUpdate) -> bool:
        """Apply an update; False if all of the queue must be reported.

        Raises:
            InvalidRequestError: the update is out of order, or contradicts itself.
        """
        if update.sequence <= self._sequence:
            raise InvalidRequestError(
                f"queue snapshot {update.sequence} after {self._sequence}",
                "number the snapshots of a stream upwards from 1",
            )
        self._sequence = update.sequence
        if update.base_sequence and update.base_sequence != self._taken:
            self._taken = 0
            return False
        is_right = self._apply(update) == update.digest
        if not is_right and not update.base_sequence:
            raise InvalidRequestError(
                "a queue whose digest is another", "check that both run the same release"
            )
        self._taken = update.sequence if is_right else 0
        return is_right


class QueueStreams:
    """The replicas of all engines; see the module docstring.

    Args:
        engines: engines that are attached.
        max_requests: how many requests an engine may report.
        users: tenants that each user's engines may name.
    """

    def __init__(self, engines: Engines, max_requests: int, users: EngineUsers) -> None:
        self._engines = engines
        self._max_requests = max_requests
        self._users = users
        self._newest: dict[int, QueueReplica] = {}  # by engine id

    async def serve(
        self, messages: AsyncIterator[pb.QueueSnapshot]
    ) -> AsyncGenerator[pb.QueueAck, None]:
        """Take one stream, to its end."""
        engine = queue = None
        try:
            async for message in messages:
                caller = self._engines.of(message.engine_id)
                if engine is None or queue is None:
                    engine, queue = caller, self._open(caller)
                if caller is not engine:
                    raise InvalidRequestError("a queue stream of two engines", "open one for each")
                if self._newest.get(engine.engine_id) is not queue:
                    raise StreamReplacedError(
                        "the engine has opened another queue stream", "use that one"
                    )
                for tenant in _tenants(message):
                    self._users.check(engine.uid, tenant)
                update = queue_update(message, engine.cache.layout.model, self._max_requests)
                is_known = queue.take(update)
                yield pb.QueueAck(sequence=message.sequence, send_full=not is_known)
        finally:
            if engine is not None and self._newest.get(engine.engine_id) is queue:
                del self._newest[engine.engine_id]
                self._forget(engine)

    def _open(self, engine: Engine) -> QueueReplica:
        """Begin a stream, of which nothing is known yet."""
        if engine.engine_id in self._newest:
            self._forget(engine)
        queue = self._newest[engine.engine_id] = QueueReplica(partial(self._apply, engine))
        return queue

    def _forget(self, engine: Engine) -> None:
        """Forget an engine's requests, unless the core has forgotten them with the engine."""
        try:
            self._engines.of(engine.engine_id)
        except NotAttachedError:
            return
        self._apply(engine, QueueUpdate(0, 0, QueueChange(), 0))

    def _apply(self, engine: Engine, update: QueueUpdate) -> int:
        """Have the core take an update, and return the digest of the engine's queue."""
        digest, num_requests = engine.cache.act(partial(_take, engine.engine_id, update))
        check_num_requests(num_requests, self._max_requests)
        return digest


def _tenants(message: pb.QueueSnapshot) -> list[str]:
    """Return the tenants whose sessions a message names; none if it names no session."""
    if not (message.tenants or message.waiting.numbers or message.running.numbers):
        return []
    return [tenant or DEFAULT_TENANT for tenant in message.tenants] or [DEFAULT_TENANT]


def _take(engine_id: int, update: QueueUpdate, core: CacheEngine) -> tuple[int, int]:
    """Apply an update; return the digest of the engine's queue, and how many requests it has."""
    take = core.engines.change_queue if update.base_sequence else core.engines.replace_queue
    return take(engine_id, update.change), sum(core.engines.num_requests(engine_id))


def queue_update(message: pb.QueueSnapshot, model: str, max_requests: int) -> QueueUpdate:
    """Decode a message and check it.

    Args:
        message: an engine's message.
        model: the fingerprint of its sessions' model.
        max_requests: most requests that it may report.

    Raises:
        InvalidInputError: the update makes no sense, or reports more requests than that.
    """
    numbers = [*message.waiting.numbers, *message.running.numbers, *message.left]
    check_num_requests(max(len(numbers) - len(message.left), len(message.left)), max_requests)
    if len(set(numbers)) < len(numbers):
        raise _nonsense(
            "a request that comes twice", "report each number once: waiting, running or left"
        )
    if message.left and not message.base_sequence:
        raise _nonsense("all of a queue with requests that left", "report only the others")
    if message.start_interval_s < 0:
        raise _nonsense(f"an interval of {message.start_interval_s} s", "send 0 if it is not known")
    change = QueueChange(
        _waiting(message, model),
        list(map(RunningRequest, message.running.numbers, _keys(message, message.running, model))),
        list(message.left),
        ns_of(message.start_interval_s),
    )
    return QueueUpdate(message.sequence, message.base_sequence, change, message.digest)


def check_num_requests(num_requests: int, max_requests: int) -> None:
    """Raise InvalidRequestError if an engine reports more requests than it may."""
    if num_requests > max_requests:
        raise InvalidRequestError(
            f"a queue of {num_requests} requests",
            f"send the first {max_requests} (limits.max_queue_jobs)",
        )


def _waiting(message: pb.QueueSnapshot, model: str) -> list[QueuedRequest]:
    columns = message.waiting
    num_requests = len(columns.numbers)
    tags = _column(columns.start_tags, num_requests, 0.0)
    if not isfinite(sum(tags)) or min(tags, default=0.0) < 0:
        raise _nonsense("a start tag that is no tag", "send finite numbers, not below 0")
    priorities = _column(columns.priorities, num_requests, 0)
    ranks = zip(map(neg, priorities), tags, columns.numbers, strict=True)
    history_tokens = _column(columns.history_tokens, num_requests, 0)
    rows = zip(ranks, _keys(message, columns, model), history_tokens, strict=True)
    return list(map(partial(tuple.__new__, QueuedRequest), rows))  # `_make` takes twice as long


def _keys(message: pb.QueueSnapshot, columns: pb.QueueJobs, model: str) -> list[SessionKey]:
    names = list(message.tenants) or [""]
    indexes = _column(columns.tenants, len(columns.numbers), 0)
    if max(indexes, default=0) >= len(names):
        raise _nonsense("a tenant that is not named", "send its index in `tenants`")
    session_ids = columns.session_ids[:]
    if len(session_ids) != len(columns.numbers):
        raise _nonsense(
            f"{len(columns.numbers)} requests of {len(session_ids)} sessions", EQUAL_COLUMNS
        )
    return session_keys(list(map(names.__getitem__, indexes)), model, session_ids)


def _column(values: Sequence[Number], num_requests: int, default: Number) -> Sequence[Number]:
    """Return a column, or defaults for one that is left out."""
    if len(values) not in (0, num_requests):
        raise _nonsense(f"{num_requests} requests with a column of {len(values)}", EQUAL_COLUMNS)
    return values[:] or [default] * num_requests


def _nonsense(what: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"a queue snapshot with {what}", remedy)
