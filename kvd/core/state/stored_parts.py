"""PartsTable: the recurrent states and the attention windows that sessions have stored.

A *state* is everything that a model's recurrent layers keep of the tokens before a position. A
*window* is what the layers that attend only to the last tokens keep of the tokens of one block.
Both are stored in *parts*: blocks without tokens, which are read, written, evicted and verified
like all others. This table finds them. A state is found by the key of the full blocks before it,
whichever session stored it, because its own key says which tokens it covers. A window is found by
the key of its block.

Pure. Invariants (checking.py states them as code): 1. a state or window is here with a session
exactly while the session has its spans, packed or not; 2. a session has all of its parts or none.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvd.core.records.entries import Span
from shared.types.session_key import SessionKey


@dataclass(slots=True, eq=False)
class StoredParts:
    """The parts of one state, or of one window.

    Attributes:
        position: how many tokens a state covers.
        key: key of the state (see shared/types/block_key.py), or of the window's block.
        parent: key of the full blocks before the position, or of the window's block.
        spans: the parts, in order, as every session has them.
        users: sessions that have it, oldest first.
    """

    position: int
    key: bytes
    parent: bytes
    spans: tuple[Span, ...]
    users: dict[SessionKey, None] = field(default_factory=dict)


def group_parts(spans: Iterable[Span]) -> dict[bytes, list[Span]]:
    """Group the spans that are parts by their state or window: its parts in order, by its key."""
    parts: dict[bytes, list[Span]] = {}
    for span in spans:
        if not span.num_tokens:
            parts.setdefault(span.tokens_digest, []).append(span)
    return parts


def without_parts(spans: Sequence[Span], part_key: bytes) -> list[Span]:
    """Return the spans without the state or window that has a part in the block `part_key`."""
    key = next(span.tokens_digest for span in spans if span.block_key == part_key)
    return [span for span in spans if span.num_tokens or span.tokens_digest != key]


def whole_prefix(spans: Sequence[Span], num_spans: int) -> Sequence[Span]:
    """Return the first spans; fewer, if that would keep some parts of something without others."""
    while 0 < num_spans < len(spans) and _is_torn(spans[num_spans - 1], spans[num_spans]):
        num_spans -= 1
    return spans[:num_spans]


def is_window(part: Span) -> bool:
    """Whether a span without tokens is a part of a window, and not of a state."""
    return part.tokens_digest == part.chain


def interleave(runs: Sequence[Span], parts_of: Collection[Sequence[Span]]) -> list[Span]:
    """Insert the parts of states and windows between the runs of tokens.

    The parts of a state follow the run with the last token that it covers, those of a window follow
    the first run on its block. Parts that belong after the last run are left out.

    Args:
        runs: runs of a session's tokens, from its first token on.
        parts_of: the parts of each state and window.
    """
    windows = {parts[0].chain: parts for parts in parts_of if is_window(parts[0])}
    states = (parts for parts in parts_of if not is_window(parts[0]))
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
    """The states and windows that sessions have, by the key of the blocks before them."""

    def __init__(self) -> None:
        self._behind: dict[bytes, dict[bytes, StoredParts]] = {}

    def __iter__(self) -> Iterator[StoredParts]:
        return (state for found in self._behind.values() for state in found.values())

    def behind(self, parent: bytes) -> Mapping[bytes, StoredParts]:
        """Return the states after the full blocks `parent` and before the next block, by key."""
        return self._behind.get(parent, {})

    def window_of(self, block_key: bytes) -> StoredParts | None:
        """Return the window of a block; None if there is none."""
        return self.behind(block_key).get(block_key)

    def replace(self, key: SessionKey, before: Sequence[Span], after: Sequence[Span]) -> None:
        """Record that a session's spans have changed from `before` to `after`."""
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
