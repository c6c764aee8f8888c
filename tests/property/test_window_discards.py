"""Discards, compactions and losses where layers have windows: each row of each is the context's.

Grafts are left out: layouts with windows do not support them.
"""

import pytest
from hypothesis import settings

from kvd.core.records.records import LoadAnswer, StoreAnswer
from tests.property.cache_world import Row
from tests.property.test_discards import Context, DiscardMachine
from tests.property.test_window_engine import WINDOW, WINDOW_LAYOUT, fill_windows


class WindowDiscardMachine(DiscardMachine):
    """Checks that windows are those an engine had for this very context, in this very place."""

    layout = WINDOW_LAYOUT
    graft = None

    def _positions(self, tokens: list[int]) -> list[int]:
        return [len(tokens)]

    def _fill(self, answer: StoreAnswer, rows: list[Row]) -> None:
        super()._fill(answer, rows)
        fill_windows(self.world.slots, rows, answer)

    def _check_beside(self, context: Context, answer: LoadAnswer) -> None:
        assert answer.more or answer.windows, "tokens come with their windows"
        end = answer.windows[0].token_offset if answer.windows else 0
        assert end <= max(0, answer.end_token - WINDOW)
        for window in answer.windows:
            assert window.token_offset == end, "windows follow each other"
            end += window.num_tokens
            for slot_id in window.slot_ids:
                ((_, *rows),) = self.world.slots[slot_id]
                rows = rows[window.start : window.start + window.num_tokens]
                assert len(rows) == window.num_tokens
                self._check(context, rows, window.token_offset)


WindowDiscardMachine.TestCase.settings = DiscardMachine.TestCase.settings
TestWindowDiscards = WindowDiscardMachine.TestCase


@pytest.mark.long
class TestWindowDiscardsLong(WindowDiscardMachine.TestCase):
    """Runs the same machine at length."""

    settings = settings(
        WindowDiscardMachine.TestCase.settings, max_examples=1000, stateful_step_count=60
    )
