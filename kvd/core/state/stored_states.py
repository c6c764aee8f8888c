"""StoredStates: which states of their models sessions have, found by the blocks before them.

A state is all that the recurrent layers know behind a position, in one piece; its parts lie in
blocks without tokens, which are read, written, evicted and verified like all others. Here is what
is needed to find one: the key of the full blocks before it leads to it, whichever session stored
it, because its key says which tokens it is of.

Pure. Invariants (checking.py states them as code): 1. a state is here with a session exactly while
the session has its spans, packed or not; 2. a session has all parts of a state or none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvd.core.records.entries import Span
from shared.types.session_key import SessionKey


@dataclass(slots=True, eq=False)
class StoredState:
    """One state.

    Attributes:
        position: how many tokens it knows of.
        key: says which; see shared/types/block_key.py.
        parent: key of the full blocks before the position.
        spans: its parts, in order, as every session has them.
        users: sessions that have it, in the order in which they came.
    """

    position: int
    key: bytes
    parent: bytes
    spans: tuple[Span, ...]
    users: dict[SessionKey, None] = field(default_factory=dict)


def group_states(spans: Iterable[Span]) -> dict[bytes, list[Span]]:
    """Return the parts of each state among spans, by the state's key, in order."""
    parts: dict[bytes, list[Span]] = {}
    for span in spans:
        if not span.num_tokens:
            parts.setdefault(span.tokens_digest, []).append(span)
    return parts


def without_state(spans: Sequence[Span], part_key: bytes) -> list[Span]:
    """Return spans without the state one of whose parts lies in this block."""
    key = next(span.tokens_digest for span in spans if span.block_key == part_key)
    return [span for span in spans if span.num_tokens or span.tokens_digest != key]


def whole_prefix(spans: Sequence[Span], num_spans: int) -> Sequence[Span]:
    """Return the first spans, or less of them than some parts of a state without the others."""
    while 0 < num_spans < len(spans) and _is_torn(spans[num_spans - 1], spans[num_spans]):
        num_spans -= 1
    return spans[:num_spans]


def interleaved(runs: Sequence[Span], states: Iterable[Sequence[Span]]) -> list[Span]:
    """Put the parts of states behind the runs that they know the last token of.

    States behind the last run are left out.

    Args:
        runs: of a session's tokens, from the first one on.
        states: the parts of each.
    """
    waiting = sorted(states, key=lambda parts: parts[0].start, reverse=True)
    spans = []
    end = 0
    for run in runs:
        spans.append(run)
        end += run.num_tokens
        while waiting and waiting[-1][0].start <= end:
            spans += waiting.pop()
    return spans


def _is_torn(last: Span, following: Span) -> bool:
    has_tokens = last.num_tokens or following.num_tokens
    return not has_tokens and last.tokens_digest == following.tokens_digest


class StoredStates:
    """See the module docstring."""

    def __init__(self) -> None:
        self._behind: dict[bytes, dict[bytes, StoredState]] = {}

    def __iter__(self) -> Iterator[StoredState]:
        return (state for found in self._behind.values() for state in found.values())

    def behind(self, parent: bytes) -> Mapping[bytes, StoredState]:
        """Return the states behind full blocks with this key, and before the next one, by key."""
        return self._behind.get(parent, {})

    def replace(self, key: SessionKey, before: Sequence[Span], after: Sequence[Span]) -> None:
        """Take note that a session has other spans now."""
        old, new = group_states(before), group_states(after)
        for state_key, parts in new.items():
            if state_key not in old:
                self._add(key, parts)
        for state_key, parts in old.items():
            if state_key not in new:
                self._remove(key, parts[0])

    def _add(self, key: SessionKey, parts: list[Span]) -> None:
        first = parts[0]
        found = self._behind.setdefault(first.chain, {})
        state = found.get(first.tokens_digest)
        if state is None:
            state = StoredState(first.start, first.tokens_digest, first.chain, tuple(parts))
            found[state.key] = state
        state.users[key] = None

    def _remove(self, key: SessionKey, first: Span) -> None:
        found = self._behind[first.chain]
        state = found[first.tokens_digest]
        del state.users[key]
        if not state.users:
            del found[state.key]
            if not found:
                del self._behind[first.chain]
