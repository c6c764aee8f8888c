"""Listings: filters, orders, pages and their tokens."""

from dataclasses import dataclass, field

import pytest

from kvd.core.inspection.listing import (
    MAX_LISTINGS,
    ListingBuilder,
    ListingRequest,
    Listings,
    parse_page_token,
)
from kvd.core.inspection.session_filter import EVERYTHING, SessionFilter, SessionOrder
from kvd.core.records.entries import Pin
from kvd.core.records.errors import InvalidRequestError
from kvd.core.records.tier import Tier
from tests.kvd.core.turns import ONES, OTHER_TENANT, THREES, TWOS, A, B, C, load, new_world, store

LAYOUT = "ff"


def list_keys(world, wanted=EVERYTHING, order=SessionOrder.IDLE, *, is_reversed=False):
    """Return the session keys of a listing of one layout, in order."""
    request = ListingRequest(wanted, "", order, is_reversed)
    return listing(world, request).keys


def listing(world, request, after=None):
    builder = ListingBuilder(request, after)
    keys = world.engine.inspection.keys()
    ranked = world.engine.inspection.ranked(keys, request.wanted, request.order)
    builder.add(LAYOUT, ranked)
    return builder.finish()


@dataclass
class Shelf:
    """Ranks of sessions that tests choose, in three layouts."""

    request: ListingRequest = field(default_factory=ListingRequest)
    listings: Listings = field(default_factory=Listings)

    def list(self, after=None):
        builder = ListingBuilder(self.request, after)
        for layout, ranks in (("aa", (3, 1)), ("bb", (1, 1)), ("cc", ())):
            ranked = zip(ranks, (B, A), strict=False)
            builder.add(layout, ranked)
        return builder.finish()


def test_every_order_begins_with_what_operators_look_for():
    """Longest idle, largest, most tokens, next to expire; reversed, the other way round."""
    world = new_world(default_ttl_ns=1_000)
    for key, tokens in ((C, [*ONES, 9]), (A, ONES), (B, TWOS + THREES)):
        world.now_ns += 10
        store(world, key, tokens)
    world.engine.sessions.set_ttl(B, 5)
    world.engine.sessions.pin(C, Pin.HARD)
    expected = {
        SessionOrder.IDLE: [C, A, B],
        SessionOrder.BYTES: [B, C, A],
        SessionOrder.TOKENS: [B, C, A],
        SessionOrder.TTL: [B, A, C],
    }
    for order, keys in expected.items():
        assert list_keys(world, order=order) == keys
    assert list_keys(world, order=SessionOrder.TTL, is_reversed=True) == [C, A, B]


def test_each_filter_selects_its_sessions():
    """Tenant, tier, idle time, size, pin, end; conditions are combined."""
    world = new_world(num_slots=3)
    store(world, OTHER_TENANT, ONES + TWOS)
    world.now_ns += 100
    store(world, A, [*THREES, 5])
    world.engine.sessions.pin(A, Pin.SOFT)
    world.engine.sessions.end(OTHER_TENANT)
    block = world.engine.layout.block_bytes
    expected = {
        SessionFilter(tenants=frozenset({"a"})): [A],
        SessionFilter(tier=Tier.SSD): [OTHER_TENANT, A],
        SessionFilter(idle_ns=100): [OTHER_TENANT],
        SessionFilter(idle_ns=101): [],
        SessionFilter(larger_than_bytes=2 * block - 1): [OTHER_TENANT, A],
        SessionFilter(larger_than_bytes=2 * block): [],
        SessionFilter(pinned=True): [A],
        SessionFilter(id_prefix="a"): [OTHER_TENANT, A],
        SessionFilter(id_prefix="ab"): [],
        SessionFilter(ended=True): [OTHER_TENANT],
        SessionFilter(ended=True, pinned=True): [],
    }
    for wanted, keys in expected.items():
        assert list_keys(world, wanted) == keys, wanted
    store(world, B, [7] * 12)
    store(world, B, [7] * 12 + [8])  # evicts all others from DRAM
    assert list_keys(world, SessionFilter(tier=Tier.DRAM)) == [B]
    assert OTHER_TENANT in list_keys(world, SessionFilter(tier=Tier.SSD))


def test_a_filter_is_limited_to_visible_tenants():
    """A caller of some tenants sees theirs, or the requested one of these, or nothing."""
    mine = frozenset({"a", "b"})
    assert EVERYTHING.within(mine).tenants == mine
    assert SessionFilter(tenants=frozenset({"b"})).within(mine).tenants == {"b"}
    assert SessionFilter(tenants=frozenset({"c"})).within(mine).tenants == frozenset()
    assert EVERYTHING.within(None) is EVERYTHING


def test_packed_tokens_are_counted():
    """A session on SSD only has the same size and length as before."""
    world = new_world(num_slots=3)
    store(world, A, ONES + TWOS + [3])
    before = world.engine.inspection.info(A)
    store(world, B, [7] * 12)
    store(world, B, [7] * 12 + [8])
    info = world.engine.inspection.info(A)
    assert (info.dram_bytes, info.num_tokens, info.total_bytes) == (0, 9, before.total_bytes)
    assert list_keys(world, order=SessionOrder.TOKENS) == [B, A]
    load(world, A, ONES + TWOS + [3])
    assert world.engine.inspection.info(A).num_tokens == 9


def test_layouts_are_merged():
    """Sessions of all layouts form one order; equal ones are ordered by key."""
    shelf = Shelf()
    found = shelf.list()
    assert list(zip(found.layouts, found.keys, strict=True)) == [
        ("aa", A),
        ("bb", A),
        ("bb", B),
        ("aa", B),
    ]


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_token_outlives_its_listing(is_reversed):
    """Newer listings replace it, or kvd restarts; the token still says where to continue."""
    shelf = Shelf(ListingRequest(is_reversed=is_reversed))
    whole = shelf.list()
    listing_id = shelf.listings.open(whole)
    token = parse_page_token(str(whole.token(listing_id, 2)), shelf.request.order_name)
    assert shelf.listings.find(token, shelf.request) is whole
    for _ in range(MAX_LISTINGS):
        shelf.listings.open(shelf.list())
    assert shelf.listings.find(token, shelf.request) is None
    again = shelf.list(token.last)
    assert (again.keys, again.layouts) == (whole.keys[2:], whole.layouts[2:])


def test_a_token_is_valid_for_its_own_listing_only():
    """With another filter a new listing is made: no caller sees another one's sessions."""
    shelf = Shelf()
    listing_id = shelf.listings.open(shelf.list())
    token = shelf.list().token(listing_id, 1)
    other = ListingRequest(SessionFilter(tenants=frozenset({"b"})))
    assert shelf.listings.find(token, shelf.request) is not None
    assert shelf.listings.find(token, other) is None
    shelf.listings.close(listing_id)
    assert shelf.listings.find(token, shelf.request) is None


@pytest.mark.parametrize(
    "token",
    ["x", "1/2/idle/x/ff/a/b/c", "1/1/idle/1/ff/a/b", "-1/1/idle/1/ff/a/b/c", "1/1/ttl/1/f/a/b/c"],
)
def test_a_foreign_page_token_is_refused(token):
    """It is the caller's error, with a remedy, as is a token of another order."""
    with pytest.raises(InvalidRequestError, match="first page"):
        parse_page_token(token, SessionOrder.IDLE.value)
