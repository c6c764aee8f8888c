"""What operators see."""

import pytest

from kvd.core.engine import COUNTERS
from kvd.core.errors import InvalidRequestError
from kvd.core.listing import MAX_LISTINGS
from kvd.core.records import Tier
from tests.kvd.core.turns import (
    ONES,
    OTHER_TENANT,
    TWOS,
    A,
    B,
    C,
    new_world,
    prepare_store,
    store,
)


def test_sessions_are_listed_in_pages_least_recent_first():
    """The page token goes on where the page ended; the total counts the tenant's sessions."""
    world = new_world()
    for key in (C, A, B, OTHER_TENANT):
        world.now_ns += 1
        store(world, key, ONES)
    first = world.engine.sessions("a", "", 2)
    assert ([info.key for info in first.sessions], first.total) == ([C, A], 3)
    second = world.engine.sessions("a", first.next_page, 2)
    assert ([info.key for info in second.sessions], second.next_page) == ([B], "")
    assert world.engine.sessions("", "", 10).total == 4


def test_a_listing_keeps_its_order():
    """A session that is used, or goes, while it is listed leaves the others in their places."""
    world = new_world()
    keys = [A._replace(session_id=str(number)) for number in range(5)]
    for key in keys:
        world.now_ns += 1
        store(world, key, ONES)
    first = world.engine.sessions("", "", 2)
    for key in (keys[0], keys[3]):
        world.now_ns += 1
        store(world, key, ONES + TWOS)
    world.engine.flush(keys[2], False, world.now_ns)
    second = world.engine.sessions("", first.next_page, 1)
    third = world.engine.sessions("", second.next_page, 9)
    listed = [info.key for page in (first, second, third) for info in page.sessions]
    assert listed == [keys[0], keys[1], keys[3], keys[4]]


def test_a_listing_that_is_gone_goes_on_where_it_was():
    """Newer listings take its place, or another kvd does; its token still says how to go on."""
    world = new_world()
    for key in (B, C, A):  # all at one time: then by key
        store(world, key, ONES)
    world.engine.sessions("", "", 1)
    first = world.engine.sessions("", "", 2)
    assert [info.key for info in first.sessions] == [A, B]
    for _ in range(MAX_LISTINGS):
        world.engine.sessions("", "", 1)
    again = world.engine.sessions("", first.next_page, 2)
    assert ([info.key for info in again.sessions], again.total) == ([C], 3)
    other = world.engine.sessions("other", first.next_page, 2)
    assert (other.sessions, other.next_page) == ((), "")


@pytest.mark.parametrize("token", ["x", "1/a", "1/1/x/a/b/c", "1/1/1/a/b", "-1/1/1/a/b/c"])
def test_a_foreign_page_token_is_refused(token):
    """It is the caller's error, with a remedy."""
    with pytest.raises(InvalidRequestError, match="first page"):
        new_world().engine.sessions("", token, 1)


def test_a_session_is_described_block_by_block():
    """Spans with their places, and how many sessions use each block."""
    world = new_world()
    store(world, A, [*ONES, 2])
    store(world, B, ONES, settle=False)
    detail = world.engine.describe(A)
    assert [(b.token_offset, b.num_tokens, b.num_sessions, b.dirty) for b in detail.blocks] == [
        (0, 4, 2, False),
        (4, 1, 1, False),
    ]
    assert detail.blocks[0].tiers == (Tier.DRAM, Tier.SSD)
    assert detail.info == world.engine.session_info(A)


def test_stats_count_bytes_and_leases():
    """Slots being written are used, not blocks; every counter is there from the start."""
    world = new_world(num_slots=4, num_extents=8)
    prepare_store(world, A, ONES + TWOS)
    stats = world.engine.stats()
    block_bytes = world.engine.layout.block_bytes
    dram, ssd = stats.tiers
    assert (dram.capacity_bytes, dram.used_bytes, dram.num_blocks) == (
        4 * block_bytes,
        2 * block_bytes,
        0,
    )
    assert (ssd.capacity_bytes, ssd.used_bytes) == (8 * block_bytes, 0)
    assert (stats.num_leases, stats.num_sessions, stats.dirty_bytes) == (1, 0, 0)
    assert set(stats.counters) == set(COUNTERS)
