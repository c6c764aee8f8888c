"""The hash ring: balance, and few sessions move when servers change."""

from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from shared.routing.hash_ring import HashRing

SESSIONS = [f"session-{number}" for number in range(4000)]
names = st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=8)


def owner(ring: HashRing, session: str) -> str:
    return next(ring.owners(session))


def test_only_names_decide() -> None:
    one, other = HashRing(["a", "b", "c"]), HashRing(["x", "c"])
    other.set_servers(["c", "b", "a"])
    for session in SESSIONS[:200]:
        assert [*one.owners(session)] == [*other.owners(session)]


@given(names, names)
def test_each_server_is_an_owner_once(before: set[str], after: set[str]) -> None:
    ring = HashRing(before)
    ring.set_servers(after)
    found = [*ring.owners("ann")]
    assert sorted(found) == sorted(after)
    assert found == [*HashRing(after).owners("ann")]


@given(names, st.text(min_size=1, max_size=8))
def test_a_removed_server_moves_only_its_own_sessions(servers: set[str], gone: str) -> None:
    ring, left = HashRing({*servers, gone}), HashRing(servers - {gone})
    for session in SESSIONS[:100]:
        first, *others = ring.owners(session)
        if first != gone:
            assert owner(left, session) == first if left.servers else True
        elif others:
            assert owner(left, session) == others[0]


def test_sessions_are_spread_evenly() -> None:
    servers = [f"10.0.0.{number}:8000" for number in range(20)]
    ring = HashRing(servers)
    counts = Counter(owner(ring, session) for session in SESSIONS)
    assert set(counts) == set(servers)
    assert max(counts.values()) < 1.5 * len(SESSIONS) / len(servers)


def test_an_empty_ring_has_no_owners() -> None:
    assert [*islice(HashRing().owners("ann"), 1)] == []
