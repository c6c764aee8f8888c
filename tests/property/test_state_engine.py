"""The same random calls, completions and crashes where a model has states: no load is ever wrong.

The oracle is as simple as that of tokens: a state is a digest of the last row before it, which is
one of all tokens. Keys there depend on positions, so only a prefix survives a discard.
"""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvd.core.records.records import LoadAnswer, StoreAnswer
from tests.property.cache_turns import ENGINE_IDS, KEYS, PHRASES, TOKENS, Store
from tests.property.cache_world import LAYOUT, Row, compute, to_bytes
from tests.property.test_cache_engine import CacheMachine
from tests.sampled import examples

STATE_LAYOUT = replace(LAYOUT, position_mode="coupled", state_bytes=LAYOUT.block_bytes + 1)
NUM_PARTS = STATE_LAYOUT.state_slots


def state_of(row: Row) -> list[list[Row]]:
    """Return the contents of a state's slots behind the tokens up to this row."""
    return [[hash(("state", part, row))] for part in range(NUM_PARTS)]


class StateMachine(CacheMachine):
    """Engines have states at some places, and want to continue from one."""

    layout = STATE_LAYOUT
    graft = None  # keys depend on positions

    def _positions(self, tokens: list[int]) -> list[int]:
        """Return the ends of some phrases, and of all tokens."""
        return sorted({at for at in (5, 9, len(tokens) - 3, len(tokens)) if 0 < at <= len(tokens)})

    def _fill(self, answer: StoreAnswer, rows: list[Row]) -> None:
        super()._fill(answer, rows)
        for state in answer.states:
            for slot_id, part in zip(
                state.slot_ids, state_of(rows[state.position - 1]), strict=True
            ):
                self.world.slots[slot_id] = part

    def _check_slots(self, store: Store) -> None:
        super()._check_slots(store)
        for state in store.answer.states:
            there = [self.world.slots[slot_id] for slot_id in state.slot_ids]
            assert there == state_of(store.rows[state.position - 1]), "a leased slot is one's own"

    def _check_state(self, rows: list[Row], answer: LoadAnswer) -> None:
        if answer.state is None:
            assert answer.more, "tokens come with the state behind them, or the rest comes later"
            return
        assert answer.state.position == answer.end_token == len(rows)
        there = [self.world.slots[slot_id] for slot_id in answer.state.slot_ids]
        assert there == state_of(rows[-1]), "a state is the one stored for exactly these tokens"

    def _discard(self, key, ranges, *, is_heard) -> None:
        if self.stores and not self.names_lineage:
            return
        conversation = self.conversations[key]
        token_ids = to_bytes(conversation.tokens)
        if is_heard or not self.names_lineage:
            self.world.engine.sessions.discard(
                key, token_ids, ranges, lineage=self._named(conversation)
            )
        if self.names_lineage:
            conversation.lineage = conversation.lineage.after(token_ids, ranges)
        dropped = {position for start, end in ranges for position in range(start, end)}
        kept = [token for at, token in enumerate(conversation.tokens) if at not in dropped]
        conversation.replace(kept, compute([], kept))
        self.world.pump()

    @rule(
        key=st.sampled_from(KEYS),
        other=st.sampled_from(KEYS),
        engine_id=st.sampled_from(ENGINE_IDS),
        kept=st.integers(1, 12),
        new_tokens=TOKENS,
    )
    def go_on_from_another(self, key, other, engine_id, kept, new_tokens) -> None:
        """Begin a session like another one, or like itself, from the middle of a block."""
        tokens = self.conversations[other].tokens[:kept]
        self.conversations[key].replace(tokens, compute([], tokens))
        self.turn(key, new_tokens, engine_id, is_quiet=True)

    @rule(key=st.sampled_from(KEYS), engine_id=st.sampled_from(ENGINE_IDS))
    def long_talk(self, key, engine_id) -> None:
        """Run turn after turn: newer states replace older ones."""
        for phrase in PHRASES:
            self.turn(key, phrase, engine_id, is_quiet=False)
        self.world.quiesce()


StateMachine.TestCase.settings = settings(
    CacheMachine.TestCase.settings, max_examples=examples(40), stateful_step_count=40
)
TestStateEngine = StateMachine.TestCase


@pytest.mark.long
class TestStateEngineLong(StateMachine.TestCase):
    """Runs the same machine at length."""

    settings = settings(StateMachine.TestCase.settings, max_examples=3000, stateful_step_count=120)
