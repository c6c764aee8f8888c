"""How each policy uses accesses, the queue and hints."""

import pytest

from kvd.core.eviction.policies import POLICIES
from kvd.core.eviction.session_order import Guard
from kvd.core.records.tier import Tier
from tests.kvd.core.eviction.sessions import Sessions, key_of

LOOKING_AHEAD = [name for name, maker in POLICIES.items() if maker.looks_ahead]


def test_lru_takes_the_least_recently_used_and_does_not_look_at_the_queue():
    sessions = Sessions("lru")
    sessions.use("a", "b", "c")
    sessions.use("a")
    sessions.queue(waiting="b", running="c")
    assert sessions.victims() == sessions.victims(Tier.DRAM) == "bca"


def test_fifo_keeps_the_place_of_a_session_until_it_is_dropped():
    """A session that is stored again keeps its place; one that comes back after a drop is new."""
    sessions = Sessions("fifo")
    sessions.use("a", "b", "c")
    sessions.use("a")
    assert sessions.victims() == "abc"
    sessions.policy.on_remove(key_of("b"))
    sessions.use("b")
    assert sessions.victims() == "acb"


def test_the_papers_window_exempts_its_requests_only():
    """Outside of it the least recently used go first, though they may be needed next."""
    sessions = Sessions("lookahead", capacity_bytes=200)
    sessions.placement.observe_size(100)
    sessions.use("a", "b", "c", "d", "e")
    sessions.queue(waiting="badc")
    assert sessions.victims() == "cdeab"
    sessions.capacity_bytes = 300
    assert sessions.victims() == "cedab"
    sessions.queue(waiting="dc")
    assert sessions.victims() == "abecd"
    sessions.capacity_bytes = 0
    assert sessions.victims() == "abcde"


def test_past_requests_do_not_accumulate():
    """Requests come and go although no call asks the paper's policy for victims."""
    sessions = Sessions("lookahead", capacity_bytes=200)
    sessions.use("a")
    for number in range(50):
        sessions.queue(["a", f"new {number}"], [f"runs {number}"])
    assert list(sessions.policy._facts) == [key_of("a")]
    assert sessions.victims() == "a"
    sessions.queue([])
    assert sessions.victims() == "a"


def test_the_whole_queue_goes_last_tail_first():
    sessions = Sessions("lookahead_queue")
    sessions.use("a", "b", "c", "d", "e")
    sessions.queue(waiting="badc")
    assert sessions.victims() == "ecdab"


@pytest.mark.parametrize("policy", LOOKING_AHEAD)
def test_a_running_session_goes_first_in_dram_and_late_elsewhere(policy):
    """In DRAM the engine has its KV; on SSD its blocks may be the only copy."""
    sessions = Sessions(policy, capacity_bytes=100)
    sessions.placement.observe_size(1)
    sessions.use("a", "b", "c", "d")
    sessions.queue(waiting="c", running="b")
    assert sessions.victims(Tier.DRAM) == "badc"
    assert sessions.victims(Tier.SSD) == sessions.victims(None) == "adbc"
    sessions.capacity_bytes = 2
    sessions.queue(waiting="bc", running="b")
    assert sessions.victims(Tier.DRAM) == "adcb"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_ended_session_goes_first_until_it_is_used(policy):
    sessions = Sessions(policy)
    sessions.use("a", "b", "c")
    sessions.policy.on_end(key_of("b"))
    sessions.policy.on_end(key_of("never seen"))
    assert sessions.victims(Tier.DRAM) == sessions.victims(None) == "bac"
    sessions.use("b")
    assert sessions.victims()[0] == "a"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_superseded_session_goes_first_until_it_is_used(policy):
    """It is a guess: guarded sessions stay guarded, and a use ends it."""
    sessions = Sessions(policy)
    sessions.use("a", "b", "c", "d")
    for name in "cd":
        sessions.policy.on_supersede(key_of(name))
    sessions.policy.guard(key_of("d"), Guard.RETAINED)
    assert sessions.victims() == "cabd"
    sessions.policy.guard(key_of("b"), Guard.RETAINED)
    assert sessions.victims() == "cadb"
    sessions.use("c")
    assert sessions.victims() == "acdb"


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"predictive"}))
def test_policies_that_learn_nothing_ignore_tools(policy):
    """A session that awaits tools keeps its place; it need not be known."""
    sessions = Sessions(policy)
    sessions.use("a", "b", "c")
    sessions.policy.on_await(key_of("a"), ("bash",), 1)
    sessions.policy.on_await(key_of("never seen"), ("bash",), 1)
    assert sessions.victims() == "abc"


@pytest.mark.parametrize("policy", LOOKING_AHEAD)
def test_an_ended_session_with_a_waiting_turn_is_kept_for_it(policy):
    """The hint came with the last turn, which is still to be computed."""
    sessions = Sessions(policy, capacity_bytes=100)
    sessions.placement.observe_size(1)
    sessions.use("a", "b")
    sessions.policy.on_end(key_of("a"))
    sessions.queue(waiting="a")
    assert sessions.victims() == "ba"
    sessions.queue(waiting="", running="a")
    assert sessions.victims(Tier.DRAM) == "ab"
    sessions.queue(waiting="")
    assert sessions.victims() == "ab"


@pytest.mark.parametrize("policy", LOOKING_AHEAD)
def test_no_session_that_is_needed_sooner_gives_way(policy):
    """Nor does a guarded one; a session that is neither known nor queued displaces ended ones."""
    sessions = Sessions(policy, capacity_bytes=100)
    sessions.placement.observe_size(1)
    sessions.use("a", "b", "c", "d", "e", "f")
    sessions.policy.on_end(key_of("f"))
    sessions.policy.guard(key_of("b"), Guard.PINNED)
    sessions.policy.guard(key_of("e"), Guard.PINNED)
    sessions.queue(waiting="abc")
    assert sessions.victims() == "fdcaeb"
    assert sessions.victims(giving_way_to="a") == "fdc"
    assert sessions.victims(giving_way_to="b") == "fdce"
    assert sessions.victims(giving_way_to="d") == "f"
    assert sessions.victims(giving_way_to="e") == "fd"
    assert sessions.victims(giving_way_to="x") == "f"
    sessions.queue(waiting="axbc")
    assert sessions.victims(giving_way_to="x") == "fdc"


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_without_a_use_are_ranked_by_the_last_use(policy):
    """A late write makes no session warmer; a tier that the session left is not changed."""
    sessions = Sessions(policy)
    sessions.use("a", "b", "c")
    sessions.policy.on_evict(key_of("a"), Tier.DRAM)
    assert sessions.victims(Tier.DRAM) == "bc"
    sessions.policy.on_insert(key_of("a"), Tier.DRAM)
    sessions.policy.on_insert(key_of("d"), Tier.SSD)
    assert sessions.victims(Tier.DRAM) == "abc"
    assert sessions.victims(Tier.SSD) == sessions.victims(None) == "abcd"
    sessions.policy.on_remove(key_of("a"))
    assert not sessions.policy.ranks(key_of("a"), Tier.SSD)


def test_restored_sessions_are_colder_than_used_ones():
    """A restored session is colder than one used now, or since the start."""
    for policy in POLICIES:
        if policy == "fifo":
            continue
        sessions = Sessions(policy)
        sessions.policy.on_restore([key_of(name) for name in "abc"])
        sessions.use("x")
        sessions.use("a")
        assert sessions.victims() == "bcxa"


def test_the_end_of_a_guard_counts_as_a_use():
    """Its beginning does not; a guard that begins twice ends once."""
    sessions = Sessions("lru")
    sessions.use("a", "b", "c")
    for _ in range(2):
        sessions.policy.guard(key_of("a"), Guard.PINNED)
        assert sessions.victims() == "bca"
    sessions.policy.guard(key_of("b"), Guard.NONE)
    assert sessions.victims() == "bca", "it was not guarded"
    sessions.policy.guard(key_of("a"), Guard.NONE)
    sessions.use("d")
    assert sessions.victims() == "bcad"


def test_clean_blocks_are_offered_while_the_session_is_in_dram():
    """Leaving SSD changes nothing of that."""
    sessions = Sessions("lru")
    sessions.use("a")
    key = key_of("a")
    sessions.policy.start_offering(key)
    sessions.policy.on_evict(key, Tier.SSD)
    assert sessions.policy.offers(key)
    sessions.policy.on_evict(key, Tier.DRAM)
    assert not sessions.policy.offers(key)
