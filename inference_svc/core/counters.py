"""The service's counters, in one table. Pure; counts only grow while the process lives."""

from collections import Counter
from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "turns_finished": "turns answered",
    "turns_cancelled": "turns stopped by their client or by the drain",
    "turns_failed": "turns that were refused or ended with an error",
    "turns_replayed": "repeats answered with the recorded result",
    "turns_refused": "turns that found no place in the queue",
    "turns_forked": "turns in a fork of their session: another server has gone on with it",
    "turns_handed_back": "turns that the drain returned to their clients",
    "refused_rate_limited": "turns of tenants that had used up their turns or tokens of a minute",
    "refused_too_many_turns": "turns of tenants that had as many under way as they may",
    "refused_too_many_sessions": "sessions not opened: their tenants have as many as they may",
    "refused_too_many_streams": "streams of clients that had as many as they may",
    "preempted": "turns that were preempted, to resume later",
    "expired": "turns whose deadline passed",
    "steps": "forward passes",
    "steps_failed": "forward passes that raised; their requests were computed one by one",
    "steps_replayed": "decode steps that were replayed from a graph; the others were computed anew",
    "history_tokens": "prompt tokens that an earlier turn had computed",
    "reused_tokens": "of them, still in memory or loaded from kvd",
    "recomputed_tokens": "of them, computed again",
    "new_tokens": "prompt tokens computed for the first time",
    "output_tokens": "tokens answered",
    "drafted_tokens": "tokens that were guessed ahead of answers and computed",
    "accepted_tokens": "of them, those that were right",
    "kept_tokens": "tokens whose KV was kept behind an edit, though computed over others",
    "healed_tokens": "tokens behind an edit that were computed anew, though they are the same",
    "embeddings": "inputs that were embedded",
    "embedded_tokens": "tokens of them",
    "overflows": "times that tokens of a session were dropped because its window was full",
    "dropped_tokens": "tokens given up by them",
    "compressed_tokens": "tokens dropped by compression policies",
    "discards": "times that a client dropped tokens of a session",
    "shifts": "discards after which the rest of a session's KV was compacted in memory",
    "shifts_failed": "discards after which it was released from memory",
    "store_discards": "discards that were reported to kvd",
    "store_discards_failed": "discards that could not be reported: a later load misses",
    "expectations": "times that kvd was told which tools a session awaits, or what supersedes it",
    "expectations_lost": "of which kvd heard nothing: it was not there, too old, or had not stored",
    "resident_hits": "turns whose session still had KV in memory",
    "prefixes_shared": "turns that began with KV in memory of another session",
    "residents_evicted": "idle sessions whose KV left memory for others'",
    "moves": "turns whose session's KV was copied to larger memory",
    "load_hits": "turns for which kvd had KV",
    "load_misses": "turns for which kvd had no KV that may be used",
    "loads_refused": "loads not begun, because recomputing was cheaper",
    "load_errors": "loads that failed; their turns recomputed",
    "load_failed_late": "of them, after compute had begun: it began again",
    "loads_retried": "loads that failed while kvd was still reading, and were requested again",
    "saves": "turns whose KV was stored",
    "saves_refused": "saves that kvd had no room for",
    "save_errors": "saves that failed",
    "save_dropped": "turns whose KV was not stored, or not to its end: kvd failed, or stood still",
    "saves_cut_short": "blocks stored before they were full, to make room in the write ring",
    "write_stalls": "plans of a step in which a turn found no room in the write ring",
    "stored_tokens": "tokens whose KV was stored",
    "stored_states": "states of a model that were stored",
    "stored_window_tokens": "tokens whose KV of layers with a window was stored",
    "loaded_window_tokens": "tokens whose KV of layers with a window was loaded",
    "loaded_states": "states of a model that turns began with",
    "copiers_lost": "times that the copier of the GPU died: copies went by shared memory then",
}


class Counters:
    """The process's counters, by the names of COUNTERS."""

    def __init__(self) -> None:
        self._counts = Counter(dict.fromkeys(COUNTERS, 0))

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a count; the name must be in the table."""
        assert name in COUNTERS, name
        self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """Return all counts by name."""
        return dict(self._counts)
