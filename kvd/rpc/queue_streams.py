"""The queues that engines tell: one stream per engine, whose messages are applied in their order.

What makes no sense ends its stream with an error. When a stream ends, however it does, its jobs are
forgotten, as they are when its engine goes. An engine that opens a second stream has given the
first one up.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

from kvd.core.engine import CacheEngine
from kvd.core.records.errors import InvalidRequestError
from kvd.engines.attached import AttachedEngine, Engines
from kvd.errors import NotAttachedError, StreamReplacedError
from kvd.host.engine_users import EngineUsers
from kvd.rpc.told_queue import ToldQueue
from kvd.wire.queue_messages import check_num_jobs, queue_update
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.queue_change import QueueChange, QueueUpdate
from shared.types.session_key import DEFAULT_TENANT


class QueueStreams:
    """See the module docstring.

    Args:
        max_jobs: that an engine may tell.
        users: whose engines they are, and of which tenants.
    """

    def __init__(self, engines: Engines, max_jobs: int, users: EngineUsers) -> None:
        self._engines = engines
        self._max_jobs = max_jobs
        self._users = users
        self._newest: dict[int, ToldQueue] = {}  # by engine id

    async def serve(
        self, messages: AsyncIterator[kvd_pb2.QueueSnapshot]
    ) -> AsyncGenerator[kvd_pb2.QueueAck, None]:
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
                        "the engine has opened another queue stream", "go on with that one"
                    )
                for tenant in _tenants(message):
                    self._users.check(engine.peer.uid, tenant)
                update = queue_update(message, engine.cache.layout.model, self._max_jobs)
                is_known = queue.take(update)
                yield kvd_pb2.QueueAck(sequence=message.sequence, send_full=not is_known)
        finally:
            if engine is not None and self._newest.get(engine.engine_id) is queue:
                del self._newest[engine.engine_id]
                self._forget(engine)

    def _open(self, engine: AttachedEngine) -> ToldQueue:
        """Begin a stream, of which nothing is known yet."""
        if engine.engine_id in self._newest:
            self._forget(engine)
        queue = self._newest[engine.engine_id] = ToldQueue(partial(self._apply, engine))
        return queue

    def _forget(self, engine: AttachedEngine) -> None:
        """Forget an engine's jobs, unless the core has forgotten them with the engine."""
        try:
            self._engines.of(engine.engine_id)
        except NotAttachedError:
            return
        self._apply(engine, QueueUpdate(0, 0, QueueChange(), 0))

    def _apply(self, engine: AttachedEngine, update: QueueUpdate) -> int:
        """Have the core take an update, and return the digest of the engine's queue."""
        digest, num_jobs = engine.cache.act(partial(_take, engine.engine_id, update))
        check_num_jobs(num_jobs, self._max_jobs)
        return digest


def _tenants(message: kvd_pb2.QueueSnapshot) -> list[str]:
    """Whose sessions a message names; nobody's if it names none."""
    if not (message.tenants or message.waiting.numbers or message.running.numbers):
        return []
    return [tenant or DEFAULT_TENANT for tenant in message.tenants] or [DEFAULT_TENANT]


def _take(owner: int, update: QueueUpdate, core: CacheEngine) -> tuple[int, int]:
    """Returns the digest of the engine's queue, and the number of its jobs."""
    take = core.engines.change_queue if update.base_sequence else core.engines.replace_queue
    return take(owner, update.change), sum(core.engines.num_jobs(owner))
