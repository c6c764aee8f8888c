"""KvdConnection: stay attached to a kvd (attach, hold, attach again), and make calls safely.

CONNECTION_MOVES is the table of its states; kvd/README.md has the drawing.

After an attachment has ended, threads of ours may still read or write its slots. kvd gives the slot
of a store to no other before we attach again and name the stores that we still hold, or say that we
leave, or die. KV that was loaded by an ended attachment must not be used: its complete_load raises.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Collection, Coroutine
from enum import Enum
from pathlib import Path
from typing import Protocol, TypeVar

import grpc

from shared.kvd_client.attachment import Attachment, KvdUnavailableError, MappedArena, attach
from shared.kvd_client.messages import layout_message, shown_id
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.process.log import get_logger
from shared.serving.grpc_status import error_from_rpc
from shared.serving.tracing import Metadata, outgoing
from shared.types.errors import ReportedError, UnavailableError
from shared.types.kv_layout import KVLayout
from shared.types.transitions import Transitions
from shared.version import __version__

RECONNECT_DELAY_S = 0.1  # after an attachment has ended; doubled with each failed attempt
MAX_RECONNECT_DELAY_S = 0.5
ATTACH_S = 30.0  # deadline of an attach, in which kvd may have to make an arena
GRACE_S = 2.0  # beyond the wait that a call allows kvd, for the round trip
CANCEL_AGAIN_S = 0.1
INSTANCE_BYTES = 16

log = get_logger(__name__)


class _Leased(Protocol):
    lease_id: int


Response = TypeVar("Response")
LeasedResponse = TypeVar("LeasedResponse", bound=_Leased)
Request = TypeVar("Request", contravariant=True)  # noqa: PLC0105
Answer = TypeVar("Answer", covariant=True)  # noqa: PLC0105


class Method(Protocol[Request, Answer]):
    """A unary method of a gRPC stub."""

    def __call__(
        self, request: Request, *, timeout: float, metadata: Metadata | None
    ) -> Awaitable[Answer]:
        """Call it."""
        ...


class ConnectionState(Enum):
    """The states of a connection, as callers see them."""

    DETACHED = "detached"
    ATTACHED = "attached"
    DRAINING = "draining"  # granted leases may be completed, no new ones are granted


# By state: the events that are possible, and the state that follows each.
CONNECTION_MOVES = Transitions(
    {
        ConnectionState.DETACHED: {"attached": ConnectionState.ATTACHED},
        ConnectionState.ATTACHED: {
            "draining": ConnectionState.DRAINING,
            "ended": ConnectionState.DETACHED,
        },
        ConnectionState.DRAINING: {
            "draining": ConnectionState.DRAINING,
            "ended": ConnectionState.DETACHED,
        },
    }
)


class KvdConnection:
    """One engine's connection to one kvd.

    Args:
        runtime_dir: the directory of kvd's sockets.
        layout: the layout of the blocks to load and store.
        engine_name: the engine's name, for operators.
        reconnect_delay_s: seconds before the first attempt to attach again.

    Attributes:
        on_change: callbacks, called with `attached` after each change of it.
    """

    def __init__(
        self,
        runtime_dir: Path,
        layout: KVLayout,
        engine_name: str,
        *,
        reconnect_delay_s: float = RECONNECT_DELAY_S,
    ) -> None:
        self.on_change: list[Callable[[bool], None]] = []
        self._runtime_dir = runtime_dir
        self._layout = layout
        self._identity = pb.AttachRequest(
            layout=layout_message(layout),
            engine_name=engine_name,
            # Identifies us, together with our process, as the holder of our leases.
            instance=secrets.token_hex(INSTANCE_BYTES),
            version=__version__,
        )
        self._reconnect_delay_s = reconnect_delay_s
        self._attachment: Attachment | None = None
        self._mapped: MappedArena | None = None  # kept beyond the end of an attachment
        self._state = ConnectionState.DETACHED
        self._detached_reason = "not attached yet"
        self._attached_event = asyncio.Event()
        self._held: set[int] = set()  # granted leases whose completion was not called yet
        self._undoing: set[asyncio.Future[None]] = set()  # see _call_for_grant

    # ------------------------------------------------------------------------------- lifecycle

    @property
    def attached(self) -> bool:
        """Whether loads and stores may be requested right now."""
        return self._state is ConnectionState.ATTACHED

    async def wait_attached(self, timeout_s: float) -> None:
        """Wait until attached.

        Raises:
            KvdUnavailableError: that does not happen within timeout_s.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._attached_event.wait()
        except TimeoutError as error:
            raise self._unavailable() from error

    async def run(self) -> None:
        """Attach and stay attached until cancelled.

        Cancelling ends loads. The slots of a store that is not completed stay reserved until this
        process ends, because one of its threads may be writing to them.
        """
        delay_s = self._reconnect_delay_s
        while True:
            request = pb.AttachRequest(held_leases=sorted(self._held))
            request.MergeFrom(self._identity)
            try:
                attachment = await attach(
                    self._runtime_dir, request, self._layout.block_bytes, self._mapped, ATTACH_S
                )
            except ReportedError as error:
                self._note_refusal(error)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_RECONNECT_DELAY_S)
                continue
            delay_s = self._reconnect_delay_s
            self._mapped = attachment.mapped
            self._held.difference_update(attachment.lost_leases)
            try:
                await self._hold(attachment)
            finally:
                await attachment.close(leaving=not self._held)
            await asyncio.sleep(delay_s)  # do not spin with a kvd that accepts and then closes

    async def _hold(self, attachment: Attachment) -> None:
        """Be attached until the attachment ends."""
        # These were completed while no kvd was attached. From here on completions call kvd.
        abandoned = attachment.confirmed_leases - self._held
        self._attachment = attachment
        self._move("attached", engine_id=shown_id(attachment.engine_id))
        serving = asyncio.create_task(self._while_attached(attachment, abandoned))
        try:
            await attachment.hold(self._on_draining)
        finally:
            # Detach before anything is awaited: a caller that was refused and then waits in
            # `wait_attached` must not find us still attached.
            self._attachment = None
            self._move("ended", "kvd closed the connection")
            await _cancel_until_done(serving)

    async def _while_attached(self, attachment: Attachment, abandoned: Collection[int]) -> None:
        """Run while attached; cancelled at the attachment's end. For subclasses.

        Args:
            attachment: the new attachment.
            abandoned: leases that it has confirmed but that no caller holds any more: they are to
                be completed.
        """

    def _on_draining(self, deadline_s: float) -> None:
        self._move("draining", "kvd is stopping", deadline_s=deadline_s)

    def _note_refusal(self, error: ReportedError) -> None:
        if str(error) != self._detached_reason:  # log it once, not at every attempt
            log.warning("kvd_attach_failed", reason=error.reason, error=str(error))
        self._detached_reason = str(error)

    def _move(self, event: str, detached_reason: str = "", **logged: object) -> None:
        """Change the state; log it and call `on_change` if `attached` has changed."""
        was_attached = self.attached
        self._state = CONNECTION_MOVES.after(self._state, event)
        self._detached_reason = detached_reason or self._detached_reason
        if self.attached is was_attached:
            return
        if self.attached:
            log.info("kvd_attached", **logged)
            self._attached_event.set()
        else:
            log.info("kvd_detached", reason=detached_reason, **logged)
            self._attached_event.clear()
        for callback in self.on_change:
            callback(self.attached)

    # --------------------------------------------------------------------------------- calling

    def _ready(self) -> Attachment:
        """Return the attachment for new calls.

        Raises:
            KvdUnavailableError: not attached, or kvd is draining.
        """
        if self._attachment is None or not self.attached:
            raise self._unavailable()
        return self._attachment

    async def _call_for_grant(
        self,
        method: Method[Request, LeasedResponse],
        request: Request,
        wait_s: float,
        attachment: Attachment,
        complete: Callable[[Attachment, int], Coroutine[object, object, object]],
    ) -> LeasedResponse:
        """Make a prepare call; if we are cancelled meanwhile, complete the lease it grants.

        Args:
            method: a stub's method.
            request: its argument.
            wait_s: most seconds that kvd may wait before it answers.
            attachment: the attachment that the call is made in.
            complete: completes a lease.
        """
        timeout_s = wait_s + GRACE_S
        answer = asyncio.ensure_future(method(request, timeout=timeout_s, metadata=outgoing()))

        async def undo() -> None:
            with contextlib.suppress(ReportedError):
                response = await self._await_answer(answer, timeout_s, attachment)
                if response.lease_id:
                    await complete(attachment, response.lease_id)

        try:
            response = await self._await_answer(asyncio.shield(answer), timeout_s, attachment)
        except asyncio.CancelledError:
            undoing = asyncio.ensure_future(undo())
            self._undoing.add(undoing)  # the event loop holds only weak references to tasks
            undoing.add_done_callback(self._undoing.discard)
            raise
        if self._attachment is not attachment:
            # The attachment has ended since the answer was sent, and the next one was not told of
            # this lease.
            raise self._unavailable()
        self._held.update({response.lease_id} - {0})
        return response

    async def _call(
        self,
        method: Method[Request, Response],
        request: Request,
        timeout_s: float,
        leasing: Attachment | None = None,
    ) -> Response:
        """Call a method, see _await_answer.

        Args:
            method: a stub's method.
            request: its argument.
            timeout_s: most seconds for the call.
            leasing: see _await_answer.
        """
        answer = method(request, timeout=timeout_s, metadata=outgoing())
        return await self._await_answer(answer, timeout_s, leasing)

    async def _await_answer(
        self, answer: Awaitable[Response], timeout_s: float, leasing: Attachment | None
    ) -> Response:
        """Await the answer to a call; every failure becomes a ReportedError.

        Args:
            answer: what the stub's method has returned.
            timeout_s: most seconds for the call.
            leasing: the attachment of a call that begins or ends a lease; else None. Without an
                answer in time it is not known whether kvd holds that lease for us, and it would
                hold it for ever. So that attachment ends, and the next one names what we hold.
        """
        try:
            return await answer
        except grpc.aio.AioRpcError as error:
            if leasing is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                log.warning("kvd_call_unanswered", timeout_s=timeout_s)
                leasing.events.cancel()
            reported = error_from_rpc(error)
            if isinstance(reported, UnavailableError):
                raise KvdUnavailableError(reported.message, "history is recomputed") from error
            raise reported from error
        except asyncio.CancelledError:
            # grpc.aio also raises CancelledError when the channel is closed during a call, at the
            # end of the attachment. That is not a cancellation of our caller.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._unavailable() from None

    def _unavailable(self) -> KvdUnavailableError:
        return KvdUnavailableError(
            f"kvd is not attached: {self._detached_reason}", "history is recomputed meanwhile"
        )


async def _cancel_until_done(task: "asyncio.Task[None]") -> None:
    """Cancel a task until it has ended, and ignore its exception.

    To cancel once is not enough: a grpc.aio call that ends at that moment swallows it.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()
