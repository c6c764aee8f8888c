"""Window matching: find where loads may end, choose the windows to store, and those to keep.

Pure. The only change it makes is to unpack sessions. A layer with a window attends to the last
tokens only, to at most KVLayout.window of them. So a load may end exactly where the windows of all
blocks are stored that have any of these last tokens. Windows before them are needed only if loads
are to end there, too. A window is found by the key of its block: whichever session stored it, it is
of these tokens, computed after the same tokens before them.

Engines name the token counts at which loads are to be able to end, before or after these tokens are
stored. If the next turn diverges in the middle of a block, its tokens are stored in another block;
so a load up to the beginning of that block is made possible, too.

A session keeps the windows that loads to the newest two named ends need (a turn's end, and where
the next turn may diverge from it), those of as many tokens from its first window on (at the end of
the common beginning of conversations), those for named ends that are not stored yet, and those that
other sessions share.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

from kvd.core.operations.chaining import Chaining
from kvd.core.operations.matching import NewParts, Piece, StorePlan
from kvd.core.records.entries import Span
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.stored_parts import StoredParts, group_parts, interleave
from shared.types.session_key import SessionKey

NO_WINDOW = "no_window"  # miss reason: the tokens are stored, but no load may end behind them
NUM_NEWEST = 2  # newest ends whose windows a session keeps
MOST_PENDING = 4  # named ends beyond the stored tokens that are remembered

Rows = tuple[int, int, int]  # first token, number of tokens, first row


class Loadable(NamedTuple):
    """The KV that a load may be granted.

    Attributes:
        pieces: the tokens up to the load's end, then the parts of the state there, or of windows.
        windows: for each window, the rows that are needed of it.
    """

    pieces: list[Piece]
    windows: tuple[Rows, ...]


def up_to_windows(
    state: CacheState, found: Sequence[Piece], from_token: int, *, dram_only: bool
) -> Loadable:
    """Return the KV up to the last possible end of a load behind `from_token`, and its windows.

    With `dram_only` it is the last end for which everything is in DRAM; if there is none, the last
    one in any tier.
    """
    last = _last_end(state, found, from_token, dram_only=dram_only)
    if last is None and dram_only:
        last = _last_end(state, found, from_token, dram_only=False)
    if last is None:
        return Loadable([], ())
    end = found[last].end
    first = bisect_right([piece.end for piece in found], end - state.layout.window)
    parts, windows = [], []
    for piece in found[first : last + 1]:
        stored = _window_of(state, piece.span.block_key)
        assert stored is not None, "a load ends where its windows are stored"
        windows.append((piece.token_offset, piece.span.num_tokens, piece.span.start))
        for span in stored.spans:
            block = state.find_block(span.block_key)
            assert block is not None, "a window that is stored has all its parts"
            parts.append(Piece(span, block, end))
    if len(parts) >= len(state.slots):
        return Loadable([], ())  # the arena could never hold them beside a block of tokens
    return Loadable([*found[: last + 1], *parts], tuple(windows))


def _last_end(
    state: CacheState, found: Sequence[Piece], from_token: int, *, dram_only: bool
) -> int | None:
    """Return the index of the last piece that a load may end with; None: there is none."""
    if dram_only:
        wanted = (piece.end <= from_token or piece.block.is_in_dram for piece in found)
        found = [piece for piece, _ in zip(found, takewhile(bool, wanted), strict=False)]
    has_window = [_has_window(state, piece, dram_only=dram_only) for piece in found]
    last = None
    for index in possible_ends([p.end for p in found], has_window, state.layout.window):
        if found[index].end > from_token:
            last = index
    return last


def possible_ends(ends: Sequence[int], has_window: Iterable[bool], window: int) -> Iterator[int]:
    """Yield the indexes of blocks at whose ends loads may end: all windows before are stored.

    Args:
        ends: positions behind the blocks' last tokens.
        has_window: for each block, whether its window is stored.
        window: number of last tokens that layers with a window attend to.
    """
    gap = None  # end of the last block without a window
    for index, (end, has) in enumerate(zip(ends, has_window, strict=True)):
        gap = gap if has else end
        if gap is None or gap <= end - window:
            yield index


def _has_window(state: CacheState, piece: Piece, *, dram_only: bool) -> bool:
    """Whether the window of a piece's block is stored; with `dram_only`, in DRAM."""
    stored = _window_of(state, piece.span.block_key)
    if stored is None or not dram_only:
        return stored is not None
    blocks = (state.find_block(span.block_key) for span in stored.spans)
    return all(block is not None and block.is_in_dram for block in blocks)


def _window_of(state: CacheState, block_key: bytes) -> StoredParts | None:
    assert state.stored_parts is not None, "asked for where there are windows"
    return state.stored_parts.window_of(block_key)


# ----------------------------------------------------------------------------------------- storing


def new_windows(
    state: CacheState, chaining: Chaining, plan: StorePlan, positions: Collection[int]
) -> list[NewParts]:
    """Choose the windows to store, in token order.

    Those are the windows that are not stored, that a load to one of the positions needs, and whose
    tokens the engine has. If the arena is too small for such a load, none is chosen.
    """
    layout = state.layout
    num_blocks = layout.window // layout.block_tokens + 2
    if len(state.slots) <= num_blocks * layout.window_slots:
        return []
    blocks = [(new.span, new.token_offset) for new in plan.planned]
    ends = [piece.end for piece in plan.base]
    ends += [offset + span.num_tokens for span, offset in blocks]
    blocks = [(p.span, p.token_offset) for p in plan.base if _is_whole(p)] + blocks
    wanted = [
        (_diverging_end(ends, at, layout.block_tokens) - layout.window, at) for at in positions
    ]
    return [
        NewParts(offset, span.num_tokens, chaining.window_spans(span.block_key))
        for span, offset in blocks
        if offset >= plan.from_token
        and _overlaps(offset, offset + span.num_tokens, wanted)
        and _window_of(state, span.block_key) is None
    ]


def _is_whole(piece: Piece) -> bool:
    """Whether a piece covers all of its block, and no discard lies before it."""
    span = piece.span
    is_plain = span.chain == span.block_key and not span.start
    return is_plain and span.num_tokens == piece.block.num_tokens


def _diverging_end(ends: Sequence[int], position: int, block_tokens: int) -> int:
    """Return where a load ends if the tokens behind a position turn out to be different.

    Args:
        ends: ends of the existing blocks.
        position: number of tokens that stay the same.
        block_tokens: tokens of a full block.
    """
    index = bisect_left(ends, position)
    if index == len(ends):
        return position - block_tokens + 1
    start = ends[index - 1] if index else 0
    is_full_end = ends[index] == position and position - start == block_tokens
    return position if is_full_end else start


def _overlaps(start: int, end: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(start < last and first < end for first, last in ranges)


# ----------------------------------------------------------------------------------------- keeping


def spans_with_windows(
    state: CacheState,
    session: Session,
    runs: Sequence[Span],
    new: Sequence[Span],
    load_ends: Iterable[int],
) -> list[Span]:
    """Return the spans that a session is to have: its token spans, and the windows that it keeps.

    The named ends are remembered with the session.

    Args:
        state: the cache's tables.
        session: the session.
        runs: its token spans, in order.
        new: parts of newly stored windows, whose blocks are in no session yet.
        load_ends: token counts at which loads are to be able to end, besides those remembered.
    """
    keeping = _Keeping(state, session.key, runs, group_parts(new))
    named = sorted({*session.load_ends, *load_ends})
    session.load_ends = keeping.choose(named)
    kept = keeping.kept()
    for span in (span for parts in kept for span in parts):
        state.find_block(span.block_key)  # another session may have it packed
    return interleave(runs, kept)


class _Keeping:
    """Chooses the windows that one session keeps; the module docstring has the rules."""

    def __init__(
        self,
        state: CacheState,
        key: SessionKey,
        runs: Sequence[Span],
        new: Mapping[bytes, Sequence[Span]],
    ) -> None:
        self._layout = state.layout
        self._runs = runs
        self._ends = list(accumulate(run.num_tokens for run in runs))
        self._ranges: list[tuple[int, int]] = []
        self._parts: list[Sequence[Span]] = []  # parts of each run's window; (): not stored
        self._is_shared: list[bool] = []
        for run in runs:
            stored = _window_of(state, run.block_key)
            self._parts.append(stored.spans if stored else new.get(run.block_key, ()))
            self._is_shared.append(stored is not None and {key} < stored.users.keys())

    def choose(self, named: Sequence[int]) -> tuple[int, ...]:
        """Choose the token ranges whose windows are kept; returns the ends to remember."""
        window, block_tokens, ends = self._layout.window, self._layout.block_tokens, self._ends
        possible = [ends[i] for i in possible_ends(ends, map(bool, self._parts), window)]
        pending = [at for at in named if at > ends[-1]][:MOST_PENDING]
        asked: dict[int, int] = {}  # possible end of a load -> the named end that it serves
        for at in named:
            before = bisect_right(possible, at)
            if before and at <= ends[-1] and self._is_last_before(possible[before - 1], at):
                asked[possible[before - 1]] = at
        newest = sorted({*asked, *possible[-1:]})[-NUM_NEWEST:]
        for at in (*newest, *pending):
            self._ranges.append((_diverging_end(ends, at, block_tokens) - window, at))
        first = next((index for index, parts in enumerate(self._parts) if parts), None)
        if first is not None:
            start = ends[first] - self._runs[first].num_tokens
            self._ranges.append((start, start + window))
        return (*(asked[end] for end in newest if end in asked), *pending)

    def _is_last_before(self, end: int, position: int) -> bool:
        """Whether no run ends between an end and a later position."""
        return bisect_right(self._ends, position) == bisect_right(self._ends, end)

    def kept(self) -> list[Sequence[Span]]:
        """Return the parts of the windows that are in the chosen ranges, or shared."""
        kept = {}
        for run, end, parts, is_shared in zip(
            self._runs, self._ends, self._parts, self._is_shared, strict=True
        ):
            if parts and (is_shared or _overlaps(end - run.num_tokens, end, self._ranges)):
                kept[run.block_key] = parts
        return list(kept.values())
