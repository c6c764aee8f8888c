"""Replay of a trace in virtual time: one engine, its queue, and kvd's placement over byte counts.

Pure. Closed loop: a turn comes when its session's previous answer is complete and the user has
thought. A turn takes a slot in the order of the queue, waits for its history if that is on SSD,
is prefilled (DRAM to HBM overlaps with it), decoded, and stored.

What is placed is decided by the daemon's own code: SessionPlacement gets the queue as an
engine reports it, and is asked for victims, windows and what to read ahead.

Of what happens at one moment, prefills end first, then decodes, then reads; then turns arrive, then
TTLs pass. After each, turns start that can, and reading ahead is looked at.

*Source:* the closed loop and the engine's constants follow CachedAttention §4.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush

from kvd.core.eviction.policies import POLICIES
from kvd.core.eviction.policy import EvictionPolicy, PolicyContext
from kvd.core.eviction.session_placement import SessionPlacement
from kvd.core.eviction.ttl import TtlClock
from kvd.core.operations.sessions import RECHECK_NS
from kvd.core.records.records import Tier
from kvd.plan.belady import BeladyPolicy
from kvd.plan.gpu import Gpu, Prefill
from kvd.plan.hardware import Costs, Hardware, ReplayOptions, recompute_load
from kvd.plan.kept import NOTHING, Kept
from kvd.plan.outcome import Outcome, Tally, Totals, TurnRecord
from kvd.plan.reading import Read, Reading, SsdChannel
from kvd.plan.tiers import Tiers
from kvd.plan.trace import Session, Turn
from shared.types.load_choice import RecentStarts, Traffic, loading_pays
from shared.types.queue_delta import QueueChange, QueuedRequest, RunningRequest
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

__all__ = ["Replay", "ReplayOptions", "replay"]

ENGINE = 1  # there is one
PROGRESS_TURNS = 256  # between two reports
SAMPLES = 64  # of what is in the tiers, at least if there are as many turns
INTERVAL_SHARE = 1 / 16  # of the newest interval between two starts in the running mean


def replay(
    sessions: Sequence[Session],
    hardware: Hardware,
    options: ReplayOptions,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Replay a trace, start to end.

    `on_progress` is called with the number of complete turns, now and then and at the end.

    Raises:
        KeyError: there is no such policy.
    """
    return Replay(sessions, hardware, options).run(on_progress)


@dataclass(slots=True)
class _Request:
    """A turn that waits or runs."""

    session: int
    number: int
    turn: Turn
    record: TurnRecord
    hbm_bytes: int


class Replay:
    """One replay of a trace in virtual time; for one run."""

    def __init__(
        self, sessions: Sequence[Session], hardware: Hardware, options: ReplayOptions
    ) -> None:
        self._sessions = sessions
        self._hardware = hardware
        self._options = options
        self._costs = Costs(sessions, hardware, options)
        self._keys = [SessionKey("plan", "plan", str(i)) for i in range(len(sessions))]
        self._kept: dict[SessionKey, Kept] = {}  # of what is held; what was, until it is asked for
        self._returns_ns: dict[SessionKey, int] = {}  # when what is kept is wanted next
        self._placement = SessionPlacement(
            self._make_policy, lambda: hardware.dram_bytes + hardware.ssd_bytes
        )
        self._report_queue = partial(self._placement.change_queue, ENGINE)
        self._tiers = Tiers(
            self._placement,
            {Tier.DRAM: hardware.dram_bytes, Tier.SSD: hardware.ssd_bytes},
            charge=self._costs.charge,
            are_exclusive=options.tiers == "exclusive",
            watermark=options.watermark,
        )
        self._gpu = Gpu()
        self._channel = SsdChannel(hardware.ssd_bytes_per_s)
        self._reading = Reading(
            self._placement, self._tiers, self._channel, hardware.dram_bytes, self._wanted_bytes
        )
        self._ttl = TtlClock()
        self._deadlines_ns: dict[SessionKey, int] = {}
        self._now_ns = 0
        self._arrivals: list[tuple[int, int]] = []  # heap: when, which session
        self._next_turn = [0] * len(sessions)
        self._successors = {
            session.supersedes: number
            for number, session in enumerate(sessions)
            if session.supersedes is not None
        }
        self._waiting: deque[_Request] = deque()
        self._running: dict[int, _Request] = {}  # by session
        self._num_arrived = 0
        self._num_turns = sum(len(session.turns) for session in sessions)
        self._started_ns: int | None = None  # the last turn
        self._interval_ns = 0.0
        self._starts = RecentStarts()
        self._hbm_bytes = 0
        num_measured = self._num_turns - options.warmup_turns
        self._sample_every = max(1, num_measured // SAMPLES)
        self._tally = Tally()
        self._since = Totals()

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
        """Have sessions' first turns come; `step` is to be called for each turn."""
        self._arrivals = [
            (round(session.start_s * NS_PER_S), number)
            for number, session in enumerate(self._sessions)
            if session.supersedes is None  # those come when another's last turn is complete
        ]
        heapify(self._arrivals)

    def step(self) -> bool:
        """Let one thing happen, and what follows from it; returns whether a turn is complete."""
        self._now_ns = self._next_ns()
        is_complete = False
        if (session := self._gpu.end_prefill(self._now_ns)) is not None:
            self._answered(self._running[session])
        elif (session := self._gpu.end_decode(self._now_ns)) is not None:
            self._complete(self._running.pop(session))
            is_complete = True
        elif (read := self._channel.end(self._now_ns)) is not None:
            self._was_read(read)
        elif self._arrivals and self._arrivals[0][0] <= self._now_ns:
            self._arrive(heappop(self._arrivals)[1])
        else:
            self._expire()
        while self._waiting and self._has_room(self._waiting[0]):
            self._start(self._waiting.popleft())
        self._reading.look_ahead(self._now_ns)
        return is_complete

    def outcome(self) -> Outcome:
        """Say what was measured so far."""
        load = recompute_load(self._sessions, self._hardware.engine)
        return self._tally.outcome(self._num_turns, load, self._since, self._totals())

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._tiers.check()
        self._placement.queue.check()

    # --------------------------------------------------------------------------------------- events

    def _next_ns(self) -> int:
        """Return when something happens next."""
        times = (
            self._gpu.next_ns(),
            self._channel.next_ns(),
            self._arrivals[0][0] if self._arrivals else None,
            self._ttl.next_deadline_ns(),
        )
        return max(self._now_ns, min(time for time in times if time is not None))

    def _arrive(self, session: int) -> None:
        key, turn = self._keys[session], self._turn(session)
        self._returns_ns.pop(key, None)
        record = self._arriving(session, turn)
        hbm_bytes = self._costs.held_bytes(turn.kept_tokens)
        request = _Request(session, self._num_arrived, turn, record, hbm_bytes)
        self._num_arrived += 1
        self._waiting.append(request)
        waiting = QueuedRequest((0, 0.0, request.number), key, turn.history_tokens)
        self._report_queue(
            QueueChange(waiting=[waiting], interval_ns=round(self._interval_ns)), self._now_ns
        )

    def _arriving(self, session: int, turn: Turn) -> TurnRecord:
        """Begin to measure a turn; a first one may have its session supersede another."""
        number, superseded = self._next_turn[session], self._sessions[session].supersedes
        if not number and superseded is not None and self._options.tool_hints:
            self._placement.policy.on_supersede(self._keys[superseded])
        return TurnRecord(
            self._now_ns,
            len(self._waiting),
            turn.history_tokens,
            turn.new_tokens,
            was_resident=self._tiers.find(self._keys[session]) is Tier.DRAM,
            is_of_tools=number > 0 and bool(self._sessions[session].turns[number - 1].tools),
        )

    def _start(self, request: _Request) -> None:
        """Give a request a slot, and its history if that is held and loading pays."""
        self._note_start()
        key, record = self._keys[request.session], request.record
        self._running[request.session] = request
        self._hbm_bytes += request.hbm_bytes
        self._report_queue(QueueChange(running=[RunningRequest(request.number, key)]), self._now_ns)
        record.started_ns = self._now_ns
        self._look_up(key, request.turn, record)
        if request.number == self._options.warmup_turns:
            self._since = self._totals()
        if self._is_measured(request):
            self._tally.started(record)
            if self._costs.has_parts and request.number % self._sample_every == 0:
                self._tally.sampled(self._tiers.shares(self._parts_bytes))
        if record.found_in is Tier.SSD and record.loaded_tokens:
            self._reading.demand(key, self._costs.loaded_bytes(record.loaded_tokens), self._now_ns)
        else:
            self._prefill(request)

    def _answered(self, request: _Request) -> None:
        if self._is_measured(request):
            self._tally.answered(request.record, self._now_ns)

    def _complete(self, request: _Request) -> None:
        """End a turn: its session is stored, and thinks."""
        key, turns = self._keys[request.session], self._sessions[request.session].turns
        self._hbm_bytes -= request.hbm_bytes
        self._next_turn[request.session] += 1
        is_last = self._next_turn[request.session] == len(turns)
        follower = self._successors.get(request.session) if is_last else request.session
        if follower is not None:
            turn = self._turn(follower)
            think_ns = round(turn.think_s * self._options.think_scale * NS_PER_S)
            returns_ns = self._now_ns + think_ns
            if turn.history_tokens:
                self._returns_ns[key] = returns_ns
            heappush(self._arrivals, (returns_ns, follower))
        self._report_queue(QueueChange(left=[request.number]), self._now_ns)
        if self._options.load_policy == "never":
            return
        if is_last and self._options.end_hints:
            self._placement.policy.on_end(key)
            self._tiers.drop(key)  # an engine does not store a session's last turn
            return
        if request.turn.tools and self._options.tool_hints:  # before it is ranked to be stored
            self._placement.policy.on_await(key, request.turn.tools, self._now_ns)
        self._store(key, request)

    def _was_read(self, read: Read) -> None:
        """Take in a session that was read from SSD, for its turn or ahead of it."""
        if self._reading.ended(self._keys[read.session], read) and read.session in self._running:
            self._prefill(self._running[read.session])

    def _expire(self) -> None:
        """Drop sessions whose TTL has passed, but none of which a turn waits or runs."""
        while (key := self._ttl.pop_due(self._now_ns)) is not None:
            deadline_ns = self._deadlines_ns[key]
            if deadline_ns > self._now_ns:
                self._ttl.schedule(key, deadline_ns)
            elif self._placement.is_busy(key):
                continue  # it gets another when it is stored
            elif self._tiers.is_reading(key):
                self._ttl.schedule(key, self._now_ns + RECHECK_NS)
            else:
                self._tiers.drop(key)

    # --------------------------------------------------------------------------------------- pieces

    def _has_room(self, request: _Request) -> bool:
        if len(self._running) >= self._hardware.engine.slots:
            return False
        hbm_bytes = self._hardware.hbm_bytes
        return (
            not hbm_bytes or not self._running or self._hbm_bytes + request.hbm_bytes <= hbm_bytes
        )

    def _look_up(self, key: SessionKey, turn: Turn, record: TurnRecord) -> None:
        """Note where a turn's history is, and how many tokens of it are to be loaded."""
        found_in = self._tiers.find(key)
        kept = NOTHING if found_in is None else self._kept[key].within(turn.history_tokens)
        self._kept[key] = kept
        if not kept.num_tokens:
            return
        record.found_in, tokens = found_in, self._costs.loadable(kept)
        record.lacks_part = not tokens
        if self._options.load_policy == "always" or self._pays(key, turn, found_in, tokens):
            record.loaded_tokens = tokens

    def _pays(self, key: SessionKey, turn: Turn, found_in: Tier | None, tokens: int) -> bool:
        """Whether loading so much of a turn's history pays, by the engine's own rule."""
        wait_ns = 0
        if found_in is Tier.SSD:
            num_bytes = self._costs.loaded_bytes(tokens)
            wait_ns = self._reading.expected_ns(key, num_bytes, self._now_ns)
        traffic = Traffic(
            num_waiting=len(self._waiting),
            num_loading=len(self._running) - 1 - self._gpu.num_turns,
            num_places=self._hardware.engine.slots,
            starts_per_s=self._starts.per_s(self._now_ns),
            backlog_s=self._gpu.backlog_ns(self._now_ns) / NS_PER_S,
        )
        return loading_pays(
            wait_ns / NS_PER_S,
            self._costs.stall_ns(turn, tokens) / NS_PER_S,
            self._costs.compute_ns(tokens) / NS_PER_S,
            traffic,
        )

    def _prefill(self, request: _Request) -> None:
        """Queue a request's prefill; the engine has what is held of its session, or recomputes."""
        key, record = self._keys[request.session], request.record
        self._reading.cancel(key)
        if record.found_in is None:
            self._tiers.drop(key)  # what is held is no part of this prompt
        else:
            self._tiers.run(key)
        prefill_ns = self._costs.prefill_ns(request.turn, record.loaded_tokens)
        decode_ns = self._costs.decode_ns(request.turn)
        self._gpu.add(Prefill(request.session, prefill_ns, decode_ns), self._now_ns)

    def _store(self, key: SessionKey, request: _Request) -> None:
        before = self._kept[key]
        kept = self._kept[key] = self._costs.kept_after(request.turn, before)
        num_bytes = self._costs.kept_bytes(kept)
        if not num_bytes:
            self._tiers.drop(key)
            return
        clean = Kept(before.num_tokens, before.ends_in(kept))
        if self._is_measured(request):
            self._tally.stored(*self._costs.new_bytes(kept, clean))
        self._placement.policy.on_access(key, self._now_ns)
        self._placement.observe_size(self._costs.charge(num_bytes))
        self._placement.policy.on_resize(key, kept.num_tokens)
        self._tiers.store(key, num_bytes, self._costs.kept_bytes(clean), self._now_ns)
        if self._options.ttl_s is not None:
            self._deadlines_ns[key] = self._now_ns + round(self._options.ttl_s * NS_PER_S)
            self._ttl.schedule(key, self._deadlines_ns[key])

    def _turn(self, session: int) -> Turn:
        """Return the session's turn that waits, runs or is still to come."""
        return self._sessions[session].turns[self._next_turn[session]]

    def _wanted_bytes(self, key: SessionKey) -> int:
        """Return what is to be read of a session: all, while its next prompt is unknown."""
        num_bytes = self._tiers.num_bytes(key)
        if not num_bytes or not self._placement.is_busy(key):
            return num_bytes
        history_tokens = self._turn(int(key.session_id)).history_tokens
        loadable = self._costs.loadable(self._kept[key].within(history_tokens))
        return min(num_bytes, self._costs.loaded_bytes(loadable))

    def _parts_bytes(self, key: SessionKey) -> int:
        return self._costs.parts_bytes(self._kept[key])

    def _make_policy(self, context: PolicyContext) -> EvictionPolicy:
        if self._options.policy == BeladyPolicy.name:
            return BeladyPolicy(context, self._returns_ns)
        return POLICIES[self._options.policy](context)

    def _note_start(self) -> None:
        """Keep the mean interval between two starts, and the latest of them, as an engine does."""
        if self._started_ns is not None:
            passed_ns = self._now_ns - self._started_ns
            share = INTERVAL_SHARE if self._interval_ns else 1.0
            self._interval_ns += share * (passed_ns - self._interval_ns)
        self._started_ns = self._now_ns
        self._starts.note(self._now_ns)

    def _is_measured(self, request: _Request) -> bool:
        return request.number >= self._options.warmup_turns

    def _totals(self) -> Totals:
        """Return the counters of now."""
        return Totals(
            self._now_ns,
            self._gpu.busy_ns,
            self._gpu.prefill_ns,
            self._tiers.bytes_written,
            self._channel.bytes_read,
        )
