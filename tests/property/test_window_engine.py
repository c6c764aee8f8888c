"""The same random calls, completions and crashes where layers have windows: no load is ever wrong.

The oracle is as simple as that of tokens: the window of a block is the rows of that block once
more, in each of its parts. A load ends where all rows exist that layers attend to from there on.
"""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kvd.core.records.extent_shape import ExtentShape
from kvd.core.records.records import LoadAnswer, StoreAnswer
from tests.property.cache_turns import ENGINE_IDS, KEYS, PHRASES, TOKENS, Store
from tests.property.cache_world import BLOCK_TOKENS, LAYOUT, SHAPE, Row, compute
from tests.property.test_cache_engine import CacheMachine
from tests.sampled import examples

WINDOW = 6
_LAYER = LAYOUT.layers[0]
_NARROW = replace(_LAYER, window=WINDOW)
WINDOW_LAYOUT = replace(LAYOUT, layers=(_NARROW, _LAYER, replace(_LAYER, window=3)))
NUM_PARTS = WINDOW_LAYOUT.window_slots
assert ExtentShape(WINDOW_LAYOUT).sectors_per_extent == SHAPE.sectors_per_extent


def window_of(rows: list[Row], num_parts: int = NUM_PARTS) -> list[list[tuple[int, ...]]]:
    """Return the contents of a window's slots for a block with these rows."""
    return [[(part, *rows)] for part in range(num_parts)]


def fill_windows(slots: list, rows: list[Row], answer: StoreAnswer) -> None:
    """Write the granted windows of tokens with these rows."""
    for window in answer.windows:
        there = rows[window.token_offset : window.token_offset + window.num_tokens]
        parts = window_of(there, len(window.slot_ids))
        for slot_id, part in zip(window.slot_ids, parts, strict=True):
            slots[slot_id] = part


def check_windows(
    slots: list, rows: list[Row], answer: LoadAnswer, num_tokens: int = WINDOW
) -> None:
    """Check that a grant has the rows that layers attend to from its end on, and no others."""
    if not answer.windows:
        assert answer.more, "tokens come with their windows, or the rest comes later"
        return
    end = answer.windows[0].token_offset
    assert end <= max(0, answer.end_token - num_tokens), "all that layers attend to is there"
    for window in answer.windows:
        assert window.token_offset == end, "windows follow each other"
        end += window.num_tokens
        for part, slot_id in enumerate(window.slot_ids):
            ((number, *there),) = slots[slot_id]
            assert number == part, "a part is in its place"
            there = there[window.start : window.start + window.num_tokens]
            assert there == rows[window.token_offset : end], "a window is of these very tokens"
    assert end == answer.end_token


class WindowMachine(CacheMachine):
    """Engines want to continue from some places."""

    layout = WINDOW_LAYOUT
    scale = 2
    graft = None  # layouts with windows do not support grafts

    def _positions(self, tokens: list[int]) -> list[int]:
        """Return the ends of some phrases, of all tokens, and one that is yet to come."""
        return sorted({at for at in (9, len(tokens) - 3, len(tokens), len(tokens) + 5) if at > 0})

    def _fill(self, answer: StoreAnswer, rows: list[Row]) -> None:
        super()._fill(answer, rows)
        fill_windows(self.world.slots, rows, answer)

    def _check_slots(self, store: Store) -> None:
        super()._check_slots(store)
        for window in store.answer.windows:
            rows = store.rows[window.token_offset : window.token_offset + window.num_tokens]
            there = [self.world.slots[slot_id] for slot_id in window.slot_ids]
            assert there == window_of(rows), "a leased slot is one's own"

    def _check_state(self, rows: list[Row], answer: LoadAnswer) -> None:
        assert answer.state is None
        check_windows(self.world.slots, rows, answer)

    @invariant()
    def keeps_few(self) -> None:
        """Check that a session keeps the windows of a few ends of its own blocks, and no others."""
        if not hasattr(self, "world"):
            return
        most = 7 * (WINDOW + 2 * BLOCK_TOKENS)  # the first, the newest two, and those to come
        state = self.world.engine._state
        for session in state.sessions.values():
            blocks = (state.blocks[span.block_key] for span in session.spans)
            own = sum(not block.num_tokens and len(block.users) == 1 for block in blocks)
            assert own // NUM_PARTS * BLOCK_TOKENS <= most, "what is superseded is not kept"

    @rule(
        key=st.sampled_from(KEYS),
        other=st.sampled_from(KEYS),
        engine_id=st.sampled_from(ENGINE_IDS),
        kept=st.integers(1, 20),
        new_tokens=TOKENS,
    )
    def go_on_from_another(self, key, other, engine_id, kept, new_tokens) -> None:
        """Begin a session like another one, or like itself."""
        if self.conversations[other].discarded or self.conversations[key].discarded:
            return
        tokens = self.conversations[other].tokens[:kept]
        self.conversations[key].replace(tokens, compute([], tokens))
        self.turn(key, new_tokens, engine_id, is_quiet=True)

    @rule(key=st.sampled_from(KEYS), engine_id=st.sampled_from(ENGINE_IDS))
    def long_talk(self, key, engine_id) -> None:
        """Run turn after turn: newer windows replace older ones."""
        for phrase in PHRASES:
            self.turn(key, phrase, engine_id, is_quiet=False)
        self.world.quiesce()


WindowMachine.TestCase.settings = settings(
    CacheMachine.TestCase.settings, max_examples=examples(40), stateful_step_count=40
)
TestWindowEngine = WindowMachine.TestCase


@pytest.mark.long
class TestWindowEngineLong(WindowMachine.TestCase):
    """Runs the same machine at length."""

    settings = settings(WindowMachine.TestCase.settings, max_examples=3000, stateful_step_count=120)
