"""The gRPC servicer: decode and validate a request, call the turns, encode what comes.

Raises ReportedErrors; `shared.grpc_status` turns them into statuses.
"""

import hashlib
import math
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from typing import Any, TypeAlias

from inference_svc.core.compression.policy import CompressionPolicy
from inference_svc.core.compression.registry import check_compression, make_compression
from inference_svc.core.discards import Discard
from inference_svc.core.errors import EmptyTurnError, InvalidTurnError
from inference_svc.core.expected_session import ExpectedSession
from inference_svc.core.sampling_params import SamplingParams
from inference_svc.core.stopping import AnswerToken
from inference_svc.core.submission import (
    MAX_DEADLINE_S,
    MAX_PRIORITY,
    MIN_PRIORITY,
    ChatInput,
    Submission,
    TextInput,
    TokenInput,
    TurnDefaults,
    TurnInput,
)
from inference_svc.core.transcript_format import Transcript
from inference_svc.core.truncation import OverflowPolicy
from inference_svc.core.turn_events import Accepted, Started, Tokens, TurnEvent
from inference_svc.core.turn_record import TurnRecord, Usage
from inference_svc.runtime.turns.turns import Turns
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.pb.inference.v1 import inference_pb2_grpc
from shared.session_key import SessionKey, session_key
from shared.units import NS_PER_S

Context: TypeAlias = Any  # grpc.aio.ServicerContext; its stubs are generic in a useless way
MAX_SEED = 2**63


class InferenceService(inference_pb2_grpc.InferenceServicer):  # type: ignore[misc]
    """See the module docstring.

    Args:
        model: fingerprint, part of every session's key.
        describe: answers GetModel.
        defaults: of what turns do not say.
    """

    def __init__(
        self, turns: Turns, model: str, describe: Callable[[], pb.Model], defaults: TurnDefaults
    ) -> None:
        self._turns = turns
        self._model = model
        self._describe = describe
        self._defaults = defaults

    async def SubmitTurn(  # noqa: N802  # the proto's name
        self, request: pb.SubmitTurnRequest, context: Context
    ) -> AsyncIterator[pb.TurnEvent]:
        """Stream one turn; the client's leaving cancels it, unless others follow it too."""
        session_id = request.session_id or f"s-{uuid.uuid4().hex}"
        key = self._key(request.tenant, session_id)
        submission = decode_submission(request, key, self._defaults, context.time_remaining())
        turn = await self._turns.submit(submission)
        turn.join()
        # A callback, not `finally`: a generator that is left at a yield is not closed in time.
        context.add_done_callback(lambda _: turn.leave())
        async for event in turn.follow():
            yield encode_event(event)

    async def CancelTurn(  # noqa: N802
        self, request: pb.CancelTurnRequest, context: Context
    ) -> pb.CancelTurnResponse:
        """Stop a session's turns."""
        del context
        key = self._key(request.tenant, request.session_id)
        return pb.CancelTurnResponse(cancelled=self._turns.cancel(key, request.request_id))

    async def GetSession(  # noqa: N802
        self, request: pb.GetSessionRequest, context: Context
    ) -> pb.Session:
        """A session's state and, if asked for, its turns."""
        del context
        key = self._key(request.tenant, request.session_id)
        transcript, is_busy = await self._turns.get_session(key)
        return encode_session(transcript, is_busy=is_busy, with_turns=request.with_turns)

    async def DeleteSession(  # noqa: N802
        self, request: pb.DeleteSessionRequest, context: Context
    ) -> pb.DeleteSessionResponse:
        """Remove a session and let its KV go."""
        del context
        await self._turns.delete(self._key(request.tenant, request.session_id))
        return pb.DeleteSessionResponse()

    async def EndSession(  # noqa: N802
        self, request: pb.EndSessionRequest, context: Context
    ) -> pb.EndSessionResponse:
        """Take no further turn of a session, and tell kvd that it will not come back."""
        del context
        await self._turns.end(self._key(request.tenant, request.session_id))
        return pb.EndSessionResponse()

    async def ForkSession(  # noqa: N802
        self, request: pb.ForkSessionRequest, context: Context
    ) -> pb.Session:
        """Start a session from another's first turns."""
        del context
        key = self._key(request.tenant, request.session_id)
        new_key = self._key(request.tenant, request.new_session_id or f"s-{uuid.uuid4().hex}")
        at_turn = request.at_turn if request.HasField("at_turn") else None
        forked = await self._turns.fork(key, at_turn, new_key.session_id)
        return encode_session(forked, is_busy=False, with_turns=False)

    async def Discard(  # noqa: N802
        self, request: pb.DiscardRequest, context: Context
    ) -> pb.DiscardResponse:
        """Drop tokens of a session's context."""
        del context
        key = self._key(request.tenant, request.session_id)
        ranges = [(found.start, found.end) for found in request.ranges]
        ranges += [(position, position + 1) for position in request.positions]
        expected = ExpectedSession(
            request.expected_turn if request.HasField("expected_turn") else None,
            request.expected_context_tokens
            if request.HasField("expected_context_tokens")
            else None,
        )
        left_tokens, dropped_tokens = await self._turns.discard(key, ranges, expected)
        return pb.DiscardResponse(context_tokens=left_tokens, dropped_tokens=dropped_tokens)

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: Context
    ) -> pb.Model:
        """What is served, and how it goes."""
        del request, context
        return self._describe()

    def _key(self, tenant: str, session_id: str) -> SessionKey:
        return session_key(tenant, self._model, session_id)


# ------------------------------------------------------------------------------------------ decode


def decode_submission(
    request: pb.SubmitTurnRequest,
    key: SessionKey,
    defaults: TurnDefaults,
    rpc_left_s: float | None = None,
) -> Submission:
    """Check what can be checked without the session.

    Args:
        request: as it came.
        key: of its session.
        defaults: of what the client does not say.
        rpc_left_s: time until the RPC's own deadline; None if it has none.

    Raises:
        EmptyTurnError: there is no input.
        InvalidSamplingError: listing every value out of range.
        InvalidTurnError: likewise, of priority and deadline, and of the overflow policy.
        InvalidCompressionError: there is no such policy, or not with this model.
    """
    sampling = decode_sampling(request.sampling, defaults.max_tokens)
    sampling.check()
    _check_urgency(request)
    arrived_ns = time.monotonic_ns()
    return Submission(
        key=key,
        input=_decode_input(request),
        sampling=sampling,
        has_max_tokens=request.sampling.HasField("max_tokens"),
        request_id=request.request_id or f"r-{uuid.uuid4().hex}",
        digest=_digest(request),
        expected_turn=request.expected_turn if request.HasField("expected_turn") else None,
        waits=request.wait,
        is_final=request.final,
        arrived_ns=arrived_ns,
        priority=request.priority,
        deadline_ns=_deadline_ns(arrived_ns, request.deadline_s or None, rpc_left_s),
        overflow=decode_overflow(request.overflow, defaults.overflow),
        compression=decode_compression(request.compression, defaults),
    )


def decode_sampling(sampling: pb.Sampling, default_max_tokens: int) -> SamplingParams:
    """Unset fields take the defaults; an unset seed is drawn."""
    given = _given(sampling)
    defaults = {"max_tokens": default_max_tokens, "seed": secrets.randbelow(MAX_SEED)}
    stop = tuple(sampling.stop)
    return SamplingParams(**{**defaults, **given}, stop=stop, ignore_eos=sampling.ignore_eos)


def decode_overflow(overflow: pb.Overflow, default: OverflowPolicy) -> OverflowPolicy:
    """Unset fields take the settings."""
    policy = replace(default, name=overflow.policy or default.name, **_given(overflow))
    policy.check()
    return policy


def decode_compression(
    compression: pb.Compression, defaults: TurnDefaults
) -> CompressionPolicy | None:
    """Unset fields take the settings."""
    has_ratio = compression.HasField("keep_ratio")
    keep_ratio = compression.keep_ratio if has_ratio else defaults.keep_ratio
    policy = make_compression(compression.policy or defaults.compression, keep_ratio)
    if policy is not None:
        check_compression(policy, defaults.attention_mode)
    return policy


def _given(message: Any) -> dict[str, Any]:
    """The optional fields of a message that are set."""
    return {
        field.name: getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
        if field.has_presence and message.HasField(field.name)
    }


def _decode_input(request: pb.SubmitTurnRequest) -> TurnInput:
    kind = request.WhichOneof("input")
    if kind == "text" and request.text:
        return TextInput(request.text)
    if kind == "chat" and any(message.content for message in request.chat.messages):
        return ChatInput(tuple((m.role, m.content) for m in request.chat.messages))
    if kind == "tokens" and request.tokens.ids:
        return TokenInput(tuple(request.tokens.ids))
    raise EmptyTurnError("the turn is empty", "send text, chat messages with content or token ids")


def _check_urgency(request: pb.SubmitTurnRequest) -> None:
    problems, accepted = [], []
    if not MIN_PRIORITY <= request.priority <= MAX_PRIORITY:
        problems.append(f"priority {request.priority}")
        accepted.append(f"priority {MIN_PRIORITY} to {MAX_PRIORITY}")
    if not (request.deadline_s >= 0 and math.isfinite(request.deadline_s)):
        problems.append(f"deadline_s {request.deadline_s}")
        accepted.append("deadline_s in seconds, 0 for none")
    if problems:
        raise InvalidTurnError(
            f"{' and '.join(problems)} cannot be", f"send {' and '.join(accepted)}"
        )


def _deadline_ns(arrived_ns: int, *left_s: float | None) -> int | None:
    """The earliest of several deadlines, each None or a time from the arrival."""
    known_s = [value for value in left_s if value is not None and value <= MAX_DEADLINE_S]
    return arrived_ns + int(min(known_s) * NS_PER_S) if known_s else None


def _digest(request: pb.SubmitTurnRequest) -> str:
    """Digest of what a repeat of the request id must have in common."""
    same = pb.SubmitTurnRequest()
    same.CopyFrom(request)
    for name in ("session_id", "request_id", "expected_turn", "wait", "priority", "deadline_s"):
        same.ClearField(name)
    return hashlib.blake2b(same.SerializeToString(deterministic=True), digest_size=16).hexdigest()


# ------------------------------------------------------------------------------------------ encode


def encode_event(event: TurnEvent) -> pb.TurnEvent:
    """One event of a turn's stream."""
    if isinstance(event, Accepted):
        return pb.TurnEvent(
            accepted=pb.Accepted(
                session_id=event.session_id,
                turn=event.turn,
                request_id=event.request_id,
                queue_length=event.queue_length,
                replayed=event.is_replayed,
            )
        )
    if isinstance(event, Started):
        return pb.TurnEvent(started=pb.Started(**asdict(event)))
    if isinstance(event, Tokens):
        return pb.TurnEvent(tokens=pb.Tokens(tokens=map(_encode_token, event.tokens)))
    return pb.TurnEvent(
        finished=pb.Finished(
            finish_reason=event.finish_reason,
            text=event.text,
            usage=_encode_usage(event.usage),
            turns=event.turns,
        )
    )


def encode_session(transcript: Transcript, *, is_busy: bool, with_turns: bool) -> pb.Session:
    """A session as its transcript has it."""
    header, context_ids = transcript.header, transcript.context_ids
    return pb.Session(
        tenant=header.tenant,
        model=header.model,
        session_id=header.session_id,
        turns=len(transcript.turns),
        num_tokens=transcript.num_tokens,
        busy=is_busy,
        ended=transcript.has_ended,
        turn_records=map(_encode_record, transcript.turns) if with_turns else (),
        context_tokens=len(context_ids),
        dropped_tokens=transcript.num_tokens - len(context_ids),
        context_ids=context_ids if with_turns else (),
        discards=(_encode_discard(*found) for found in transcript.all_discards if with_turns),
    )


def _encode_record(record: TurnRecord) -> pb.TurnRecord:
    return pb.TurnRecord(
        turn=record.turn,
        request_id=record.request_id,
        input_ids=record.input_ids,
        output_ids=record.output_ids,
        text=record.text,
        finish_reason=record.finish_reason,
        usage=_encode_usage(record.usage),
        created_unix_s=record.created_unix_s,
    )


def _encode_discard(turn: int, discard: Discard) -> pb.Discarded:
    return pb.Discarded(
        turn=turn,
        after_tokens=discard.after_tokens,
        ranges=(pb.TokenRange(start=start, end=end) for start, end in discard.ranges),
        reason=discard.reason,
    )


def _encode_usage(usage: Usage) -> pb.Usage:
    return pb.Usage(**asdict(usage))


def _encode_token(token: AnswerToken) -> pb.Token:
    top = [pb.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top]
    return pb.Token(token_id=token.token_id, text=token.text, logprob=token.logprob, top=top)
