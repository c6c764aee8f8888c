"""QueueSender: report an engine's queue to kvd, over one PushQueue stream after the other.

At most one update is on its way. Changes that come meanwhile go with the next one, so the scheduler
never waits. A stream that fails is opened again, and then all of the queue is reported again.
kvd/rpc/queue_replica.py decodes and checks the updates.
"""

import asyncio
from collections.abc import Iterable, Sequence

import grpc

from shared.kvd_client.attachment import Attachment, KvdUnavailableError
from shared.kvd_client.grants import KvdProtocolError
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.process.log import get_logger
from shared.serving.grpc_status import error_from_rpc
from shared.types.errors import ReportedError
from shared.types.queue_delta import QueuedRequests, QueueUpdate, columns_checksum
from shared.types.queue_feed import QueueFeed
from shared.types.units import NS_PER_S

# Before an update that follows a pause. So a turn that begins at once is reported once, as running,
# and kvd is not busy with its report when its history is requested.
GATHER_S = 0.01
PAUSE_S = 0.05  # between two updates: kvd could not prepare for requests that come and go faster
ANSWER_S = 10.0  # deadline of an acknowledgement, for which kvd only touches its memory
RETRY_S = 2.0  # after a stream has failed

log = get_logger(__name__)


class QueueSender:
    """Keeps kvd up to date with one queue."""

    def __init__(self) -> None:
        self._feed = QueueFeed()
        self._changed = asyncio.Event()
        self._is_open = False
        self._waiting: list[asyncio.Future[None]] = []  # calls of `reported` that still wait
        self._last_problem = ""

    def follow(self, feed: QueueFeed) -> None:
        """Report this queue from now on; call it before `run`."""
        self._feed = feed
        feed.on_change = self._changed.set

    async def run(self, attachment: Attachment) -> None:
        """Report the queue to an attached kvd, until cancelled."""
        while True:
            try:
                await self._run_stream(attachment)
            except ReportedError as error:
                self._note_problem(error)
            await asyncio.sleep(RETRY_S)

    async def reported(self) -> None:
        """Wait until kvd knows all changes of the queue so far; return at once without a stream."""
        if self._is_open:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            self._changed.set()
            await waiting

    async def _run_stream(self, attachment: Attachment) -> None:
        """Open a stream, report all of the queue, then its changes.

        Raises:
            ReportedError: the stream has ended, as it always does at some time.
        """
        stream = attachment.stub.PushQueue()
        self._feed.restart()
        self._is_open = True
        waiting: list[asyncio.Future[None]] = []
        try:
            while True:
                self._changed.clear()
                waiting, self._waiting = [*waiting, *self._waiting], []
                update = self._feed.next_update(attachment.max_queue_jobs)
                if update is None:
                    _wake(waiting)
                    await self._changed.wait()
                    await asyncio.sleep(GATHER_S)
                    continue
                message = snapshot_message(attachment.engine_id, update)
                async with asyncio.timeout(ANSWER_S):
                    await stream.write(message)
                    ack = await stream.read()
                if not isinstance(ack, pb.QueueAck):
                    raise KvdProtocolError(
                        "kvd has ended the stream of the queue", "the log of kvd says why"
                    )
                self._feed.on_acknowledge(ack.sequence, send_full=ack.send_full)
                if not ack.send_full:
                    _wake(waiting)
                await asyncio.sleep(PAUSE_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except (TimeoutError, asyncio.InvalidStateError) as error:
            raise KvdUnavailableError(
                "kvd does not accept the queue", "the log of kvd says why"
            ) from error
        finally:
            self._is_open = False
            _wake(waiting)
            _wake(self._waiting)
            stream.cancel()

    def _note_problem(self, error: ReportedError) -> None:
        if str(error) != self._last_problem:  # log it once, not at every attempt
            log.warning("kvd_queue_not_reported", reason=error.reason, error=str(error))
        self._last_problem = str(error)


def _wake(waiting: list[asyncio.Future[None]]) -> None:
    """Resolve all futures, and empty the list."""
    for future in waiting:
        if not future.done():  # it may have been cancelled
            future.set_result(None)
    waiting.clear()


def snapshot_message(engine_id: int, update: QueueUpdate) -> pb.QueueSnapshot:
    """Encode an update; tenants are sent once each, and requests refer to them by index."""
    change = update.change
    tenants: dict[str, int] = {}
    return pb.QueueSnapshot(
        engine_id=engine_id,
        sequence=update.sequence,
        base_sequence=update.base_sequence,
        digest=update.digest,
        start_interval_s=change.interval_ns / NS_PER_S,
        waiting=_waiting(change.waiting, tenants),
        running=pb.QueueJobs(
            numbers=[request.number for request in change.running],
            session_ids=[request.key.session_id for request in change.running],
            tenants=_indexes([request.key.tenant for request in change.running], tenants),
        ),
        left=change.left,
        tenants=tenants,
    )


def _waiting(requests: QueuedRequests, tenants: dict[str, int]) -> pb.QueueJobs:
    """Encode waiting requests; omit a column that has nothing but its default."""
    numbers, tags = requests.numbers, [tag for _, tag, _ in requests.ranks]
    priorities = [-priority for priority, _, _ in requests.ranks]
    names = [key.tenant for key in requests.keys]
    session_ids = [key.session_id for key in requests.keys]
    message = pb.QueueJobs(
        numbers=numbers,
        session_ids=session_ids,
        tenants=_indexes(names, tenants),
        priorities=priorities if any(priorities) else (),
        start_tags=tags,
        history_tokens=requests.history_tokens,
    )
    if requests.digest:
        message.digest = requests.digest
        message.checksum = columns_checksum(
            requests.digest, numbers, priorities, tags, names, session_ids
        )
    return message


def _indexes(names: Sequence[str], tenants: dict[str, int]) -> Iterable[int]:
    """Return the indexes of tenants, () if there is one only; a new one gets the next index."""
    for name in dict.fromkeys(names):
        tenants.setdefault(name, len(tenants))
    return map(tenants.__getitem__, names) if len(tenants) > 1 else ()
