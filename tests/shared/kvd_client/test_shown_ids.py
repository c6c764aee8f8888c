"""The number by which others see an engine says nothing of its id."""

from itertools import pairwise

from shared.kvd_client.messages import shown_id


def test_both_sides_show_the_same_number():
    """It is a function of the id alone, and stays what it was in earlier releases."""
    assert shown_id(1) == 9_211_785_626_500_227_917


def test_ids_that_are_near_are_shown_far_apart():
    """Nobody gets from one to the next; each fits into what a protobuf has for it."""
    shown = [shown_id(number) for number in range(1000)]
    assert len(set(shown)) == len(shown)
    assert all(0 <= number < 1 << 63 for number in shown)
    gaps = {abs(after - before) for before, after in pairwise(shown)}
    assert min(gaps) > 1 << 32
    assert not set(shown) & set(range(1000))
