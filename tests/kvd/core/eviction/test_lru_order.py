"""The order of a tenant's sessions is the same, however many pages it has."""

import random

import pytest

from kvd.core.eviction import lru_order
from kvd.core.eviction.lru_order import LruOrder
from kvd.core.eviction.session_order import Guard
from shared.types.session_key import SessionKey

KEYS = [SessionKey("a", "m", str(number)) for number in range(40)]


def test_pages_make_no_difference_and_stay_short(monkeypatch):
    """Sessions that enter, are used, end and leave are ordered as in one list."""
    monkeypatch.setattr(lru_order, "LRU_PAGE", 8)
    order, expected = LruOrder(), []
    chance = random.Random(1)  # noqa: S311 - what happens next
    for _ in range(5_000):
        key, what = chance.choice(KEYS), chance.randrange(5)
        was_there = key in expected
        assert (key in order) == was_there
        if was_there and what not in {1, 2}:
            expected.remove(key)
        if what == 0:
            order.touch(key)
            expected.append(key)
        elif what == 1:
            order.enter(key)
            expected.extend([] if was_there else [key])
        elif what == 2:
            order.enter_before(key)
            expected[:0] = [] if was_there else [key]
        elif what == 3:
            order.end(key)
            expected[:0] = [key] if was_there else []
        else:
            order.remove(key)
        assert list(order) == expected
        assert max(len(page) for page in order._pages._pages) <= 8


def test_pages_with_few_sessions_are_merged(monkeypatch):
    """If one session of each page stays, there are fewer pages than sessions."""
    monkeypatch.setattr(lru_order, "LRU_PAGE", 8)
    order = LruOrder()
    keys = [SessionKey("a", "m", str(number)) for number in range(320)]
    for number, key in enumerate(keys):
        order.touch(key)
        if number >= 8 and number % 8:
            order.remove(keys[number - 8])
    kept = [key for number, key in enumerate(keys) if number % 8 == 0 or number > 311]
    assert list(order) == kept
    assert len(order._pages._pages) <= 20


def test_guarded_sessions_come_last_over_pages(monkeypatch):
    """Unguarded sessions of the last page come before the first guarded one."""
    monkeypatch.setattr(lru_order, "LRU_PAGE", 2)
    order = LruOrder()
    for key in KEYS[:6]:
        order.touch(key)
    order.guard(KEYS[0], Guard.PINNED)
    order.guard(KEYS[3], Guard.PINNED)
    assert list(order) == [*KEYS[1:3], *KEYS[4:6], KEYS[0], KEYS[3]]
    order.guard(KEYS[0], Guard.NONE)
    assert list(order) == [*KEYS[1:3], *KEYS[4:6], KEYS[0], KEYS[3]]
    order.touch(KEYS[1])
    assert list(order)[-2:] == [KEYS[1], KEYS[3]]


def test_a_session_that_comes_back_is_not_guarded():
    """It was removed together with its guards."""
    order = LruOrder()
    order.guard(KEYS[0], Guard.PINNED)
    order.touch(KEYS[0])
    order.remove(KEYS[0])
    for key in KEYS[:2]:
        order.touch(key)
    assert list(order) == KEYS[:2]


@pytest.mark.parametrize("put", [LruOrder.touch, LruOrder.enter_before])
def test_pages_are_filled_before_a_new_one_is_made(monkeypatch, put):
    """At either end; so that finding a session reads few pages."""
    monkeypatch.setattr(lru_order, "LRU_PAGE", 8)
    order = LruOrder()
    for number in range(80):
        put(order, SessionKey("a", "m", str(number)))
    assert [len(page) for page in order._pages._pages] == [8] * 10
