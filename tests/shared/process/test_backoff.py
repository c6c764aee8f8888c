"""Pauses grow, differ between processes, and end with a success."""

from random import Random

from shared.process.backoff import Backoff


def test_pauses_grow_up_to_a_bound():
    """Each between half of and all of its maximum; the first failure is reported."""
    backoff = Backoff(Random(1), first_s=1.0, longest_s=8.0)  # noqa: S311
    pauses, news = [], []
    for _ in range(6):
        news.append(backoff.record_failure(100.0))
        pauses.append(backoff.retry_at_s - 100.0)
    for pause_s, most_s in zip(pauses, [1, 2, 4, 8, 8, 8], strict=True):
        assert most_s / 2 <= pause_s <= most_s
    assert news == [True] + 5 * [False]
    assert pauses[-1] != pauses[-2]


def test_a_success_resets_the_pauses():
    """It is reported if it follows a failure; the next failure starts over."""
    backoff = Backoff(Random(1))  # noqa: S311
    assert not backoff.record_success()
    for _ in range(5):
        backoff.record_failure(0.0)
    assert backoff.is_failing
    assert backoff.record_success()
    assert not backoff.is_failing
    assert backoff.retry_at_s == 0.0
    assert backoff.record_failure(0.0)
    assert backoff.retry_at_s <= 1.0


def test_any_number_of_failures_is_possible():
    """For example of a store that is gone for years."""
    backoff = Backoff(Random(1))  # noqa: S311
    for _ in range(5000):
        backoff.record_failure(0.0)
    assert backoff.retry_at_s <= 300.0
