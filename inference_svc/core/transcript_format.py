r"""A session's transcript and its file format: one record a line, append-only. Pure.

    line   = crc32 of json, 8 hex digits | " " | json | "\n"
    json   = {"header": {tenant, model, session_id, forked_from}}     the first line
           | {"turn": {...}}                                          a TurnRecord, in order
           | {"discard": {ranges, after_tokens, reason}}              a client's, between turns
           | {"end": {}}                                              the session is over

A torn last line was never acknowledged, and is ignored. A bad line before the last means that the
file was damaged: the session is refused rather than continued from a wrong history. So is a session
with a discard of tokens that it does not have.

Unknown fields of records, which another release wrote, are ignored. For example, a release without
grafts ignores a turn's `grafts`: it takes the context for one that was computed as a whole, finds
none of it in kvd behind the first seam, and computes it. A release with data that must not be
ignored writes it as a record of another kind: a session with an unknown record is refused, and its
file stays as it is.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from inference_svc.core.context import Context, replay
from inference_svc.core.errors import InvalidDiscardError, SessionEndedError, TurnMismatchError
from inference_svc.core.turn_record import CacheMiss, Discard, Graft, TurnRecord, Usage
from shared.types.errors import StateError
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey


class TranscriptDamagedError(StateError):
    """A transcript file is damaged before its last line, or is inconsistent."""

    reason = "transcript_damaged"


class TranscriptSealedError(TranscriptDamagedError):
    """A transcript is sealed by a key that this service does not have."""

    reason = "transcript_sealed"


class UnknownRecordError(StateError):
    """A transcript has a record of another release that must not be ignored."""

    reason = "transcript_of_another_release"


def digest_of(key: SessionKey) -> str:
    """Return the name of a session's file: 32 hex digits."""
    return hashlib.blake2b("\0".join(key).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Header:
    """The session that a transcript belongs to; an empty session has a header only."""

    tenant: str
    model: str
    session_id: str
    forked_from: str = ""

    @property
    def key(self) -> SessionKey:
        """The session's key."""
        return SessionKey(self.tenant, self.model, self.session_id)


@dataclass(frozen=True)
class Transcript:
    """A session as its complete turns; a value: `with_turn` returns a new one.

    Attributes:
        header: the session.
        turns: its complete turns, in order.
        has_ended: whether it takes no further turn.
        discards: discards between turns, in order, each with the number of turns before it.
        cached_context: the context, if it was derived from that of the transcript before this one;
            None: it is replayed at the first use of `context`.
    """

    header: Header
    turns: tuple[TurnRecord, ...] = ()
    has_ended: bool = False
    discards: tuple[tuple[int, Discard], ...] = ()
    cached_context: Context | None = field(default=None, compare=False, repr=False)

    @cached_property
    def context(self) -> Context:
        """The context that the next turn finds."""
        return self.cached_context or replay(self.turns, self.discards)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens that the session ever had."""
        return tuple(token for turn in self.turns for token in (*turn.input_ids, *turn.output_ids))

    @property
    def tools_digest(self) -> str:
        """A digest of the tools that its context describes; "" if there are none."""
        return next((turn.tools_digest for turn in self.turns if turn.tools_digest), "")

    @property
    def template_arguments(self) -> str | None:
        """The chat template's arguments of its first turn, as JSON; None: it has no turns.

        "" if they do not change what the template writes.
        """
        return self.turns[0].template_arguments if self.turns else None

    @property
    def history(self) -> str:
        """A digest of the whole conversation; "": see `TurnRecord.history`."""
        return self.turns[-1].history if self.turns else ""

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens that the session ever had."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def all_discards(self) -> tuple[tuple[int, Discard], ...]:
        """Discards in turns and between them, each with the index of its turn, in order."""
        within = [(turn.turn, discard) for turn in self.turns for discard in turn.discards]
        return tuple(sorted((*self.discards, *within), key=lambda found: found[0]))

    def with_turn(self, turn: TurnRecord, *, is_final: bool) -> "Transcript":
        """Return the transcript after one more turn."""
        assert turn.turn == len(self.turns), "turns are appended in order"
        context = self.context.with_turn(turn)
        turns = (*self.turns, turn)
        return replace(self, turns=turns, has_ended=is_final, cached_context=context)

    def with_discard(self, discard: Discard) -> "Transcript":
        """Return the transcript after a discard between turns.

        Raises:
            InvalidDiscardError: it does not fit.
        """
        context = self.context.with_discard(discard)
        discards = (*self.discards, (len(self.turns), discard))
        return replace(self, discards=discards, cached_context=context)

    def with_end(self) -> "Transcript":
        """Return the transcript with the session ended: it takes no further turn."""
        return replace(self, has_ended=True, cached_context=self.context)

    def forked(self, session_id: str, at_turn: int) -> "Transcript":
        """Return a new session that starts as the first `at_turn` turns of this one.

        It has the context that turn `at_turn` found, or would find.
        """
        header = replace(self.header, session_id=session_id, forked_from=self.header.session_id)
        discards = tuple(found for found in self.discards if found[0] <= at_turn)
        turns = tuple(replace(turn, history="", response="") for turn in self.turns[:at_turn])
        return Transcript(header, turns, discards=discards)

    def find(self, request_id: str) -> TurnRecord | None:
        """Return the turn that was submitted with this request id; None: there is none."""
        return next((turn for turn in self.turns if turn.request_id == request_id), None)


def encode_header(header: Header) -> bytes:
    """Encode the first line of a file."""
    return _line({"header": asdict(header)})


def encode_turn(turn: TurnRecord) -> bytes:
    """Encode the line of one turn."""
    return _line({"turn": asdict(turn)})


def encode_discard(discard: Discard) -> bytes:
    """Encode the line of a discard between turns."""
    return _line({"discard": asdict(discard)})


def encode_end() -> bytes:
    """Encode the line that ends the session."""
    return _line({"end": {}})


def encode_transcript(transcript: Transcript) -> bytes:
    """Encode a whole file."""
    lines = [encode_header(transcript.header)]
    for num_turns in range(len(transcript.turns) + 1):
        between = [discard for turn, discard in transcript.discards if turn == num_turns]
        lines += map(encode_discard, between)
        lines += map(encode_turn, transcript.turns[num_turns : num_turns + 1])
    return b"".join([*lines, encode_end()] if transcript.has_ended else lines)


def decode_header(line: bytes) -> Header | None:
    """Decode a file's first line; None if it does not name a session."""
    record = _record(line)
    try:
        return None if record is None else _header(record)
    except (KeyError, TypeError, AttributeError):
        return None


def decode_transcript(data: bytes) -> tuple[Transcript | None, int]:
    """Decode a file.

    Returns:
        The transcript (None: not even a header) and the number of good bytes.

    Raises:
        TranscriptDamagedError: a line before the last is bad, or a discard is.
        UnknownRecordError: a record is another release's.
    """
    lines = data.splitlines(keepends=True)
    records: list[dict[str, Any]] = []
    good_bytes = 0
    for index, line in enumerate(lines):
        record = _record(line)
        if record is None:
            if index < len(lines) - 1:
                raise TranscriptDamagedError(
                    f"line {index + 1} of the transcript is damaged",
                    "delete the session, or restore its file from a backup",
                )
            break
        records.append(record)
        good_bytes += len(line)
    if not records:
        return None, 0
    return _transcript(records), good_bytes


def _transcript(records: list[dict[str, Any]]) -> Transcript:
    """Make a transcript from records, and check that its discards fit."""
    header, *parts = [_part(number, record) for number, record in enumerate(records, 1)]
    if not isinstance(header, Header):
        raise _unknown(1)
    turns: list[TurnRecord] = []
    discards: list[tuple[int, Discard]] = []
    for part in parts:
        if isinstance(part, TurnRecord):
            turns.append(part)
        elif isinstance(part, Discard):
            discards.append((len(turns), part))
    has_ended = "end" in records[-1]
    transcript = Transcript(header, tuple(turns), has_ended, tuple(discards))
    try:
        _ = transcript.context
    except InvalidDiscardError as error:
        raise TranscriptDamagedError(
            "a discard in the transcript does not fit its tokens",
            "delete the session, or restore its file from a backup",
        ) from error
    return transcript


def _line(record: dict[str, Any]) -> bytes:
    written = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=bytes.hex)
    text = written.encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes) -> dict[str, Any] | None:
    """Decode one line; None if it is torn or damaged."""
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    record: dict[str, Any] = json.loads(text)
    return record


def _part(number: int, record: dict[str, Any]) -> Header | TurnRecord | Discard | None:
    """Decode the record of a line; None: it ends the session.

    Raises:
        UnknownRecordError: this release could not have written it.
    """
    try:
        if "header" in record:
            return _header(record)
        if "turn" in record:
            return _turn(record["turn"])
        if "discard" in record:
            return _discard(record["discard"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise _unknown(number) from error
    if "end" not in record:
        raise _unknown(number)
    return None


def _unknown(number: int) -> UnknownRecordError:
    return UnknownRecordError(
        f"line {number} of the transcript was written by another release",
        "install that release, or delete the session",
    )


_KNOWN_FIELDS: Mapping[type, frozenset[str]] = {
    kind: frozenset(known.name for known in fields(kind))
    for kind in (Header, TurnRecord, Usage, CacheMiss, Graft)
}


def _known_fields(kind: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that this release knows."""
    return {name: value for name, value in record.items() if name in _KNOWN_FIELDS[kind]}


def _header(record: Mapping[str, Any]) -> Header:
    return Header(**_known_fields(Header, record["header"]))


def _turn(record: dict[str, Any]) -> TurnRecord:
    """Decode a turn: restore tuples, which JSON writes as lists; fields missing in Usage are 0."""
    top = tuple(
        tuple((int(token_id), float(logprob)) for token_id, logprob in tops)
        for tops in record["top_logprobs"]
    )
    rebuilt: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in _known_fields(TurnRecord, record).items()
    }
    usage = _known_fields(Usage, record["usage"])
    if usage.get("miss"):
        usage["miss"] = CacheMiss(**_known_fields(CacheMiss, usage["miss"]))
    discards = tuple(map(_discard, record.get("discards", ())))
    grafts = tuple(map(_graft, record.get("grafts", ())))
    rebuilt |= {"usage": Usage(**usage), "top_logprobs": top}
    rebuilt |= {"discards": discards, "grafts": grafts}
    return TurnRecord(**rebuilt)


def _discard(record: dict[str, Any]) -> Discard:
    ranges = tuple((int(start), int(end)) for start, end in record["ranges"])
    found = record.get("lineage")
    lineage = _lineage(found) if found else None
    return Discard(ranges, int(record["after_tokens"]), str(record["reason"]), lineage)


def _graft(record: dict[str, Any]) -> Graft:
    return Graft(**{**_known_fields(Graft, record), "lineage": _lineage(record["lineage"])})


def _lineage(record: Mapping[str, Any]) -> Lineage:
    return Lineage(bytes.fromhex(record["digest"]), record["clean_tokens"])


@dataclass(frozen=True)
class ExpectedSession:
    """A session's state as a client expects it, checked before the session changes.

    Attributes:
        num_turns: number of complete turns; None: any.
        context_tokens: number of tokens in the context; None: any.
    """

    num_turns: int | None = None
    context_tokens: int | None = None

    def check(self, transcript: Transcript) -> None:
        """Raise unless the session is open, and in the state that the client expects.

        Raises:
            TurnMismatchError: the numbers differ.
            SessionEndedError: it takes no further turn.
        """
        num_turns, context_tokens = len(transcript.turns), len(transcript.context.token_ids)
        if self.num_turns not in (None, num_turns):
            raise TurnMismatchError(
                f"the session has {num_turns} complete turns, but expected_turn is "
                f"{self.num_turns}",
                f"read the session, then submit with expected_turn = {num_turns}",
            )
        if self.context_tokens not in (None, context_tokens):
            raise TurnMismatchError(
                f"the session has a context of {context_tokens} tokens, but "
                f"expected_context_tokens is {self.context_tokens}",
                "read the session: the same discard may have succeeded before",
            )
        if transcript.has_ended:
            raise SessionEndedError(
                f"session {transcript.header.session_id} ended with a final turn",
                "begin a new session, or fork this one",
            )
