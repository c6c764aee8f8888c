"""How long sessions rest and are missed, in the core's own time."""

from kvd.core.records.actions import SpaceFreed
from kvd.core.records.tier import Tier
from kvd.core.state.outbox import MOST_EVICTED, CacheHistograms, Outbox
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    THREES,
    TWOS,
    A,
    B,
    complete_store,
    load,
    new_world,
    prepare_load,
    prepare_store,
    store,
)


def key_of(name: str) -> SessionKey:
    """Return a session's key."""
    return SessionKey("default", "m", name)


def values(histogram):
    """Return label → (count, sum)."""
    return {labels: (s.count, s.total) for labels, s in histogram.series.items()}


def test_rest_before_and_absence_after_an_eviction():
    """Both times are counted by tier, once."""
    histograms = CacheHistograms()
    histograms.on_evict(key_of("a"), Tier.DRAM, last_access_ns=0, now_ns=20 * NS_PER_S)
    histograms.on_evict(key_of("a"), Tier.SSD, last_access_ns=0, now_ns=30 * NS_PER_S)
    histograms.on_evict(key_of("b"), Tier.DRAM, last_access_ns=0, now_ns=40 * NS_PER_S)
    for name in ("a", "a", "c"):
        histograms.on_load(key_of(name), now_ns=90 * NS_PER_S)
    assert values(histograms.rest_before_evict_s) == {("dram",): (2, 60.0), ("ssd",): (1, 30.0)}
    assert values(histograms.gone_before_asked_s) == {("ssd",): (1, 60.0)}


def test_the_memory_of_evictions_is_bounded():
    """Only the sessions evicted last are remembered."""
    histograms = CacheHistograms()
    for index in range(MOST_EVICTED + 1):
        histograms.on_evict(key_of(str(index)), Tier.DRAM, 0, index)
    histograms.on_load(key_of("0"), MOST_EVICTED)
    assert not histograms.gone_before_asked_s.series
    histograms.on_load(key_of("1"), MOST_EVICTED)
    assert histograms.gone_before_asked_s.series


def test_waiting_stores_are_notified_of_room_once():
    """Only those that were answered "wait"."""
    outbox = Outbox({})
    outbox.on_space_freed()
    assert outbox.drain() == []
    outbox.request_wake()
    for _ in range(2):
        outbox.on_space_freed()
    assert outbox.drain() == [SpaceFreed()]


def test_loads_and_stores_are_timed_from_grant_to_completion():
    """Whether they succeed or not."""
    world = new_world()
    histograms = world.engine.inspection.histograms
    answer = prepare_store(world, A, ONES)
    world.now_ns += 2 * NS_PER_S
    complete_store(world, answer)
    world.quiesce()
    assert values(histograms.store_s) == {(): (1, 2.0)}
    answer = prepare_load(world, A, ONES)
    world.now_ns += 3 * NS_PER_S
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    assert values(histograms.load_s) == {(): (1, 3.0)}


def test_misses_are_counted_by_their_reason():
    """One for each load that finds nothing."""
    world = new_world()
    store(world, A, ONES)
    for key, tokens in ((B, THREES), (A, TWOS), (A, TWOS), (A, ONES)):
        load(world, key, tokens)
    counts = world.engine.inspection.histograms.misses.counts
    assert counts == {("unknown_session",): 1, ("tokens_differ",): 2}


def test_the_rest_of_a_session_is_measured_when_it_leaves_a_tier():
    """Since its last use; its absence is measured when it is requested."""
    world = new_world(num_slots=2)
    store(world, A, ONES + TWOS)
    world.now_ns += 5 * NS_PER_S
    store(world, B, THREES)
    histograms = world.engine.inspection.histograms
    assert not histograms.rest_before_evict_s.series, "a block of it is there yet"
    store(world, B, THREES + ONES)
    assert values(histograms.rest_before_evict_s) == {("dram",): (1, 5.0)}
    world.now_ns += 7 * NS_PER_S
    load(world, A, ONES)
    assert values(histograms.gone_before_asked_s) == {("dram",): (1, 7.0)}
