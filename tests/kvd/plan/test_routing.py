"""The server of each turn in a plan."""

from collections import Counter

import pytest

from kvd.plan.fleet import FleetOptions
from kvd.plan.routing import ROUTINGS, RandomRouting, SessionRouting
from shared.routing.session_router import ServerReport

FOUR = FleetOptions(4, 4)


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing_uses_the_present_servers(name):
    """And no others."""
    routing = ROUTINGS[name](FOUR)
    routing.set_servers([0, 2, 3])
    counts = Counter(routing.choose(session, 0) for session in range(600))
    assert set(counts) == {0, 2, 3}
    assert min(counts.values()) > 100


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_session_stays_at_its_server(name):
    """Except with random routing."""
    routing, is_sticky = ROUTINGS[name](FOUR), name != "random"
    routing.set_servers(range(4))
    for session in range(20):
        servers = {routing.choose(session, 0) for _ in range(20)}
        assert (len(servers) == 1) == is_sticky


def test_a_ring_moves_a_session_back_and_a_router_of_sessions_does_not():
    """The ring gives a returning server its sessions again, wherever they continued."""
    found = {}
    for name in ("ring", "session"):
        routing = ROUTINGS[name](FOUR)
        routing.set_servers(range(4))
        own = routing.choose(7, 0)
        routing.on_turn_end(own, 7, 100, ServerReport, 0)
        routing.set_servers(server for server in range(4) if server != own)
        other = routing.choose(7, 0)
        routing.on_turn_end(other, 7, 200, ServerReport, 0)
        routing.set_servers(range(4))
        found[name] = (own, other, routing.choose(7, 0))
        assert other != own
    assert found["ring"][2] == found["ring"][0]
    assert found["session"][2] == found["session"][1]


def test_servers_report_periodically():
    """Not with every turn: a router is informed as rarely as in production."""
    routing = SessionRouting(FOUR)
    routing.set_servers(range(4))
    asked = []

    def report():
        asked.append(1)
        return ServerReport()

    for now_s in (0, 1, 9, 10, 11, 25):
        routing.on_turn_end(2, 7, 100, report, now_s * 10**9)
    assert len(asked) == 3


def test_at_random_a_server_rarely_has_the_session():
    """Ten of a thousand servers are replayed: they have it for a hundredth of the returns."""
    routing = RandomRouting(FleetOptions(1000, 10))
    assert 0.97 < sum(routing.forgets() for _ in range(2000)) / 2000 < 1
    assert not any(RandomRouting(FOUR).forgets() for _ in range(100))
    assert not any(SessionRouting(FleetOptions(1000, 10)).forgets() for _ in range(100))
