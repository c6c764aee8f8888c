"""PartsTable: which states of their models, and which windows of their blocks, sessions have.

A *state* is all that the recurrent layers know behind a position, in one piece. A *window* is what
the layers that attend to the last tokens only have of the tokens of one block. Both lie in *parts*,
blocks without tokens, which are read, written, evicted and verified like all others. Here is what
is needed to find them: the key of the full blocks before a state leads to it, whichever session
stored it, because its key says which tokens it is of; to a window does the key of its block.

Pure. Invariants (checking.py states them as code): 1. a state or window is here with a session
exactly while the session has its spans, packed or not; 2. a session has all of its parts or none.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvd.core.records.entries import Span
from shared.types.session_key import SessionKey


@dataclass(slots=True, eq=False)
class StoredParts:
    """One state, or one window.

    Attributes:
        position: how many tokens a state knows of.
        key: says which; see shared/types/block_key.py. A window has that of its block.
        parent: key of the full blocks before the position, or of the window's block.
        spans: its parts, in order, as every session has them.
        users: sessions that have it, in the order in which they came.
    """

    position: int
    key: bytes
    parent: bytes
    spans: tuple[Span, ...]
    users: dict[SessionKey, None] = field(default_factory=dict)


def group_parts(spans: Iterable[Span]) -> dict[bytes, list[Span]]:
    """Return the parts of each state and window among spans, by its key, in order."""
    parts: dict[bytes, list[Span]] = {}
    for span in spans:
        if not span.num_tokens:
            parts.setdefault(span.tokens_digest, []).append(span)
    return parts


def without_parts(spans: Sequence[Span], part_key: bytes) -> list[Span]:
    """Return spans without the state or window one of whose parts lies in this block."""
    key = next(span.tokens_digest for span in spans if span.block_key == part_key)
    return [span for span in spans if span.num_tokens or span.tokens_digest != key]


def whole_prefix(spans: Sequence[Span], num_spans: int) -> Sequence[Span]:
    """Return the first spans, or less of them than some parts of something without the others."""
    while 0 < num_spans < len(spans) and _is_torn(spans[num_spans - 1], spans[num_spans]):
        num_spans -= 1
    return spans[:num_spans]


def is_window(part: Span) -> bool:
    """Whether a span without tokens is a part of a window, and not of a state."""
    return part.tokens_digest == part.chain


def interleaved(runs: Sequence[Span], others: Collection[Sequence[Span]]) -> list[Span]:
    """Put the parts of states and windows among the runs of tokens.

    Those of a state are behind the run that it knows the last token of, those of a window behind
    the first run on its block. What would be behind the last run is left out.

    Args:
        runs: of a session's tokens, from the first one on.
        others: the parts of each state and window.
    """
    windows = {parts[0].chain: parts for parts in others if is_window(parts[0])}
    states = (parts for parts in others if not is_window(parts[0]))
    waiting = sorted(states, key=lambda parts: parts[0].start, reverse=True)
    spans = []
    end = 0
    for run in runs:
        spans.append(run)
        spans += windows.pop(run.block_key, ())
        end += run.num_tokens
        while waiting and waiting[-1][0].start <= end:
            spans += waiting.pop()
    return spans


def _is_torn(last: Span, following: Span) -> bool:
    has_tokens = last.num_tokens or following.num_tokens
    return not has_tokens and last.tokens_digest == following.tokens_digest


class PartsTable:
    """See the module docstring."""

    def __init__(self) -> None:
        self._behind: dict[bytes, dict[bytes, StoredParts]] = {}

    def __iter__(self) -> Iterator[StoredParts]:
        return (state for found in self._behind.values() for state in found.values())

    def behind(self, parent: bytes) -> Mapping[bytes, StoredParts]:
        """Return the states behind full blocks with this key, and before the next one, by key."""
        return self._behind.get(parent, {})

    def window_of(self, block_key: bytes) -> StoredParts | None:
        """Find the window of a block."""
        return self.behind(block_key).get(block_key)

    def replace(self, key: SessionKey, before: Sequence[Span], after: Sequence[Span]) -> None:
        """Take note that a session has other spans now."""
        old, new = group_parts(before), group_parts(after)
        for own_key, parts in new.items():
            if own_key not in old:
                self._add(key, parts)
        for own_key, parts in old.items():
            if own_key not in new:
                self._remove(key, parts[0])

    def _add(self, key: SessionKey, parts: list[Span]) -> None:
        first = parts[0]
        found = self._behind.setdefault(first.chain, {})
        stored = found.get(first.tokens_digest)
        if stored is None:
            stored = StoredParts(first.start, first.tokens_digest, first.chain, tuple(parts))
            found[stored.key] = stored
        stored.users[key] = None

    def _remove(self, key: SessionKey, first: Span) -> None:
        found = self._behind[first.chain]
        stored = found[first.tokens_digest]
        del stored.users[key]
        if not stored.users:
            del found[stored.key]
            if not found:
                del self._behind[first.chain]
