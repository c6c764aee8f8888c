"""The gateway: identity, tenant, limits and turns, for gRPC and HTTP alike.

Both front ends (`servicer.py`, `http_api/`) decode a request, call the gateway, and encode its
answers. A tenant that a request names is used only if the caller's identity allows it: `key` checks
that. All errors raised here are ReportedErrors.
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
        turn: the turn.
        on_leave: callback when the client leaves.

    Attributes:
        events: the turn's events, from the first to the last; raises if the turn fails.
    """

    def __init__(self, turn: Turn, on_leave: Callable[[], None]) -> None:
        self._turn = turn
        self.events = turn.follow()
        self._on_leave = on_leave
        self._is_over = False

    async def wait_ended(self) -> None:
        """Wait until the turn's session is free, some time after the turn's last event."""
        if self._turn.task is not None:
            await asyncio.wait({self._turn.task})

    def leave(self) -> None:
        """End the subscription; the turn's last one cancels it. A second call does nothing."""
        if not self._is_over:
            self._is_over = True
            self._on_leave()
            self._turn.leave()


class Gateway:
    """Lets identified clients submit turns and use sessions.

    Args:
        turns: the service's turn registry.
        model: the model's fingerprint, part of every session's key.
        describe: describes the model and the engine's state, but not the defaults.
        defaults: values for turns that do not set their own.
        streams: counts the turns that each client follows.
        counters: the service's counters.
        report: reports turns that are refused.
        prompts: encodes inputs that are not turns, such as those whose tokens are counted.
        text: knows how the model writes chats, thoughts and tool calls.
        embedder: makes embeddings.
        misses: explains why turns missed the cache.
        can_bind_calls: whether a grammar can bind the model's tool calls; the first call may take
            half a second.

    Attributes:
        turns: the service's turn registry. Its methods take keys made by `key`.
        model: the model's fingerprint.
        defaults: values for turns that do not set their own; a reload sets them.
        streams: counts the turns that each client follows; a reload sets the bound.
        prompts: encodes inputs that are not turns, and decodes tokens.
        text: knows how the model writes chats, thoughts and tool calls.
        on_deletion: callbacks for each session that a client deletes, awaited before it gets the
            reply.
        can_bind_calls: whether a grammar can bind the model's tool calls.
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
        """Return the key of a session.

        Args:
            identity: the caller.
            tenant: the session's tenant; "": the identity's first.
            session_id: the session's id.

        Raises:
            InvalidNameError: tenant or session is not a valid name.
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
        """Embed inputs for a tenant; the request counts as one of its client's streams.

        Args:
            identity: the caller.
            tenant: the tenant; "": the identity's first.
            inputs: the inputs, at least one.
            dimensions: number of leading values to return of each embedding; None: all.

        Raises:
            ReportedError: see `Embedder.embed`; or the client has too many streams.
        """
        self._count_stream(identity)
        try:
            tenant = identity.tenant(tenant)
            return await self._embedder.embed(tenant, self.model, inputs, dimensions)
        finally:
            self.streams.release(identity)

    async def delete_session(self, key: SessionKey) -> None:
        """Remove a session that has no turn under way, its KV, and all other data about it.

        Raises:
            ReportedError: there is no such session, or it is in use.
        """
        await self.turns.sessions.delete(key)
        for forget in self.on_deletion:
            await forget(key)

    async def explain_miss(self, key: SessionKey, turn: int | None) -> ExplainedMiss:
        """Explain why a turn of a session missed the cache; `turn` None: the last one that did.

        Raises:
            ReportedError: there is no such session or turn, or the turn missed nothing.
        """
        transcript, _ = await self.turns.sessions.get(key, is_fresh=True)
        return await self._misses.explain(transcript, turn)

    def heads_of_calls(self, use: ToolUse) -> dict[str, str]:
        """Return the text before the arguments of a forced tool call, by the tool's name.

        Returns:
            {} if the answer need not be a call.
        """
        names = [tool.name for tool in use.callable_tools]
        return self.text.heads_of_calls(names) if use.is_forced else {}

    def binds_calls(self, use: ToolUse) -> bool:
        """Whether a grammar binds an answer's tool calls once it has begun one.

        An answer that has to be a call is bound from its beginning, by another grammar.
        """
        return not use.is_forced and self.can_bind_calls()

    async def submit(
        self,
        identity: Identity,
        names: TurnNames,
        make: Callable[[SessionKey, TurnDefaults], Submission],
    ) -> TurnStream:
        """Start a turn, join the one that runs under the same request id, or replay its record.

        Args:
            identity: the caller.
            names: the client's names for the turn, unchecked.
            make: makes the submission, given the session's key and the defaults.

        Returns:
            The client's stream; the caller owes `leave`. Errors that come later end its events.

        Raises:
            ReportedError: the turn cannot be queued.
        """
        try:
            key = self.key(identity, names.tenant, names.session_id or new_session_id())
            submission = replace(make(key, self.defaults), client=identity.name)
            if not names.session_id and submission.expected_turn is None:
                submission = replace(submission, expected_turn=0)  # the session id is new
            return await self._follow(identity, submission)
        except ReportedError as error:
            self._report.turned_away(identity.name, names, error)
            raise

    async def _follow(self, identity: Identity, submission: Submission) -> TurnStream:
        """Submit a turn and follow it, within the client's bound of streams."""
        self._count_stream(identity)
        try:
            turn = await self.turns.submit(submission)
        except BaseException:
            self.streams.release(identity)
            raise
        turn.join()
        return TurnStream(turn, lambda: self.streams.release(identity))

    def _count_stream(self, identity: Identity) -> None:
        """Count one more stream of a client; the caller owes `streams.release`.

        Raises:
            TooManyStreamsError: the client has as many as it may.
        """
        try:
            self.streams.hold(identity)
        except TooManyStreamsError as error:
            self._counters.add(f"refused_{error.reason}")
            raise
