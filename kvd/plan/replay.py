"""Replay of a trace in virtual time: sessions in a closed loop, and the servers that they come to.

Pure. A turn comes when its session's previous answer is complete and the user has thought; a
routing says to which server, if there are several. What a server does with it says server.py.

Of what happens at one moment, servers end what they do first; then servers come and go, then turns
arrive, then TTLs pass.

*Source:* the closed loop follows CachedAttention §4.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace as with_
from heapq import heappop, heappush

from kvd.plan.fleet import ONE_SERVER, FleetOptions, Outage, draw_outages
from kvd.plan.hardware import Costs, Hardware, ReplayOptions, recompute_load
from kvd.plan.moving import Mover, RemoteStore
from kvd.plan.outcome import Outcome, Tally, Totals, TurnRecord
from kvd.plan.routing import ROUTINGS
from kvd.plan.server import Server
from kvd.plan.trace import Session, Turn
from kvd.plan.turns import Request, Returns, plan_key
from shared.types.units import NS_PER_S

PROGRESS_TURNS = 256  # between two reports
SAMPLES = 64  # of what is in the tiers, at least if there are as many turns
ENDS, LEAVES, RETURNS, ARRIVES, EXPIRES = range(5)  # what happens at one moment, in this order


def replay(
    sessions: Sequence[Session],
    hardware: Hardware,
    options: ReplayOptions,
    on_progress: Callable[[int], None] = lambda _: None,
    fleet: FleetOptions = ONE_SERVER,
) -> Outcome:
    """Replay a trace, start to end.

    Args:
        sessions: those of the servers that are replayed.
        hardware: each server's.
        options: what is assumed.
        on_progress: called with the number of complete turns, now and then and at the end.
        fleet: the servers.

    Raises:
        KeyError: there is no such policy, or routing.
    """
    return Replay(sessions, hardware, options, fleet).run(on_progress)


class Replay:
    """One replay of a trace in virtual time; for one run.

    Args:
        sessions: those of the servers that are replayed.
        hardware: each server's.
        options: what is assumed.
        fleet: the servers.
        outages: when servers are away, in order; None: they are drawn as the fleet says.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        hardware: Hardware,
        options: ReplayOptions,
        fleet: FleetOptions = ONE_SERVER,
        *,
        outages: Sequence[Outage] | None = None,
    ) -> None:
        self._sessions = sessions
        self._hardware = hardware
        self._options = options
        self._fleet = fleet
        self._costs = Costs(sessions, hardware, options)
        self._keys = [plan_key(session) for session in range(len(sessions))]
        self._returns_ns = Returns()  # when what is kept is wanted next
        self._store = RemoteStore() if fleet.remote_bytes_per_s else None
        self._servers = [self._new_server() for _ in range(fleet.num_replayed)]
        self._before = [Totals()] * len(self._servers)  # of those that were lost
        self._away: dict[int, int] = {}  # servers, and when they are back
        self._routing = ROUTINGS[fleet.routing](fleet)
        self._routing.set_servers(range(len(self._servers)))
        if outages is None:
            outages = draw_outages(fleet, sessions[-1].start_s if sessions else 0.0)
        self._outages = outages
        self._now_ns = 0
        self._events: list[tuple[int, int, int]] = []  # heap: when, what, of whom
        self._expected: dict[int, dict[int, int]] = {ENDS: {}, EXPIRES: {}}  # of which server, when
        self._next_turn = [0] * len(sessions)
        self._came_ns: dict[int, int] = {}  # turns that no server has yet, by session
        self._last_server: list[int | None] = [None] * len(sessions)
        self._successors = {
            session.supersedes: number
            for number, session in enumerate(sessions)
            if session.supersedes is not None
        }
        self._num_arrived = 0
        self._num_retried = 0
        self._num_turns = sum(len(session.turns) for session in sessions)
        num_measured = self._num_turns - options.warmup_turns
        self._sample_every = max(1, num_measured // SAMPLES)
        self._tally = Tally()
        self._since = [Totals()] * len(self._servers)

    def run(self, on_progress: Callable[[int], None]) -> Outcome:
        """Replay it all."""
        self.begin()
        num_done = 0
        while num_done < self._num_turns:
            if self.step():
                num_done += 1
                if num_done % PROGRESS_TURNS == 0 or num_done == self._num_turns:
                    on_progress(num_done)
        return self.outcome()

    def begin(self) -> None:
        """Have sessions' first turns come, and servers go; `step` is to be called for each turn."""
        for number, session in enumerate(self._sessions):
            if session.supersedes is None:  # those come when another's last turn is complete
                heappush(self._events, (round(session.start_s * NS_PER_S), ARRIVES, number))
        for number, outage in enumerate(self._outages):
            heappush(self._events, (outage.starts_ns, LEAVES, number))

    def step(self) -> bool:
        """Let one thing happen, and what follows from it; returns whether a turn is complete."""
        at_ns, what, whom = heappop(self._events)
        if what in (ENDS, EXPIRES):
            if at_ns != self._expected[what].get(whom):
                return False  # it was expected once
            del self._expected[what][whom]
        self._now_ns = max(self._now_ns, at_ns)
        is_complete = False
        if what == ENDS:
            is_complete = self._end(whom)
        elif what == LEAVES:
            self._leave(self._outages[whom])
        elif what == RETURNS:
            self._return(whom)
        elif what == ARRIVES:
            self._arrive(whom)
        else:
            self._servers[whom].expire(self._now_ns)
            self._expect(whom)
        return is_complete

    def outcome(self) -> Outcome:
        """Say what was measured so far."""
        load = recompute_load(self._sessions, self._hardware.engine) / len(self._servers)
        until = [self._totals(number) for number in range(len(self._servers))]
        outcome = self._tally.outcome(self._num_turns, load, _sum(self._since), _sum(until))
        busy = [now.busy_ns - then.busy_ns for now, then in zip(until, self._since, strict=True)]
        return with_(
            outcome,
            num_retried=self._num_retried,
            busiest=max(busy) * len(busy) / sum(busy) if any(busy) else 0.0,
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        for server in self._servers:
            server.check()

    # --------------------------------------------------------------------------------------- turns

    def _arrive(self, session: int) -> None:
        """Bring a session's turn to a server, or keep it until there is one."""
        self._came_ns.setdefault(session, self._now_ns)
        if len(self._away) == len(self._servers):
            heappush(self._events, (min(self._away.values()), ARRIVES, session))
            return
        number = self._routing.choose(session, self._now_ns) if len(self._servers) > 1 else 0
        server, key, turn = self._servers[number], self._keys[session], self._turn(session)
        self._returns_ns.pop(key, None)
        is_new = self._last_server[session] is None
        has_moved = not is_new and self._last_server[session] != number
        if not is_new and self._routing.forgets():
            server.forget(key)
            has_moved = True
        index, superseded = self._next_turn[session], self._sessions[session].supersedes
        if not index and superseded is not None and self._options.tool_hints:
            server.supersede(self._keys[superseded])
        record = TurnRecord(
            self._came_ns.pop(session),
            server.num_waiting,
            turn.history_tokens,
            turn.new_tokens,
            was_resident=server.holds_in_dram(key),
            is_of_tools=index > 0 and bool(self._sessions[session].turns[index - 1].tools),
            has_moved=has_moved,
        )
        self._last_server[session] = number
        hbm_bytes = self._costs.held_bytes(turn.kept_tokens)
        request = Request(session, key, self._num_arrived, turn, record, hbm_bytes)
        self._num_arrived += 1
        server.arrive(request, self._now_ns)
        self._expect(number)

    def _note_start(self, server: Server, request: Request) -> None:
        if request.number == self._options.warmup_turns:
            self._since = [self._totals(number) for number in range(len(self._servers))]
        is_sampled = self._is_measured(request) and request.number % self._sample_every == 0
        if is_sampled and self._costs.has_parts:
            self._tally.sampled(server.shares())

    def _end(self, number: int) -> bool:
        """Let a server end one thing; returns whether that was a turn."""
        server = self._servers[number]
        over = server.step(self._now_ns)
        if over is not None:
            self._end_turn(number, server, over)
        self._expect(number)
        return over is not None

    def _end_turn(self, number: int, server: Server, request: Request) -> None:
        """End a turn: its session is stored, and thinks."""
        session = request.session
        self._next_turn[session] += 1
        is_last = self._next_turn[session] == len(self._sessions[session].turns)
        follower = self._successors.get(session) if is_last else session
        if follower is not None:
            turn = self._turn(follower)
            think_ns = round(turn.think_s * self._options.think_scale * NS_PER_S)
            returns_ns = self._now_ns + think_ns
            if turn.history_tokens:
                self._returns_ns[self._keys[session]] = returns_ns
            heappush(self._events, (returns_ns, ARRIVES, follower))
        server.end(request, self._now_ns, is_last=is_last)
        if self._is_measured(request):
            self._tally.add(request.record)
        self._routing.ended(number, session, request.turn.kept_tokens, server.report, self._now_ns)

    # ------------------------------------------------------------------------------------- servers

    def _leave(self, outage: Outage) -> None:
        """Take a server out; if it is lost its turns begin anew elsewhere."""
        number = outage.server
        self._away[number] = self._now_ns + round(self._fleet.away_s * NS_PER_S)
        heappush(self._events, (self._away[number], RETURNS, number))
        self._route()
        if not outage.is_lost:
            self._servers[number].drain(self._now_ns)
            self._expect(number)
            return
        self._before[number] = self._totals(number)
        abandoned = self._servers[number].abandon()
        self._servers[number] = self._new_server()
        self._expect(number)
        self._num_retried += len(abandoned)
        for request in abandoned:
            self._came_ns[request.session] = request.record.arrived_ns
            self._arrive(request.session)

    def _return(self, number: int) -> None:
        del self._away[number]
        self._servers[number].resume()
        self._route()

    def _route(self) -> None:
        """Say who takes turns, if anybody does."""
        there = [number for number in range(len(self._servers)) if number not in self._away]
        if there:
            self._routing.set_servers(there)

    def _new_server(self) -> Server:
        fleet = self._fleet
        mover = None
        if self._store is not None:
            quiet_s = fleet.quiet_s if fleet.remote_write == "all" else None
            mover = Mover(
                self._store,
                self._costs,
                fleet.remote_bytes_per_s,
                quiet_s,
                takes_evicted=fleet.remote_write == "evicted",
                waits=fleet.remote_wait,
            )
        return Server(
            self._hardware,
            self._options,
            self._costs,
            self._returns_ns,
            self._note_start,
            mover,
        )

    def _expect(self, number: int) -> None:
        """Have what happens at a server next come, after something happened there."""
        server = self._servers[number]
        for what, at_ns in ((ENDS, server.next_ns()), (EXPIRES, server.expires_ns())):
            expected = self._expected[what]
            if at_ns is None:
                expected.pop(number, None)
            elif expected.get(number) != at_ns:
                expected[number] = at_ns
                heappush(self._events, (at_ns, what, number))

    # -------------------------------------------------------------------------------------- pieces

    def _turn(self, session: int) -> Turn:
        """Return the session's turn that waits, runs or is still to come."""
        return self._sessions[session].turns[self._next_turn[session]]

    def _is_measured(self, request: Request) -> bool:
        return request.number >= self._options.warmup_turns

    def _totals(self, number: int) -> Totals:
        """Return what a server has counted, and those that were lost in its place."""
        return self._before[number].plus(self._servers[number].totals(self._now_ns))


def _sum(totals: Sequence[Totals]) -> Totals:
    summed = Totals()
    for each in totals:
        summed = summed.plus(each)
    return summed
