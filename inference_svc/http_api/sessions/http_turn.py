"""A turn that an HTTP request asks for, and who asks. Pure but for the clock and new ids."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inference_svc.core.chat import Message
from inference_svc.core.retention import NO_RETENTION, Retention
from inference_svc.core.submission import Submission, TextInput, TokenInput, TurnDefaults
from inference_svc.core.template_arguments import Arguments
from inference_svc.core.turn_record import ConversationDigests
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.sessions.history_chain import open_chain
from inference_svc.http_api.sessions.lookup import (
    ConversationTurn,
    ResponseInfo,
    Route,
    StoredResponse,
)
from inference_svc.service.submissions import (
    chat_input,
    fill_compression,
    fill_overflow,
    fill_sampling,
    new_session_id,
)
from shared.access.identity import Identity
from shared.types.session_key import SessionKey


@dataclass(frozen=True)
class Caller:
    """A client's identity, and the tenant that it acts for: one of the identity's."""

    identity: Identity
    tenant: str

    def key(self, model: str, session_id: str) -> SessionKey:
        """Return the key of a session of the tenant's, under a model of this fingerprint."""
        return self.identity.key(self.tenant, model, session_id)


@dataclass(frozen=True)
class HttpTurn:
    """A turn that an HTTP request asks for, whichever API it speaks.

    Attributes:
        messages: the history and the new ones, or those that follow `previous`; none: it is raw.
        sampling: the client's sampling values, by the names of `SamplingParams`.
        session_id: the session that the client named; "" for none.
        is_kept: whether the session may stay when the turn is over.
        overflow: the overflow policy's name; "" for the service's.
        request_id: the turn's: a digest of the whole request, or one that is never used again.
        body: digest of the request's body.
        repeat_key: digest of its idempotency key; None if there is none.
        previous: the response that it follows.
        response_id: id under which its response is stored; "" if it is no response.
        info: the response's members beside its answer.
        brought: the response's input, to be kept with it; "": it is not.
        raw: raw text or token ids in place of messages; no later history is known by them.
        reading: how its answer is read, and the tools that it offers.
        is_final: whether the session is deleted when the answer has come.
        is_subagent: whether a sub-agent asks.
        retention: for how long the client wants what is computed to be kept at least.
        arguments: of the chat template, as the client gives them.
        prediction: what most of the answer will likely be; "" if the client does not say.
        conversation: the conversation that it is a turn of, in the session `session_id`.
    """

    messages: tuple[Message, ...]
    sampling: Mapping[str, Any]
    session_id: str
    is_kept: bool
    overflow: str
    request_id: str
    body: bytes
    repeat_key: bytes | None = None
    previous: StoredResponse | None = None
    response_id: str = ""
    info: ResponseInfo | None = None
    brought: str = ""
    raw: TextInput | TokenInput | None = None
    reading: Reading = field(default_factory=Reading)
    is_final: bool = False
    is_subagent: bool = False
    retention: Retention = NO_RETENTION
    arguments: Arguments = field(default_factory=dict)
    prediction: str = ""
    conversation: ConversationTurn | None = None

    def as_submission(
        self,
        route: Route,
        key: SessionKey,
        defaults: TurnDefaults,
        before: bytes | None = None,
        *,
        is_local: bool = False,
    ) -> Submission:
        """Make the submission to the route's session.

        Args:
            route: where the turn goes.
            key: of the session there.
            defaults: what the client does not say.
            before: digest of all that was said before the answer; see `Router.before_answer`.
            is_local: whether the session is this server's alone; see `Router.is_local`.

        Raises:
            EmptyTurnError: no new message has any content.
            InvalidSamplingError: listing every value out of range.
            InvalidCompressionError: the settings' policy does not go with this model.
        """
        new, reading = self.messages[route.first :], self.reading
        return Submission(
            key=key,
            input=self.raw or chat_input(new, reading.use.tools, self.arguments, reading.beginning),
            sampling=fill_sampling(self.sampling, defaults),
            has_max_tokens="max_tokens" in self.sampling,
            request_id=self.request_id,
            digest="",
            expected_turn=route.turns,
            waits=False,
            is_final=not self.is_kept,
            arrived_ns=time.monotonic_ns(),
            overflow=fill_overflow({"name": self.overflow} if self.overflow else {}, defaults),
            compression=fill_compression(defaults),
            retention=self.retention,
            shown_marks=reading.marks if self.raw is None else frozenset(),
            calls=reading.calls if self.raw is None else None,
            prediction=self.prediction,
            resembles=route.resembles,
            is_local=is_local,
            fork_id="" if route.is_named else new_session_id(),
            make_digests=self._said(key, before, is_named=route.is_named),
            response_id="" if self.info is None else self.response_id,
        )

    def _said(
        self, key: SessionKey, before: bytes | None, *, is_named: bool
    ) -> Callable[[str, str], ConversationDigests] | None:
        """Return what makes digests of all that was said, once the answer is there."""
        if before is None:
            return None
        chain = open_chain(key.tenant, key.model)

        def said(text: str, session_id: str) -> ConversationDigests:
            history = chain.after(before, self.reading.message(text))
            own = chain.within(history, session_id).hex()
            return ConversationDigests(own, "" if is_named else history.hex())

        return said
