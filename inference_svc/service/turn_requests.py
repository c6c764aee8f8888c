"""What clients send of a turn, decoded and checked as far as that goes without the session."""

import hashlib
import math
import secrets
import time
import uuid
from dataclasses import replace
from typing import Any

from inference_svc.core.answers import SamplingParams
from inference_svc.core.compression.policies import check_compression, make_compression
from inference_svc.core.compression.policy import CompressionPolicy
from inference_svc.core.discards import Range
from inference_svc.core.errors import EmptyTurnError, InvalidDiscardError, InvalidTurnError
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
from inference_svc.core.transcript_format import ExpectedSession
from inference_svc.core.truncation import OverflowPolicy
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

MAX_SEED = 2**63
MAX_DISCARD_ITEMS = 65536  # ranges and positions of one Discard


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


def decode_discard(request: pb.DiscardRequest) -> tuple[list[Range], ExpectedSession]:
    """What is to go, as ranges in any order, and what the client believes of the session.

    Raises:
        InvalidDiscardError: there are too many.
    """
    num_items = len(request.ranges) + len(request.positions)
    if num_items > MAX_DISCARD_ITEMS:
        raise InvalidDiscardError(
            f"{num_items} ranges and positions are more than {MAX_DISCARD_ITEMS}",
            "send ranges rather than positions, or several discards",
        )
    ranges = [(found.start, found.end) for found in request.ranges]
    ranges += [(position, position + 1) for position in request.positions]
    has_context_tokens = request.HasField("expected_context_tokens")
    expected = ExpectedSession(
        request.expected_turn if request.HasField("expected_turn") else None,
        request.expected_context_tokens if has_context_tokens else None,
    )
    return ranges, expected


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
        check_compression(policy, defaults.model.attention_mode)
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
    if request.special_tokens and kind in {"chat", "tokens"}:
        raise InvalidTurnError(
            f"special_tokens goes with text, not with {kind}", "leave it out, or send text"
        )
    if kind == "text" and request.text:
        return TextInput(request.text, request.special_tokens)
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
