"""The shown number of an engine reveals nothing of its id."""

from itertools import pairwise

from shared.kvd_client.messages import shown_id


def test_both_sides_show_the_same_number():
    """It is a function of the id alone, and never changes between releases."""
    assert shown_id(1) == 9_211_785_626_500_227_917


def test_adjacent_ids_have_distant_numbers():
    """One cannot be derived from the other; each fits into its protobuf field."""
    shown = [shown_id(number) for number in range(1000)]
    assert len(set(shown)) == len(shown)
    assert all(0 <= number < 1 << 63 for number in shown)
    gaps = {abs(after - before) for before, after in pairwise(shown)}
    assert min(gaps) > 1 << 32
    assert not set(shown) & set(range(1000))
