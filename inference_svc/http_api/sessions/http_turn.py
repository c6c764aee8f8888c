"""The turn of an HTTP request, and its caller. Pure, except for the clock and new ids."""

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
    """A client's identity, and the tenant that it acts for, one of the identity's tenants."""

    identity: Identity
    tenant: str

    def key(self, model: str, session_id: str) -> SessionKey:
        """Return the key of a session of the tenant, under the model of this fingerprint."""
        return self.identity.key(self.tenant, model, session_id)


@dataclass(frozen=True)
class HttpTurn:
    """The turn of an HTTP request, whichever API the client speaks.

    Attributes:
        messages: the history and the new messages, or those that follow `previous`; empty if the
            turn is raw.
        sampling: the client's sampling values, by the names of `SamplingParams`.
        session_id: the session that the client named; "" for none.
        is_kept: whether the session may stay when the turn is over.
        overflow: name of the overflow policy; "" for the service's.
        request_id: id of the turn: a digest of the whole request, or an id that is used once.
        body: digest of the request's body.
        repeat_key: digest of the idempotency key; None if there is none.
        previous: the response that the turn follows.
        response_id: id under which the response is stored; "" if the turn is no response.
        info: the response's members beside its answer.
        stored_input: the response's input as JSON, to be stored with it; "" to store none.
        raw: raw text or token ids in place of messages; later turns cannot find them as a history.
        reading: how the answer is read, and the tools that it may call.
        is_final: whether the session is deleted when the answer is complete.
        is_subagent: whether a sub-agent sent the request.
        retention: how long the client wants the KV cache to be kept at least.
        arguments: the client's arguments of the chat template.
        prediction: the client's guess of most of the answer; "" if there is none.
        conversation: what the turn does to its conversation, whose session is `session_id`; None
            if the turn belongs to none.
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
    stored_input: str = ""
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
        """Return the submission of the turn to the route's session.

        Args:
            route: where the turn goes.
            key: key of the route's session.
            defaults: values where the client gives none.
            before: digest of all messages before the answer; see `Router.digest_before_answer`.
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
        """Return a function that makes the digests of the history with the turn's answer."""
        if before is None:
            return None
        chain = open_chain(key.tenant, key.model)

        def make_digests(text: str, session_id: str) -> ConversationDigests:
            history = chain.after(before, self.reading.message(text))
            own = chain.within(history, session_id).hex()
            return ConversationDigests(own, "" if is_named else history.hex())

        return make_digests
