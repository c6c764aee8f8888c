"""What a daemon's recent turns would find in other tiers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.eviction.policies import POLICIES
from kvd.core.records.tier import Tier
from kvd.core.state.turn_log import RecordedTurn
from kvd.plan.recorded_replay import Found, ObservedCache, replay_recorded
from shared.types.units import NS_PER_S

BLOCK = 16
CACHE = ObservedCache(BLOCK, 1600, 0, 0, "lru")
ROOM = CACHE.num_bytes(100)  # room for one session of the tests
ENOUGH = 100 * ROOM


def turn(
    session: int,
    number: int,
    at_s: float,
    *,
    waits_s: float = 0.0,
    lasts_s: float = 1.0,
    wanted: int = 0,
    size: int = 100,
) -> RecordedTurn:
    """Make a turn that runs at this time."""
    started_ns = round(at_s * NS_PER_S)
    return RecordedTurn(
        session=session,
        turn=number,
        arrived_ns=started_ns - round(waits_s * NS_PER_S),
        started_ns=started_ns,
        ended_ns=started_ns + round(lasts_s * NS_PER_S),
        wanted_tokens=wanted or (size if number > 1 else 0),
        dram_tokens=0,
        ssd_tokens=0,
        stored_tokens=size,
        is_asked=True,
    )


def tiers_of(found: list[Found]) -> list[Tier | None]:
    """Return the tier of each turn's history."""
    return [one.tier for one in found]


def test_everything_is_found_with_enough_room() -> None:
    """A first turn has nothing to find; its second finds what the first has stored."""
    turns = [turn(1, 1, 0), turn(2, 1, 2), turn(1, 2, 10, wanted=90), turn(2, 2, 12)]
    found = replay_recorded(turns, CACHE, ENOUGH, 0)
    assert found == [Found(), Found(), Found(90, Tier.DRAM), Found(100, Tier.DRAM)]


def test_sessions_without_room_in_dram_are_on_ssd_or_lost() -> None:
    """DRAM for one session: the other is on SSD, or nowhere if there is none."""
    turns = [turn(1, 1, 0), turn(2, 1, 2), turn(1, 2, 10), turn(2, 2, 20)]
    assert tiers_of(replay_recorded(turns, CACHE, ROOM, ENOUGH))[2:] == [Tier.SSD, Tier.SSD]
    assert tiers_of(replay_recorded(turns, CACHE, ROOM, 0))[2:] == [None, None]


def test_a_waiting_session_is_read_ahead() -> None:
    """By a policy that looks ahead, if it waits as long as the read takes."""
    history = [turn(1, 1, 0), turn(2, 1, 2), turn(3, 1, 4)]
    cache = ObservedCache(BLOCK, 1600, 0, 0, "lookahead_queue", ssd_bytes_per_s=ROOM / 5)
    for waits_s, expected in ((6.0, Tier.DRAM), (4.0, Tier.SSD)):
        turns = [*history, turn(1, 2, 30, waits_s=waits_s)]
        assert tiers_of(replay_recorded(turns, cache, 2 * ROOM, ENOUGH))[3] is expected
    turns = [*history, turn(1, 2, 30, waits_s=6)]
    assert tiers_of(replay_recorded(turns, CACHE, 2 * ROOM, ENOUGH))[3] is Tier.SSD  # lru


def test_a_read_that_is_too_late_has_no_effect() -> None:
    """Its session runs, is stored and comes back while the read would still be active."""
    cache = ObservedCache(BLOCK, 1600, 0, 0, "lookahead_queue", ssd_bytes_per_s=ROOM / 50)
    turns = [turn(1, 1, 0), turn(2, 1, 2), turn(3, 1, 4), turn(1, 2, 30, waits_s=4)]
    turns += [turn(1, 3, 35, waits_s=1), turn(2, 2, 90, waits_s=5), turn(1, 4, 200)]
    found = tiers_of(replay_recorded(turns, cache, 2 * ROOM, ENOUGH))
    assert found[3:5] == [Tier.SSD, Tier.DRAM]
    assert None not in found[3:]


def test_a_session_expires_after_its_ttl() -> None:
    """Counted from its last store."""
    cache = ObservedCache(BLOCK, 1600, 0, 0, "lru", ttl_ns=10 * NS_PER_S)
    turns = [turn(1, 1, 0), turn(1, 2, 10), turn(1, 3, 30), turn(1, 4, 32)]
    found = tiers_of(replay_recorded(turns, cache, ENOUGH, 0))
    assert found == [None, Tier.DRAM, None, Tier.DRAM]


def test_an_ended_session_goes_first() -> None:
    """It gives way to one that was used before it."""
    turns = [turn(1, 1, 0), turn(2, 1, 2), turn(3, 1, 4), turn(1, 2, 10)]
    assert tiers_of(replay_recorded(turns, CACHE, 2 * ROOM, 0))[3] is None
    turns[1] = replace(turns[1], is_ended=True)
    assert tiers_of(replay_recorded(turns, CACHE, 2 * ROOM, 0))[3] is Tier.DRAM


def test_sizes_are_whole_blocks() -> None:
    """One token more takes a block more."""
    assert CACHE.num_bytes(BLOCK) == 1600
    assert CACHE.num_bytes(BLOCK + 1) == 3200


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 30), st.integers(0, 30), st.integers(1, 200)),
        max_size=40,
    ),
    st.sampled_from(sorted(POLICIES)),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_any_record_can_be_replayed(
    steps: list[tuple[int, int, int, int]], policy: str, dram: int, ssd: int
) -> None:
    """With any overlaps, only stored tokens are found, and all of them where all fit."""
    number: dict[int, int] = {}
    turns = []
    for at_s, (session, waits_s, lasts_s, size) in enumerate(steps):
        number[session] = number.get(session, 0) + 1
        one = turn(session, number[session], at_s, waits_s=waits_s, lasts_s=lasts_s, size=size)
        turns.append(one)
    cache = ObservedCache(BLOCK, 1600, 0, 0, policy, ssd_bytes_per_s=5000)
    found = replay_recorded(turns, cache, dram * ROOM, ssd * ROOM)
    for one, what in zip(turns, found, strict=True):
        assert what.tier is None or (one.turn > 1 and what.tokens == one.wanted_tokens)
        assert what.tier is not Tier.SSD or ssd
    roomy = replay_recorded(turns, cache, ENOUGH, 0)
    assert all(
        (what.tier is Tier.DRAM) == (one.turn > 1) for one, what in zip(turns, roomy, strict=True)
    )


@pytest.mark.parametrize("policy", ["lru", "lookahead_queue"])
def test_more_room_never_finds_less(policy: str) -> None:
    """Ten sessions in turn, in room for two, four, eight and sixteen."""
    turns = [turn(at % 10, 1 + at // 10, 5.0 * at) for at in range(100)]
    cache = ObservedCache(BLOCK, 1600, 0, 0, policy)
    hits = []
    for num_sessions in (2, 4, 8, 16):
        found = replay_recorded(turns, cache, num_sessions * ROOM, 0)
        hits.append(sum(one.tier is not None for one in found))
    assert hits == sorted(hits)
    assert hits[-1] == 90
