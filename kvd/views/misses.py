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
        "its KV had left all tiers, to make room for other sessions",
        "give kvd more SSD, retain or pin the session, or see who fills it: kvd ls --sort bytes",
    ),
    "expired": (
        "its time to live had passed",
        "set a longer one: kvd ttl SESSION, or sessions.default_ttl in the settings",
    ),
    "flushed": ("an operator had flushed it", "nothing: it is stored again by its next turn"),
    "discarded": (
        "its tokens had been discarded from the session that had stored them",
        "let forks take a turn before, or drop fewer: overflow, compression, clients' discards",
    ),
    "corrupt": (
        "its KV was not what had been stored, and was thrown away",
        "look for failing memory or disks: kvd doctor, kvd events --name block_corrupt",
    ),
    "tokens_differ": (
        "other tokens were asked for than those that are stored",
        "see which, and in whose words: inference-svc why SESSION",
    ),
    "no_state": (
        "its tokens are stored, and no state of the model behind them is",
        "nothing, if it was a few; else give kvd more DRAM: states find no room, see kvd show",
    ),
    "no_window": (
        "its tokens are stored, and nowhere all windows that a load needs to end there",
        "nothing, if it was a few; else give kvd more room: windows find none, see kvd show",
    ),
    "not_stored": (
        "the last tokens had not been stored, or not yet",
        "nothing, if it was a few; else see what saves meet: kvd stats, inference-svc status",
    ),
    "not_fetched": (
        "the rest of it had not come from the remote store, or not yet",
        "let turns wait longer (remote.wait), or see why it did not: kvd remote status",
    ),
    "unknown_session": (
        "kvd does not know that it ever had it",
        "nothing: what kvd remembers of sessions goes when it restarts",
    ),
}
_OTHER = ("for a reason that this release of kvd does not know", "see kvd events --session SESSION")


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
