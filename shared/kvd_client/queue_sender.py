"""Tells kvd an engine's queue over one PushQueue stream after the other.

One update is on its way at most; what happens meanwhile goes with the next one, and whoever changes
the queue never waits. A stream that fails is opened again: all of the queue is told anew.
"""

import asyncio

import grpc

from shared.kvd_client.attachment import Attachment, KvdUnavailableError
from shared.kvd_client.grants import KvdProtocolError
from shared.kvd_client.queue_feed import QueueFeed
from shared.kvd_client.queue_message import snapshot_message
from shared.pb.kvd.v1 import kvd_pb2
from shared.process.log import get_logger
from shared.serving.grpc_status import error_from_rpc
from shared.types.errors import ReportedError

PAUSE_S = 0.05  # between two updates: a job that comes and goes faster is nothing to prepare for
ANSWER_S = 10.0  # deadline of an acknowledgement, which needs nothing but kvd's memory
RETRY_S = 2.0  # after a stream has failed

log = get_logger(__name__)


class QueueSender:
    """See the module docstring."""

    def __init__(self) -> None:
        self._feed = QueueFeed()
        self._changed = asyncio.Event()
        self._last_problem = ""

    def follow(self, feed: QueueFeed) -> None:
        """Tell this queue. Once, before `run`."""
        self._feed = feed
        feed.on_change = self._changed.set

    async def run(self, attachment: Attachment) -> None:
        """Tell an attached kvd, until cancelled."""
        while True:
            try:
                await self._run_stream(attachment)
            except ReportedError as error:
                self._note_problem(error)
            await asyncio.sleep(RETRY_S)

    async def _run_stream(self, attachment: Attachment) -> None:
        """Tell all of the queue, then what changes.

        Raises:
            ReportedError: always, in the end.
        """
        stream = attachment.stub.PushQueue()
        self._feed.restart()
        try:
            while True:
                self._changed.clear()
                update = self._feed.next_update(attachment.max_queue_jobs)
                if update is None:
                    await self._changed.wait()
                    continue
                message = snapshot_message(attachment.engine_id, update)
                async with asyncio.timeout(ANSWER_S):
                    await stream.write(message)
                    ack = await stream.read()
                if not isinstance(ack, kvd_pb2.QueueAck):
                    raise KvdProtocolError("kvd has ended the queue's stream", "see its log")
                self._feed.acknowledged(ack.sequence, send_full=ack.send_full)
                await asyncio.sleep(PAUSE_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except (TimeoutError, asyncio.InvalidStateError) as error:
            raise KvdUnavailableError("kvd does not take the queue", "see its log") from error
        finally:
            stream.cancel()

    def _note_problem(self, error: ReportedError) -> None:
        if str(error) != self._last_problem:  # said once, not at every attempt
            log.warning("kvd_queue_not_told", reason=error.reason, error=str(error))
        self._last_problem = str(error)
