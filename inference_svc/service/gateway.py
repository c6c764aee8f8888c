"""The gateway: identity, tenant, limits and turns, for gRPC and HTTP alike.

Both ways in (`servicer.py`, `http_api/`) decode a request, call the gateway, and encode its
answers. The tenant is never what a request names alone: the identity has to allow it, and `key`
checks that. All errors raised here are ReportedErrors.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from inference_svc.core.chat import ToolUse
from inference_svc.core.counters import Counters
from inference_svc.core.submission import (
    Submission,
    TextInput,
    TokenInput,
    TurnDefaults,
    TurnNames,
)
from inference_svc.runtime.turns.chat_text import TurnText
from inference_svc.runtime.turns.embeddings import Embedder, Embedding
from inference_svc.runtime.turns.misses import ExplainedMiss, MissExplainer
from inference_svc.runtime.turns.turn import Turn
from inference_svc.runtime.turns.turn_prompt import PromptMaker
from inference_svc.runtime.turns.turn_report import TurnReport
from inference_svc.runtime.turns.turns import Turns
from inference_svc.service.submissions import new_session_id
from shared.access.clients import StreamCounts, TooManyStreamsError
from shared.access.identity import Identity
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey


class TurnStream:
    """One client's subscription to a turn; its holder owes `leave`.

    Args:
        turn: that is followed.
        on_leave: called when the client leaves.

    Attributes:
        events: of the turn, from the first to the last; the end of a failed one raises.
    """

    def __init__(self, turn: Turn, on_leave: Callable[[], None]) -> None:
        self._turn = turn
        self.events = turn.follow()
        self._on_leave = on_leave
        self._is_over = False

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
        describe: describes the model and the engine's state, but not the defaults.
        defaults: values of turns that do not name their own.
        streams: counts the turns that each client follows.
        counters: the service's counters.
        report: receives turns that are not begun.
        prompts: encodes what is only to be looked at.
        text: knows how the model calls tools.
        embedder: makes embeddings.
        misses: says why turns missed the cache.
        can_bind_calls: whether the model can have grammars, and writes calls that one can keep to;
            asked first, it may take half a second.

    Attributes:
        turns: the service's turn registry. Its methods take keys made by `key`.
        defaults: values of turns that do not name their own; a reload sets them.
        streams: counts the turns that each client follows; a reload sets the bound.
        prompts: encodes what is only to be looked at, and decodes it.
        text: knows how the model frames chats, thinks, and calls tools.
        on_deletion: called with each session that a client has deleted, before the client is told.
        can_bind_calls: see above.
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
        prompts: PromptMaker,
        text: TurnText,
        embedder: Embedder,
        misses: MissExplainer,
        *,
        can_bind_calls: Callable[[], bool] = lambda: False,
    ) -> None:
        self.can_bind_calls = can_bind_calls
        self.turns = turns
        self._misses = misses
        self._embedder = embedder
        self.model = model
        self.defaults = defaults
        self.streams = streams
        self._describe = describe
        self._counters = counters
        self._report = report
        self.prompts = prompts
        self.text = text
        self.on_deletion: list[Callable[[SessionKey], Awaitable[None]]] = []

    def describe(self) -> pb.Model:
        """Describe the model, the defaults and the engine's state."""
        described = self._describe()
        described.embedding_size = self._embedder.size
        described.overflow = self.defaults.overflow.name
        described.sink_tokens = self.defaults.overflow.sink_tokens
        described.overflow_ratio = self.defaults.overflow.ratio
        return described

    def key(self, identity: Identity, tenant: str, session_id: str) -> SessionKey:
        """Return the key of a session of that tenant; "" means the identity's first.

        Raises:
            InvalidNameError: tenant or session is no valid name.
            TenantDeniedError: the tenant is not one of the identity's.
        """
        return identity.key(tenant, self.model, session_id)

    async def embed(
        self,
        identity: Identity,
        tenant: str,
        inputs: Sequence[TextInput | TokenInput],
        dimensions: int | None,
    ) -> list[Embedding]:
        """Embed inputs for a tenant; a request counts as one of the streams of its client.

        Raises:
            ReportedError: see `Embedder.embed`; or the client has too many streams.
        """
        self._hold(identity)
        try:
            tenant = identity.tenant(tenant)
            return await self._embedder.embed(tenant, self.model, inputs, dimensions)
        finally:
            self.streams.release(identity)

    async def delete_session(self, key: SessionKey) -> None:
        """Remove a session that has no turn under way, its KV, and what else is kept of it.

        Raises:
            ReportedError: it is not there, or in use.
        """
        await self.turns.sessions.delete(key)
        for forget in self.on_deletion:
            await forget(key)

    async def explain_miss(self, key: SessionKey, turn: int | None) -> ExplainedMiss:
        """Show why a turn of a session missed the cache; None: the last one that did.

        Raises:
            ReportedError: there is no such session or turn, or the turn missed nothing.
        """
        transcript, _ = await self.turns.sessions.get(key, is_fresh=True)
        return await self._misses.explain(transcript, turn)

    def heads_of_calls(self, use: ToolUse) -> dict[str, str]:
        """Return what an answer that has to be a call has before the arguments, by the tool's name.

        Returns:
            Nothing, if it need not be one.
        """
        names = [tool.name for tool in use.callable_tools]
        return self.text.heads_of_calls(names) if use.is_forced else {}

    def binds_calls(self, use: ToolUse) -> bool:
        """Whether a grammar keeps an answer to a call, once it has begun one.

        One that has to be a call is kept to it from its beginning.
        """
        return not use.is_forced and self.can_bind_calls()

    async def submit(
        self,
        identity: Identity,
        names: TurnNames,
        make: Callable[[SessionKey, TurnDefaults], Submission],
    ) -> TurnStream:
        """Start a turn, or follow the one that runs under the same request id, or its record.

        Args:
            identity: who submits it.
            names: the client's names for the turn.
            make: makes the submission of a session, given the defaults.

        Raises:
            ReportedError: it cannot be queued; later errors end its events.
        """
        try:
            key = self.key(identity, names.tenant, names.session_id or new_session_id())
            submission = replace(make(key, self.defaults), client=identity.name)
            if not names.session_id and submission.expected_turn is None:
                submission = replace(submission, expected_turn=0)  # nobody has had a turn of it
            return await self._follow(identity, submission)
        except ReportedError as error:
            self._report.turned_away(identity.name, names, error)
            raise

    async def _follow(self, identity: Identity, submission: Submission) -> TurnStream:
        self._hold(identity)
        try:
            turn = await self.turns.submit(submission)
        except BaseException:
            self.streams.release(identity)
            raise
        turn.join()
        return TurnStream(turn, lambda: self.streams.release(identity))

    def _hold(self, identity: Identity) -> None:
        """Count one more stream of a client.

        Raises:
            TooManyStreamsError: it has as many as it may.
        """
        try:
            self.streams.hold(identity)
        except TooManyStreamsError as error:
            self._counters.add(f"refused_{error.reason}")
            raise
