"""How likely drafts are right: an answer's own outcomes, on top of all answers'."""

import pytest

from inference_svc.core.speculation.draft_lengths import MOST_SEEN, USUAL_CHANCE, Acceptance


def test_nothing_is_known_at_first():
    assert Acceptance().chances(3, 3) == pytest.approx([0.5, 0.25, 0.125])
    assert Acceptance(Acceptance()).chance(20) == USUAL_CHANCE


def test_an_answer_begins_with_the_common_estimate_and_soon_differs():
    everybody = Acceptance()
    first = Acceptance(everybody)
    for _ in range(50):
        first.note(4, is_right=True)
    second = Acceptance(everybody)
    assert second.chance(4) == pytest.approx(everybody.chance(4))
    assert second.chance(4) > 0.9
    for _ in range(20):
        second.note(4, is_right=False)
    assert second.chance(4) < 0.2 < everybody.chance(4) < first.chance(4)


def test_longer_matches_are_counted_separately():
    acceptance = Acceptance()
    for _ in range(30):
        acceptance.note(3, is_right=False)
        acceptance.note(16, is_right=True)
    assert acceptance.chance(3) < 0.2
    assert acceptance.chance(100) == acceptance.chance(16) > 0.8
    assert acceptance.chance(8) == USUAL_CHANCE


def test_chances_never_rise_along_a_draft():
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.note(12, is_right=True)
    chances = acceptance.chances(3, 12)
    assert chances == sorted(chances, reverse=True)
    assert len(chances) == 12


def test_old_outcomes_fade():
    acceptance = Acceptance()
    for _ in range(int(10 * MOST_SEEN)):
        acceptance.note(3, is_right=True)
    for _ in range(int(2 * MOST_SEEN)):
        acceptance.note(3, is_right=False)
    assert acceptance.chance(3) < 0.3
