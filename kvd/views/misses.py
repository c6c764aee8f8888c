"""The explanation of `kvd why`: why KV of a session was missed, and what would keep it. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvd.core.state.session_history import REMOVALS, MoveKind
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.units import format_duration

# Reasons for a miss, as kvd's events name them: their meaning, and the remedy.
_REASONS = {
    "evicted": (
        "its KV had been evicted from all tiers, to make room for other sessions",
        (
            "give kvd more SSD, retain or pin the session, or find out which sessions take "
            "the room: kvd ls --sort bytes"
        ),
    ),
    "expired": (
        "its TTL had passed",
        "set a longer TTL: kvd ttl SESSION, or sessions.default_ttl in the settings",
    ),
    "flushed": ("an operator had flushed it", "none needed: its next turn stores it again"),
    "discarded": (
        "another session had stored its tokens, and had discarded them since",
        (
            "let forks run a turn before the discard, or discard less (overflow, "
            "compression, clients' discards)"
        ),
    ),
    "corrupt": (
        "its KV was damaged, and was discarded",
        "check the memory and the disks: kvd doctor, kvd events --name block_corrupt",
    ),
    "tokens_differ": (
        "the tokens that were asked for differ from those that are stored",
        "to see which differ, as text, run: inference-svc why SESSION",
    ),
    "no_state": (
        "its tokens are stored, but not the state of the model after them",
        (
            "none needed for a few tokens; otherwise give kvd more DRAM: there is no room "
            "for states (see kvd show)"
        ),
    ),
    "no_window": (
        "its tokens are stored, but nowhere with all the windows that a load needs at its end",
        (
            "none needed for a few tokens; otherwise give kvd more room: there is none for "
            "windows (see kvd show)"
        ),
    ),
    "not_stored": (
        "the last tokens had not been stored yet, or not at all",
        (
            "none needed for a few tokens; otherwise find out what hinders saves: kvd stats, "
            "inference-svc status"
        ),
    ),
    "not_fetched": (
        "the rest of it had not come from the remote store yet, or not at all",
        "let turns wait longer (remote.wait), or find out why it did not come: kvd remote status",
    ),
    "unknown_session": (
        "kvd does not know that it ever had this KV",
        "none: kvd forgets what it knew of sessions when it restarts",
    ),
}
_OTHER = (
    "for a reason that this release of kvd does not know",
    "run: kvd events --session SESSION",
)


@dataclass(frozen=True)
class ExplainedMiss:
    """The explanation of a session's last miss.

    Attributes:
        reason: a slug; "": kvd remembers no miss.
        missed_tokens: tokens that were asked for and missing, the last time.
        missed_ago_s: seconds since then.
        gone: how the session left all tiers; "": it is stored.
        gone_ago_s: seconds since then.
        stored_tokens: tokens of it that are stored.
        told: the meaning of the reason.
        remedy: what would help.
    """

    reason: str
    missed_tokens: int
    missed_ago_s: float
    gone: str
    gone_ago_s: float
    stored_tokens: int
    told: str
    remedy: str

    def as_document(self) -> dict[str, Any]:
        """Return the explanation as a JSON document."""
        return asdict(self)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the explanation as labels and texts."""
        if self.reason:
            ago = format_duration(self.missed_ago_s)
            yield "missed", f"{self.missed_tokens:,} tokens, {ago} ago: {self.told}"
        else:
            yield "missed", "nothing, as far as kvd remembers"
        if self.gone:
            yield "stored", f"nothing: {self.gone} {format_duration(self.gone_ago_s)} ago"
        else:
            yield "stored", f"{self.stored_tokens:,} tokens"
        if self.remedy:
            yield "remedy", self.remedy


def explain_miss(found: kvd_pb2.DescribeSessionResponse) -> ExplainedMiss:
    """Explain a session's last miss from its history."""
    missed = _last(found.history, {MoveKind.MISSED.value})
    removed = None
    if not found.HasField("info"):
        removed = _last(found.history, {kind.value for kind in REMOVALS})
    reason = missed.why if missed else ""
    told, remedy = _REASONS.get(reason, _OTHER) if reason else ("", "")
    if removed and not reason:
        _, remedy = _REASONS.get(_slug(removed), _OTHER)
    return ExplainedMiss(
        reason=reason,
        missed_tokens=missed.num_tokens if missed else 0,
        missed_ago_s=missed.age_s if missed else 0.0,
        gone=_slug(removed) if removed else "",
        gone_ago_s=removed.age_s if removed else 0.0,
        stored_tokens=found.info.num_tokens,
        told=told,
        remedy=remedy,
    )


def _slug(removed: kvd_pb2.SessionMove) -> str:
    return removed.why if removed.kind == MoveKind.DROPPED.value else removed.kind


def _last(moves: Sequence[kvd_pb2.SessionMove], kinds: set[str]) -> kvd_pb2.SessionMove | None:
    return next((move for move in reversed(moves) if move.kind in kinds), None)
