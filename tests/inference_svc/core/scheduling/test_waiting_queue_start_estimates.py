"""Estimated starts of waiting requests."""

import pytest

from inference_svc.core.rates.rates import Rates, pairs
from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.waiting_queue import UNKNOWN_RETRY_S, StartEstimates
from shared.types.session_key import SessionKey

S = 1_000_000_000


def request(number, prompt_tokens=100, history_tokens=0):
    key = SessionKey("t", "0f", str(number))
    return Request(number, key, [0] * prompt_tokens, 4, 0, history_tokens=history_tokens)


def test_nothing_is_known_at_first():
    """Starts are unknown, and a refused client is told to retry after a second."""
    estimates = StartEstimates(Rates())
    assert estimates.interval_s([]) == estimates.interval_s([request(1)]) == 0
    assert estimates.retry_after_s() == UNKNOWN_RETRY_S


def test_places_become_free_at_the_recent_rate():
    """One end, one start."""
    estimates = StartEstimates(Rates())
    estimates.on_wait(0)
    for end_s in (2, 4, 6):
        estimates.on_end(end_s * S, is_queue_busy=True)
    assert estimates.interval_s([request(1)]) == estimates.interval_s([]) == 2.0
    assert estimates.retry_after_s() == 2.0


def test_pauses_do_not_count():
    """Time without waiting requests says nothing about the rate of free places."""
    estimates = StartEstimates(Rates())
    estimates.on_end(1 * S, is_queue_busy=False)
    assert estimates.retry_after_s() == UNKNOWN_RETRY_S
    estimates.on_wait(100 * S)
    estimates.on_wait(102 * S)
    estimates.on_end(103 * S, is_queue_busy=False)
    estimates.on_end(1000 * S, is_queue_busy=False)
    assert estimates.retry_after_s() == 3.0


def test_before_any_end_prompts_count():
    """Without their stored or resident tokens."""
    rates = Rates()
    for num_tokens in (1, 10, 100, 1000, 10, 100):
        rates.steps.note(num_tokens, pairs(0, num_tokens), 0.005 + 0.001 * num_tokens)
    waiting = [request(1, 350, history_tokens=200), request(2, 50)]
    assert StartEstimates(rates).interval_s(waiting) == pytest.approx(0.1, rel=0.1)
