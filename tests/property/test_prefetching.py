"""Wherever sessions are, reading ahead for a queue leaves in DRAM what is needed soonest."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.core.eviction.policies import POLICIES
from kvd.core.state.limits import Limits
from shared.types.session_key import SessionKey
from tests.kvd.core.turns import ENGINE_ID, counter, load, queue_of, store, tiers_of
from tests.property.cache_world import MODEL, SHAPE, CacheWorld
from tests.sampled import examples

KEYS = [SessionKey("a", MODEL, name) for name in "stuvwx"]
ENOUGH_EXTENTS = 64


def tokens_of(key, num_blocks):
    return [KEYS.index(key)] * (4 * num_blocks)


def num_in_dram(world, key):
    return sum("D" in tiers for tiers in tiers_of(world, key))


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    policy=st.sampled_from(["lookahead_queue", "predictive"]),
    num_slots=st.integers(3, 9),
    watermark=st.sampled_from([0, 0.3]),
    prefetch_blocks=st.sampled_from([1, 3, 100]),
    sizes=st.lists(st.integers(1, 3), min_size=len(KEYS), max_size=len(KEYS)),
    used=st.lists(st.sampled_from(KEYS), max_size=6),
    queued=st.lists(st.sampled_from(KEYS), min_size=1, max_size=len(KEYS), unique=True),
)
def test_a_session_only_loses_dram_to_one_that_is_needed_sooner(
    policy, num_slots, watermark, prefetch_blocks, sizes, used, queued
):
    """It loses blocks only to a session before it, after all behind it have lost theirs."""
    limits = Limits(
        num_slots,
        ENOUGH_EXTENTS,
        watermark=watermark,
        prefetch_bytes=prefetch_blocks * SHAPE.full_bytes,
        reads_returning=False,
    )
    world = CacheWorld(limits, POLICIES[policy])
    size_of = dict(zip(KEYS, sizes, strict=True))
    for key in KEYS:
        store(world, key, tokens_of(key, size_of[key]))
    for key in used:
        load(world, key, tokens_of(key, size_of[key]))
    before = {key: num_in_dram(world, key) for key in KEYS}
    world.engine.engines.replace_queue(ENGINE_ID, queue_of(*queued))
    world.pump()
    world.quiesce()
    after = {key: num_in_dram(world, key) for key in KEYS}
    for index, key in enumerate(queued):
        if after[key] < before[key]:
            assert any(after[sooner] > before[sooner] for sooner in queued[:index])
            colder = [other for other in KEYS if other not in queued[: index + 1]]
            assert not any(after[other] for other in colder), "the tail goes first"
    num_free = num_slots - sum(after.values())
    first = queued[0]
    num_kept = int(watermark * num_slots)
    assert after[first] == size_of[first] or num_free <= num_kept, "the next turn is there"
    assert num_free >= num_kept
    assert counter(world, "prefetch_wasted") == 0, "nothing is read to be evicted"
