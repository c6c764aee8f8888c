"""Decodes gRPC's requests, and encodes events, turns and sessions as gRPC's messages."""

import hashlib
import math
import time
import uuid
from dataclasses import asdict
from typing import Any

from inference_svc.core.chat import Message
from inference_svc.core.errors import InvalidDiscardError, InvalidTurnError
from inference_svc.core.grammar import Grammar, GrammarKind
from inference_svc.core.ranges import Range
from inference_svc.core.retention import MAX_RETENTION_S, Retention
from inference_svc.core.submission import (
    MAX_DEADLINE_S,
    MAX_PRIORITY,
    MAX_REQUEST_ID,
    MIN_PRIORITY,
    ChatInput,
    Submission,
    TextInput,
    TokenInput,
    TurnDefaults,
    TurnInput,
    check_author_name,
)
from inference_svc.core.template_arguments import check_arguments, read_arguments
from inference_svc.core.transcript_format import ExpectedSession, Transcript
from inference_svc.core.turn_record import (
    Accepted,
    AnswerToken,
    Discard,
    Graft,
    Started,
    Tokens,
    TurnEvent,
    TurnRecord,
    Usage,
)
from inference_svc.runtime.turns.misses import ExplainedMiss
from inference_svc.service.submissions import (
    chat_input,
    empty_turn,
    fill_compression,
    fill_overflow,
    fill_sampling,
)
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

MAX_DISCARD_ITEMS = 65536  # ranges and positions of one Discard
# Fields in which a repeat of a turn may differ from it: they are not part of the digest.
IGNORED_FIELDS = (
    *("session_id", "request_id", "expected_turn", "wait", "priority", "deadline_s"),
    *("retention", "prediction"),
)


def decode_submission(
    request: pb.SubmitTurnRequest,
    key: SessionKey,
    defaults: TurnDefaults,
    rpc_left_s: float | None = None,
) -> Submission:
    """Decode a turn, and check all that can be checked without the session.

    Args:
        request: the client's message.
        key: the session's key.
        defaults: values for fields that the client has not set.
        rpc_left_s: seconds until the RPC's own deadline; None if it has none.

    Raises:
        EmptyTurnError: there is no input.
        InvalidSamplingError: sampling parameters are out of range; the message lists all of them.
        InvalidTurnError: request id, priority, deadline or the overflow policy are out of range;
            the message lists all values.
        InvalidCompressionError: there is no such policy, or this model does not support it.
    """
    params = request.sampling
    sampling = fill_sampling(
        {
            **_set_fields(params),
            "stop": tuple(params.stop),
            "stop_token_ids": tuple(params.stop_token_ids),
            "logit_bias": dict(params.logit_bias),
            "ignore_eos": params.ignore_eos,
            "grammar": _decode_grammar(params.grammar),
        },
        defaults,
    )
    _check_fields(request)
    arrived_ns = time.monotonic_ns()
    overflow, compression = request.overflow, request.compression
    named = {"name": overflow.policy} if overflow.policy else {}
    return Submission(
        key=key,
        input=_decode_input(request),
        sampling=sampling,
        has_max_tokens=params.HasField("max_tokens"),
        request_id=request.request_id or f"r-{uuid.uuid4().hex}",
        digest=_digest(request),
        expected_turn=request.expected_turn if request.HasField("expected_turn") else None,
        waits=request.wait,
        is_final=request.final,
        arrived_ns=arrived_ns,
        priority=request.priority,
        deadline_ns=_deadline_ns(arrived_ns, request.deadline_s or None, rpc_left_s),
        overflow=fill_overflow({**_set_fields(overflow), **named}, defaults),
        compression=fill_compression(
            defaults,
            compression.policy,
            compression.keep_ratio if compression.HasField("keep_ratio") else None,
        ),
        retention=_decode_retention(request.retention),
        prediction=request.prediction,
    )


def decode_discard(request: pb.DiscardRequest) -> tuple[list[Range], ExpectedSession]:
    """Return the ranges to drop, in any order, and the session's state that the client expects.

    Raises:
        InvalidDiscardError: there are more than MAX_DISCARD_ITEMS.
    """
    num_items = len(request.ranges) + len(request.positions)
    if num_items > MAX_DISCARD_ITEMS:
        raise InvalidDiscardError(
            f"{num_items} ranges and positions are too many, at most {MAX_DISCARD_ITEMS} are "
            "possible",
            "send ranges instead of positions, or several discards",
        )
    ranges = [(found.start, found.end) for found in request.ranges]
    ranges += [(position, position + 1) for position in request.positions]
    has_context_tokens = request.HasField("expected_context_tokens")
    expected = ExpectedSession(
        request.expected_turn if request.HasField("expected_turn") else None,
        request.expected_context_tokens if has_context_tokens else None,
    )
    return ranges, expected


def encode_event(event: TurnEvent) -> pb.TurnEvent:
    """Encode one event of a turn's stream."""
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
            stop_string=event.stop_string,
        )
    )


def encode_session(transcript: Transcript, *, is_busy: bool, with_turns: bool) -> pb.Session:
    """Encode a session's transcript."""
    header, context_ids = transcript.header, transcript.context.token_ids
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


def encode_miss(explained: ExplainedMiss) -> pb.ExplainMissResponse:
    """Encode the explanation of a cache miss."""
    return pb.ExplainMissResponse(**asdict(explained))


# ------------------------------------------------------------------------------------ decoding


def _decode_grammar(grammar: pb.Grammar) -> Grammar | None:
    kind = grammar.WhichOneof("source")
    return Grammar(GrammarKind(kind), getattr(grammar, kind)) if kind else None


def _set_fields(message: Any) -> dict[str, Any]:
    """Return the optional fields of a message that are set, by name."""
    return {
        field.name: getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
        if field.has_presence and field.message_type is None and message.HasField(field.name)
    }


def _decode_input(request: pb.SubmitTurnRequest) -> TurnInput:
    """Decode a turn's text, chat messages or token ids."""
    kind = request.WhichOneof("input")
    if request.special_tokens and kind in {"chat", "tokens"}:
        raise InvalidTurnError(
            f"special_tokens is only possible with text, not with {kind}",
            "leave it out, or send text",
        )
    if kind == "text" and request.text:
        return TextInput(request.text, request.special_tokens)
    if kind == "chat":
        return _decode_chat(request.chat)
    if kind == "tokens" and request.tokens.ids:
        return TokenInput(tuple(request.tokens.ids))
    raise empty_turn()


def _decode_retention(retention: pb.Retention) -> Retention:
    """Decode for how long a turn's KV is to be kept, and check the bounds."""
    for wish_s in (retention.session_s, retention.prefix_s):
        if not 0 <= wish_s <= MAX_RETENTION_S:
            raise InvalidTurnError(
                f"a retention of {wish_s} s is not valid",
                f"send up to {MAX_RETENTION_S:.0f} s, or 0 for none",
            )
    return Retention(retention.session_s, retention.prefix_s)


def _decode_chat(chat: pb.ChatMessages) -> ChatInput:
    """Decode chat messages and the chat template's arguments."""
    messages = []
    for message in chat.messages:
        check_author_name(message.name)
        messages.append(Message(message.role, message.content, name=message.name))
    arguments = read_arguments(chat.template_arguments)
    check_arguments(arguments)
    return chat_input(messages, arguments=arguments, beginning=chat.beginning)


def _check_fields(request: pb.SubmitTurnRequest) -> None:
    """Raise an InvalidTurnError if request id, priority or deadline are out of range."""
    problems, accepted = [], []
    name = request.request_id
    if len(name) > MAX_REQUEST_ID or not name.isprintable():
        problems.append(f"request_id {name[:40]!r}")
        accepted.append(f"request_id of up to {MAX_REQUEST_ID} printable characters")
    if not MIN_PRIORITY <= request.priority <= MAX_PRIORITY:
        problems.append(f"priority {request.priority}")
        accepted.append(f"priority {MIN_PRIORITY} to {MAX_PRIORITY}")
    if not (request.deadline_s >= 0 and math.isfinite(request.deadline_s)):
        problems.append(f"deadline_s {request.deadline_s}")
        accepted.append("deadline_s in seconds, 0 for none")
    if problems:
        raise InvalidTurnError(
            f"{' and '.join(problems)} cannot be accepted", f"send {' and '.join(accepted)}"
        )


def _deadline_ns(arrived_ns: int, *left_s: float | None) -> int | None:
    """Return the earliest of several deadlines, each in seconds from the arrival, or None."""
    known_s = [value for value in left_s if value is not None and value <= MAX_DEADLINE_S]
    return arrived_ns + int(min(known_s) * NS_PER_S) if known_s else None


def _digest(request: pb.SubmitTurnRequest) -> str:
    """Return the digest of input and sampling, which a repeat of the request id must share."""
    copy = pb.SubmitTurnRequest()
    copy.CopyFrom(request)
    for name in IGNORED_FIELDS:
        copy.ClearField(name)
    return hashlib.blake2b(copy.SerializeToString(deterministic=True), digest_size=16).hexdigest()


# ------------------------------------------------------------------------------------ encoding


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
        stop_string=record.stop_string,
        grafts=map(_encode_graft, record.grafts),
    )


def _encode_graft(graft: Graft) -> pb.Graft:
    return pb.Graft(
        seam=graft.seam,
        num_tokens=graft.num_tokens,
        session_id=graft.session_id,
        source_start=graft.source_start,
        healed_tokens=graft.healed_tokens,
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
