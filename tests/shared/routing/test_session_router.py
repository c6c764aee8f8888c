"""Turns are routed to the server with their session, unless that costs more."""

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.routing.hash_ring import HashRing, name_hash
from shared.routing.session_router import NoServerError, ServerReport, SessionRouter

SERVERS = ["a", "b", "c", "d", "e"]
BUSY = ServerReport(num_places=2, turn_s=4.0, compute_s=1e-3)


def router(servers: list[str] = SERVERS, most_sessions: int = 1000) -> SessionRouter:
    clock = count(step=100.0)  # reports are valid for long here
    made = SessionRouter(seed=0, most_sessions=most_sessions, clock=lambda: next(clock))
    made.set_servers(servers)
    return made


def own(session: str, servers: list[str] = SERVERS) -> list[str]:
    return [*HashRing(servers).owners(session)]


def test_a_new_session_goes_to_its_ring_server() -> None:
    route = router().choose("ann")
    assert route.server == own("ann")[0]
    assert route.reason == "owner"
    assert route.fallbacks == tuple(own("ann")[1:3])


def test_a_session_goes_to_the_server_that_has_it() -> None:
    holder = own("ann")[-1]
    routes = router()
    routes.report(holder, ServerReport(sessions={name_hash("ann"): 900}))
    assert routes.choose("ann")[:2] == (holder, "held")


def test_of_two_servers_with_a_session_the_one_with_more_is_used() -> None:
    less, more = own("ann")[-2:]
    routes = router()
    routes.report(more, ServerReport(sessions={name_hash("ann"): 900}))
    routes.report(less, ServerReport(sessions={name_hash("ann"): 300}))
    assert routes.choose("ann").server == more
    routes.report(less, ServerReport(sessions={name_hash("ann"): 1200}))
    assert routes.choose("ann").server == less


def test_a_routed_turn_tells_where_its_session_is() -> None:
    holder = own("ann")[-1]
    routes = router()
    routes.on_begin(holder, "ann")
    routes.on_end(holder, "ann", 500)
    assert routes.choose("ann")[:2] == (holder, "held")


@pytest.mark.parametrize(
    ("tokens", "fetch_s", "moves"),
    [
        (1000, None, True),  # 1 s to compute, 2 s to wait
        (3000, None, False),
        (3000, 1e-4, True),  # fetched in 0.3 s
        (30_000, 1e-4, False),
    ],
)
def test_a_session_moves_where_that_is_faster_than_waiting(
    tokens: int, fetch_s: float | None, moves: bool
) -> None:
    holder, second = own("ann")[:2]
    routes = router()
    for name in SERVERS:
        routes.report(name, replace(BUSY, fetch_s=fetch_s))
    routes.report(
        holder,
        replace(BUSY, num_turns=2, fetch_s=fetch_s, sessions={name_hash("ann"): tokens}),
    )
    route = routes.choose("ann")
    assert route[:2] == ((second, "moved") if moves else (holder, "held"))


def test_computing_also_delays_waiting_turns() -> None:
    holder, *others = own("ann")
    routes = router()
    for name in others:
        routes.report(name, replace(BUSY, num_turns=4))  # 6 s, two wait
    routes.report(holder, replace(BUSY, num_turns=5, sessions={name_hash("ann"): 700}))
    assert routes.choose("ann").server == holder  # 8 s: 0.7 s to compute are 2.1 s for all
    for name in others:
        routes.report(name, replace(BUSY, num_turns=4, fetch_s=1e-3))
    assert routes.choose("ann").server == others[0]


def test_computing_also_delays_expected_turns() -> None:
    """Otherwise sessions would move to and fro when all servers are busy."""
    holder, other = own("ann")[:2]
    held = replace(BUSY, num_turns=3, sessions={name_hash("ann"): 2000})  # 4 s
    for starts_per_s, server in ((0.0, other), (1.0, holder)):
        routes = router()
        for name in SERVERS:
            routes.report(name, replace(BUSY, starts_per_s=starts_per_s))
        routes.report(holder, held)
        assert routes.choose("ann").server == server  # 2 s to compute, in which two come


def test_unstored_tokens_cannot_be_fetched() -> None:
    now_s = [0.0]
    holder, other = own("ann")[:2]
    routes = SessionRouter(seed=0, clock=lambda: now_s[0])
    routes.set_servers(SERVERS)
    for name in SERVERS:
        routes.report(name, replace(BUSY, fetch_s=1e-6, stored_after_s=10.0))
    for _ in range(3):
        routes.on_begin(holder, None)
    routes.on_end(holder, "ann", 9000)
    for now_s[0], server in ((9.0, holder), (10.1, other)):
        assert routes.choose("ann").server == server


def test_turns_since_a_report_count() -> None:
    first, second = own("ann")[:2]
    routes = router()
    for name in SERVERS:
        routes.report(name, BUSY)
    for _ in range(2):
        routes.on_begin(first, None)
    assert routes.choose("ann")[:2] == (second, "moved")
    routes.on_end(first)
    assert routes.choose("ann")[:2] == (first, "owner")
    routes.report(first, replace(BUSY, num_turns=2))
    assert routes.choose("ann").server == second


def test_a_draining_server_gets_no_turns_while_others_accept() -> None:
    first, second = own("ann")[:2]
    routes = router()
    routes.report(first, ServerReport(takes_turns=False, sessions={name_hash("ann"): 9000}))
    assert routes.choose("ann")[:2] == (second, "moved")
    assert routes.choose(None).server != first
    for name in SERVERS:
        routes.report(name, ServerReport(takes_turns=False))
    assert routes.choose("ann").server in SERVERS


def test_a_turn_without_a_session_goes_to_the_least_loaded_server() -> None:
    routes = router()
    for name in SERVERS[1:]:
        routes.report(name, replace(BUSY, num_turns=3))
    routes.report("a", replace(BUSY, num_turns=1))
    assert routes.choose(None)[:2] == ("a", "least_busy")


def test_a_removed_server_gets_no_turns() -> None:
    holder = own("ann")[-1]
    routes = router()
    routes.on_begin(holder, "ann")
    left = [name for name in SERVERS if name != holder]
    routes.set_servers(left)
    assert routes.choose("ann")[:2] == (own("ann", left)[0], "owner")
    routes.report(holder, ServerReport(sessions={name_hash("ann"): 9000}))  # too late
    assert routes.choose("ann").server != holder


def test_an_empty_ring_is_an_error() -> None:
    with pytest.raises(NoServerError):
        router([]).choose("ann")


def test_the_least_recently_used_session_is_forgotten() -> None:
    routes = router(most_sessions=2)
    strangers = {name: own(name)[-1] for name in ("ann", "bob", "cid")}
    for session, server in strangers.items():
        routes.on_begin(server, session)
    assert [routes.choose(name).reason for name in strangers] == ["owner", "held", "held"]


def test_similar_names_make_no_hot_spot() -> None:
    """Sessions with equal beginnings of names are spread like others."""
    servers = [f"server-{number}" for number in range(10)]
    routes = router(servers)
    counts = Counter(routes.choose(f"tenant/prompt/{number}").server for number in range(2000))
    assert max(counts.values()) < 1.6 * 2000 / 10


@given(st.lists(st.sampled_from([f"s{n}" for n in range(60)]), max_size=200), st.data())
def test_new_sessions_do_not_accumulate(sessions: list[str], data: st.DataObject) -> None:
    """If turns wait at a session's server it goes to a free one of its next."""
    routes = router()
    for name in SERVERS:
        routes.report(name, ServerReport(num_places=4, turn_s=1.0, compute_s=1e-3))
    turns: dict[str, int] = dict.fromkeys(SERVERS, 0)
    for number, session in enumerate(sessions):
        name = f"{session}-{number}"
        route = routes.choose(name)
        if turns[route.server] >= 4:
            assert all(turns[other] >= turns[route.server] for other in own(name)[:3])
        routes.on_begin(route.server, name)
        turns[route.server] += 1
        if data.draw(st.booleans()):
            done = data.draw(st.sampled_from([name for name in SERVERS if turns[name]]))
            routes.on_end(done)
            turns[done] -= 1


class Routing(RuleBasedStateMachine):
    """Servers come, go, drain and report; turns begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.routes = SessionRouter(seed=0, most_sessions=8)
        self.servers: set[str] = set()
        self.draining: set[str] = set()
        self.running: list[tuple[str, str]] = []

    @rule(servers=st.sets(st.sampled_from(SERVERS)))
    def membership(self, servers: set[str]) -> None:
        self.routes.set_servers(servers)
        self.servers = servers
        self.draining &= servers

    @rule(
        server=st.sampled_from(SERVERS),
        num_turns=st.integers(0, 9),
        takes_turns=st.booleans(),
        sessions=st.dictionaries(st.sampled_from("uvwxyz"), st.integers(1, 9000)),
    )
    def reports(
        self, server: str, num_turns: int, takes_turns: bool, sessions: dict[str, int]
    ) -> None:
        hashed = {name_hash(name): tokens for name, tokens in sessions.items()}
        report = replace(BUSY, num_turns=num_turns, takes_turns=takes_turns, sessions=hashed)
        self.routes.report(server, report)
        if server in self.servers:
            (self.draining.discard if takes_turns else self.draining.add)(server)

    @precondition(lambda self: self.servers)
    @rule(session=st.none() | st.sampled_from("uvwxyz"))
    def turn(self, session: str | None) -> None:
        route = self.routes.choose(session)
        assert {route.server, *route.fallbacks} <= self.servers
        assert route.server not in route.fallbacks
        assert len(set(route.fallbacks)) == len(route.fallbacks)
        if self.servers - self.draining:
            assert route.server not in self.draining
        self.routes.on_begin(route.server, session)
        if session is not None:
            self.running.append((route.server, session))
            again = self.routes.choose(session)
            assert again.server == route.server or again.reason == "moved"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 9000))
    def ends(self, data: st.DataObject, tokens: int) -> None:
        server, session = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.routes.on_end(server, session, tokens)

    @invariant()
    def few_sessions_are_known(self) -> None:
        assert self.routes.num_known <= 8


TestRouting = Routing.TestCase
