"""What every way into the service has in common: identity, tenant, limits, turns.

gRPC (`service.py`) and HTTP (`openai/`) decode what came, call this, and encode what it says. The
tenant is never what a request says alone: the identity has to allow it. Raises ReportedErrors.
"""

import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from inference_svc.core.counters import Counters
from inference_svc.core.submission import TurnDefaults
from inference_svc.core.transcript_format import Transcript
from inference_svc.core.turn_record import TurnEvent
from inference_svc.runtime.turns.turn import Turn
from inference_svc.runtime.turns.turn_report import TurnReport
from inference_svc.runtime.turns.turns import Turns
from inference_svc.service.turn_requests import decode_discard, decode_submission
from shared.access.identity import Identity
from shared.access.streams import StreamCounts, TooManyStreamsError
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey, session_key


class Following:
    """One client's place at one turn; whoever has one owes `leave`.

    Attributes:
        turn: that is followed.
    """

    def __init__(self, turn: Turn, left: Callable[[], None]) -> None:
        self.turn = turn
        self._left = left
        self._is_over = False

    @property
    def session_id(self) -> str:
        """Of the turn; chosen by the service if the client named none."""
        return self.turn.submission.key.session_id

    @property
    def request_id(self) -> str:
        """Of the turn; likewise."""
        return self.turn.submission.request_id

    def events(self) -> AsyncIterator[TurnEvent]:
        """All events of the turn, from the first to the last.

        Raises:
            ReportedError: it failed.
        """
        return self.turn.follow()

    def leave(self) -> None:
        """Follow no more; whoever leaves a turn last cancels it. A second call does nothing."""
        if not self._is_over:
            self._is_over = True
            self._left()
            self.turn.leave()


class Front:
    """See the module docstring.

    Args:
        turns: of the service.
        model: fingerprint, part of every session's key.
        describe: what is served, and how it goes; but for the defaults.
        defaults: of what turns do not say.
        streams: turns that clients follow.
        counters: of the service.
        report: told of turns that are not begun.

    Attributes:
        defaults: as above; a reload sets them.
        streams: likewise.
    """

    def __init__(
        self,
        turns: Turns,
        model: str,
        describe: Callable[[], pb.Model],
        defaults: TurnDefaults,
        streams: StreamCounts,
        counters: Counters,
        report: TurnReport,
    ) -> None:
        self.model = model
        self.defaults = defaults
        self.streams = streams
        self._turns = turns
        self._describe = describe
        self._counters = counters
        self._report = report

    @property
    def is_ready(self) -> bool:
        """Whether new turns are taken."""
        return not self._turns.is_draining

    def describe(self) -> pb.Model:
        """What is served, and how it goes."""
        described = self._describe()
        described.overflow = self.defaults.overflow.name
        described.sink_tokens = self.defaults.overflow.sink_tokens
        described.overflow_ratio = self.defaults.overflow.ratio
        return described

    async def submit(
        self,
        identity: Identity,
        request: pb.SubmitTurnRequest,
        rpc_left_s: float | None = None,
    ) -> Following:
        """Start a turn, or follow the one that runs under the same request id, or its record.

        Args:
            identity: who submits it.
            request: as it came.
            rpc_left_s: time until the call's own deadline; None if it has none.

        Raises:
            ReportedError: it cannot be queued; what is wrong with it otherwise comes as the end
                of its events.
        """
        try:
            return await self._submit(identity, request, rpc_left_s)
        except ReportedError as error:
            self._report.turned_away(identity.name, request, error)
            raise

    async def _submit(
        self, identity: Identity, request: pb.SubmitTurnRequest, rpc_left_s: float | None
    ) -> Following:
        key = self._key(identity, request.tenant, request.session_id or _new_id())
        submission = decode_submission(request, key, self.defaults, rpc_left_s)
        self._hold_stream(identity)
        try:
            turn = await self._turns.submit(replace(submission, client=identity.name))
        except BaseException:
            self.streams.release(identity)
            raise
        turn.join()
        return Following(turn, lambda: self.streams.release(identity))

    def check_limits(self, identity: Identity, tenant: str) -> None:
        """See that a turn may begin now, before a session is made for it.

        Raises:
            ReportedError: it may not.
        """
        self._turns.check_limits(identity.tenant(tenant))

    def cancel(self, identity: Identity, tenant: str, session_id: str, request_id: str = "") -> int:
        """Stop a session's turns, or the one of a request id; return how many."""
        return self._turns.cancel(self._key(identity, tenant, session_id), request_id)

    async def get_session(
        self, identity: Identity, tenant: str, session_id: str
    ) -> tuple[Transcript, bool]:
        """A session's complete turns, and whether another is under way."""
        return await self._turns.sessions.get(self._key(identity, tenant, session_id))

    async def fork(
        self,
        identity: Identity,
        tenant: str,
        session_id: str,
        at_turn: int | None = None,
        new_session_id: str = "",
    ) -> Transcript:
        """Start a session from another's first turns; None: from all of them."""
        key = self._key(identity, tenant, session_id)
        new_key = self._key(identity, tenant, new_session_id or _new_id())
        return await self._turns.sessions.fork(key, at_turn, new_key.session_id)

    async def delete(self, identity: Identity, tenant: str, session_id: str) -> None:
        """Remove a session and let its KV go."""
        await self._turns.sessions.delete(self._key(identity, tenant, session_id))

    async def end(self, identity: Identity, tenant: str, session_id: str) -> None:
        """Take no further turn of a session, and tell kvd that it will not come back."""
        await self._turns.sessions.end(self._key(identity, tenant, session_id))

    async def discard(self, identity: Identity, request: pb.DiscardRequest) -> tuple[int, int]:
        """Drop tokens of a session's context; return how many are left, and how many went."""
        key = self._key(identity, request.tenant, request.session_id)
        ranges, expected = decode_discard(request)
        return await self._turns.sessions.discard(key, ranges, expected)

    def _key(self, identity: Identity, tenant: str, session_id: str) -> SessionKey:
        asked = session_key(tenant, self.model, session_id)  # what is no name is told so first
        return asked._replace(tenant=identity.tenant(tenant))

    def _hold_stream(self, identity: Identity) -> None:
        try:
            self.streams.hold(identity)
        except TooManyStreamsError as error:
            self._counters.add(f"refused_{error.reason}")
            raise


def _new_id() -> str:
    return f"s-{uuid.uuid4().hex}"
