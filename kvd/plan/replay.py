"""Replay of a trace in virtual time: sessions in a closed loop, and the servers that compute them.

Pure. A session's turn arrives when its previous answer is complete and the user has thought. With
several servers a routing chooses one. server.py simulates a server.

The order of events at one moment: what ends at servers; servers leaving and returning; arrivals;
TTLs that pass.

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

PROGRESS_TURNS = 256  # between two progress reports
SAMPLES = 64  # of the tiers' content, at least, if there are as many turns
ENDS, LEAVES, RETURNS, ARRIVES, EXPIRES = range(5)  # kinds of events, ordered at one moment


def replay(
    sessions: Sequence[Session],
    hardware: Hardware,
    options: ReplayOptions,
    on_progress: Callable[[int], None] = lambda _: None,
    fleet: FleetOptions = ONE_SERVER,
) -> Outcome:
    """Replay a trace from start to end.

    Args:
        sessions: the sessions that come to the servers that are replayed.
        hardware: each server's hardware.
        options: assumptions beside the hardware.
        on_progress: called with the number of complete turns, now and then and at the end.
        fleet: the servers.

    Raises:
        KeyError: there is no such policy, or routing.
    """
    return Replay(sessions, hardware, options, fleet).run(on_progress)


class Replay:
    """One replay of a trace in virtual time. An object serves one replay.

    Args:
        sessions: the sessions that come to the servers that are replayed.
        hardware: each server's hardware.
        options: assumptions beside the hardware.
        fleet: the servers.
        outages: when servers are away, in order; None: drawn with the fleet's rates.
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
        self._returns_ns = Returns()  # when each session's KV is needed next
        self._store = RemoteStore() if fleet.remote_bytes_per_s else None
        self._servers = [self._new_server() for _ in range(fleet.num_replayed)]
        self._before = [Totals()] * len(self._servers)  # of lost servers, by their successor
        self._away: dict[int, int] = {}  # by server: when it is back
        self._routing = ROUTINGS[fleet.routing](fleet)
        self._routing.set_servers(range(len(self._servers)))
        if outages is None:
            outages = draw_outages(fleet, sessions[-1].start_s if sessions else 0.0)
        self._outages = outages
        self._now_ns = 0
        self._events: list[tuple[int, int, int]] = []  # heap: time, kind, number
        # By kind and server: the time of its next event. Events of another time are outdated.
        self._expected: dict[int, dict[int, int]] = {ENDS: {}, EXPIRES: {}}
        self._next_turn = [0] * len(sessions)
        self._arrived_ns: dict[int, int] = {}  # by session: arrival of a turn without a server
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
        """Replay the whole trace."""
        self.begin()
        num_done = 0
        while num_done < self._num_turns:
            if self.step():
                num_done += 1
                if num_done % PROGRESS_TURNS == 0 or num_done == self._num_turns:
                    on_progress(num_done)
        return self.outcome()

    def begin(self) -> None:
        """Schedule the sessions' first turns and the outages; the caller then calls `step`."""
        for number, session in enumerate(self._sessions):
            if session.supersedes is None:  # others begin after the last turn of another session
                heappush(self._events, (round(session.start_s * NS_PER_S), ARRIVES, number))
        for number, outage in enumerate(self._outages):
            heappush(self._events, (outage.starts_ns, LEAVES, number))

    def step(self) -> bool:
        """Process one event; return whether a turn is complete with it."""
        at_ns, kind, number = heappop(self._events)
        if kind in (ENDS, EXPIRES):
            if at_ns != self._expected[kind].get(number):
                return False  # outdated
            del self._expected[kind][number]
        self._now_ns = max(self._now_ns, at_ns)
        is_complete = False
        if kind == ENDS:
            is_complete = self._end(number)
        elif kind == LEAVES:
            self._leave(self._outages[number])
        elif kind == RETURNS:
            self._return(number)
        elif kind == ARRIVES:
            self._arrive(number)
        else:
            self._servers[number].expire(self._now_ns)
            self._expect(number)
        return is_complete

    def outcome(self) -> Outcome:
        """Return the measurements so far."""
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
        """Give a session's turn to a server, or let it wait until one is back."""
        self._arrived_ns.setdefault(session, self._now_ns)
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
            self._arrived_ns.pop(session),
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

    def _on_start(self, server: Server, request: Request) -> None:
        if request.number == self._options.warmup_turns:
            self._since = [self._totals(number) for number in range(len(self._servers))]
        is_sampled = self._is_measured(request) and request.number % self._sample_every == 0
        if is_sampled and self._costs.has_parts:
            self._tally.add_sample(server.shares())

    def _end(self, number: int) -> bool:
        """Let one thing end at a server; return whether that was a turn."""
        server = self._servers[number]
        ended = server.step(self._now_ns)
        if ended is not None:
            self._end_turn(number, server, ended)
        self._expect(number)
        return ended is not None

    def _end_turn(self, number: int, server: Server, request: Request) -> None:
        """Complete a turn: store its session, and schedule the session's next turn."""
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
        self._routing.on_turn_end(
            number, session, request.turn.kept_tokens, server.report, self._now_ns
        )

    # ------------------------------------------------------------------------------------- servers

    def _leave(self, outage: Outage) -> None:
        """Take a server away; if it is lost, its turns begin again elsewhere."""
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
            self._arrived_ns[request.session] = request.record.arrived_ns
            self._arrive(request.session)

    def _return(self, number: int) -> None:
        del self._away[number]
        self._servers[number].resume()
        self._route()

    def _route(self) -> None:
        """Set the servers that take turns, if any is there."""
        present = [number for number in range(len(self._servers)) if number not in self._away]
        if present:
            self._routing.set_servers(present)

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
            self._on_start,
            mover,
        )

    def _expect(self, number: int) -> None:
        """Schedule the server's next events, after something happened there."""
        server = self._servers[number]
        for kind, at_ns in ((ENDS, server.next_ns()), (EXPIRES, server.expires_ns())):
            expected = self._expected[kind]
            if at_ns is None:
                expected.pop(number, None)
            elif expected.get(number) != at_ns:
                expected[number] = at_ns
                heappush(self._events, (at_ns, kind, number))

    # ------------------------------------------------------------------------------------- helpers

    def _turn(self, session: int) -> Turn:
        """Return the turn of a session that waits, runs, or comes next."""
        return self._sessions[session].turns[self._next_turn[session]]

    def _is_measured(self, request: Request) -> bool:
        return request.number >= self._options.warmup_turns

    def _totals(self, number: int) -> Totals:
        """Return the totals of a server, together with those of lost servers in its place."""
        return self._before[number].plus(self._servers[number].totals(self._now_ns))


def _sum(totals: Sequence[Totals]) -> Totals:
    summed = Totals()
    for each in totals:
        summed = summed.plus(each)
    return summed
