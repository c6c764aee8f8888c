"""The one way in: identity, tenant, limits and turns, for every front.

A front (gRPC in `servicer.py`, HTTP in `openai/`) reads what came, calls this, and writes what it
says. The tenant is never what a request says alone: the identity has to allow it, and `key` is
where it is asked. What raises here raises ReportedErrors.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from inference_svc.core.counters import Counters
from inference_svc.core.submission import Submission, TurnDefaults, TurnNames
from inference_svc.core.turn_record import TurnEvent
from inference_svc.runtime.turns.turn import Turn
from inference_svc.runtime.turns.turn_report import TurnReport
from inference_svc.runtime.turns.turns import Turns
from shared.access.clients import StreamCounts, TooManyStreamsError
from shared.access.identity import Identity
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey, session_key


def new_session_id() -> str:
    """Make up a name for a session whose client leaves that to the service."""
    return f"s-{uuid.uuid4().hex}"


class TurnStream:
    """One client's place at one turn; whoever has one owes `leave`.

    Args:
        turn: that is followed.
        on_leave: called when the client leaves.
    """

    def __init__(self, turn: Turn, on_leave: Callable[[], None]) -> None:
        self._turn = turn
        self._on_leave = on_leave
        self._is_over = False

    @property
    def events(self) -> AsyncIterator[TurnEvent]:
        """All events of the turn, from the first to the last; the end of a failed one raises."""
        return self._turn.follow()

    async def wait_ended(self) -> None:
        """Wait until the turn's session is free, which is after the turn's last event."""
        if self._turn.task is not None:
            await asyncio.wait({self._turn.task})

    def leave(self) -> None:
        """Follow no more; whoever leaves a turn last cancels it. A second call does nothing."""
        if not self._is_over:
            self._is_over = True
            self._on_leave()
            self._turn.leave()


class Gateway:
    """Lets identified clients submit turns and name sessions.

    Args:
        turns: the service's turn registry.
        model: fingerprint of the model, part of every session's key.
        describe: what is served, and how it goes; but for the defaults.
        defaults: what turns get that do not say.
        streams: counts the turns that each client follows.
        counters: the service's counters.
        report: receives turns that are not begun.

    Attributes:
        turns: as above. Its methods take keys, which are `key`'s.
        defaults: as above; a reload sets them.
        streams: as above; a reload sets their bound.
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
        self.turns = turns
        self.model = model
        self.defaults = defaults
        self.streams = streams
        self._describe = describe
        self._counters = counters
        self._report = report

    def describe(self) -> pb.Model:
        """Describe what is served, and how it goes."""
        described = self._describe()
        described.overflow = self.defaults.overflow.name
        described.sink_tokens = self.defaults.overflow.sink_tokens
        described.overflow_ratio = self.defaults.overflow.ratio
        return described

    def key(self, identity: Identity, tenant: str, session_id: str) -> SessionKey:
        """Return the key of a session of that tenant; "" is the identity's own, its first.

        Raises:
            InvalidNameError: tenant or session can be no names.
            TenantDeniedError: the tenant is not one of the identity's.
        """
        # Refuse first what is no name: the identity would only say that it is not its own.
        asked = session_key(tenant, self.model, session_id)
        return asked._replace(tenant=identity.tenant(tenant))

    async def submit(
        self,
        identity: Identity,
        names: TurnNames,
        make: Callable[[SessionKey, TurnDefaults], Submission],
    ) -> TurnStream:
        """Start a turn, or follow the one that runs under the same request id, or its record.

        Args:
            identity: who submits it.
            names: of the turn, as the client gave them.
            make: makes the submission of a session, from what the client said and the defaults.

        Raises:
            ReportedError: it cannot be queued; what is wrong with it otherwise comes as the end
                of its events.
        """
        try:
            key = self.key(identity, names.tenant, names.session_id or new_session_id())
            submission = replace(make(key, self.defaults), client=identity.name)
            return await self._follow(identity, submission)
        except ReportedError as error:
            self._report.turned_away(identity.name, names, error)
            raise

    async def _follow(self, identity: Identity, submission: Submission) -> TurnStream:
        try:
            self.streams.hold(identity)
        except TooManyStreamsError as error:
            self._counters.add(f"refused_{error.reason}")
            raise
        try:
            turn = await self.turns.submit(submission)
        except BaseException:
            self.streams.release(identity)
            raise
        turn.join()
        return TurnStream(turn, lambda: self.streams.release(identity))
