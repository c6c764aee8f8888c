"""One server in virtual time: an engine, its queue, and kvd's placement over byte counts. Pure.

A turn takes a slot in the order of the queue, waits for its history if that is on SSD, is prefilled
(DRAM to HBM overlaps with it), decoded, and stored.

The daemon's own code decides about placement: SessionPlacement gets the queue as an engine reports
it, and is asked for victims, windows and prefetches.

The order of events at one moment: prefills end, then decodes, then reads. After each event, turns
start that can, and a prefetch may begin.

*Source:* the engine's constants follow CachedAttention §4.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from kvd.core.eviction.policies import POLICIES
from kvd.core.eviction.policy import EvictionPolicy, PolicyContext
from kvd.core.eviction.session_placement import SessionPlacement
from kvd.core.eviction.ttl import TtlClock
from kvd.core.operations.sessions import RECHECK_NS
from kvd.core.records.tier import Tier
from kvd.plan.belady import BeladyPolicy
from kvd.plan.channel import Channel, Transfer
from kvd.plan.gpu import Gpu, Prefill
from kvd.plan.hardware import Costs, Hardware, ReplayOptions
from kvd.plan.kept import NOTHING, Kept
from kvd.plan.moving import Mover, Stored
from kvd.plan.outcome import Totals
from kvd.plan.reading import Reading
from kvd.plan.tiers import Tiers
from kvd.plan.trace import Turn
from kvd.plan.turns import Pace, Request, Returns, plan_key
from shared.routing.session_router import ServerReport
from shared.types.load_choice import Traffic, loading_pays
from shared.types.queue_delta import QueueChange, QueuedRequests, RunningRequest
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

ENGINE = 1  # id of the only engine


class Server:
    """One server. An object serves one replay.

    Args:
        hardware, options: the machine, and assumptions about kvd and engine.
        costs: bytes and times of turns.
        returns_ns: when each session's KV is needed next, for a policy that knows the future.
        on_start: called with each turn that has got its slot.
        mover: moves sessions to and from the remote store; None: there is no store.
    """

    def __init__(
        self,
        hardware: Hardware,
        options: ReplayOptions,
        costs: Costs,
        returns_ns: Returns,
        on_start: Callable[["Server", Request], None],
        mover: Mover | None = None,
    ) -> None:
        self._hardware = hardware
        self._options = options
        self._costs = costs
        self._returns_ns = returns_ns
        self._on_start = on_start
        self._mover = mover
        self._kept: dict[SessionKey, Kept] = {}  # outdated where a session has left the tiers
        self._placement = SessionPlacement(
            self._make_policy, lambda: hardware.dram_bytes + hardware.ssd_bytes
        )
        self._report_queue = partial(self._placement.change_queue, ENGINE)
        self._tiers = Tiers(
            self._placement,
            {Tier.DRAM: hardware.dram_bytes, Tier.SSD: hardware.ssd_bytes},
            charge=costs.charge,
            are_exclusive=options.tiers == "exclusive",
            watermark=options.watermark,
            on_evict=mover.on_evict if mover else None,
        )
        self._gpu = Gpu()
        self._channel = Channel(hardware.ssd_bytes_per_s)
        self._reading = Reading(
            self._placement, self._tiers, self._channel, hardware.dram_bytes, self._wanted_bytes
        )
        self._ttl = TtlClock()
        self._deadlines_ns: dict[SessionKey, int] = {}
        self._now_ns = 0
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}  # by session
        self._turns: dict[SessionKey, Turn] = {}  # that wait or run
        self._pace = Pace()
        self._hbm_bytes = 0

    # -------------------------------------------------------------------------------------- queries

    @property
    def num_waiting(self) -> int:
        """Turns that wait for a slot."""
        return len(self._waiting)

    def totals(self, now_ns: int) -> Totals:
        """Return the counters at `now_ns`."""
        self._gpu.advance(now_ns)
        totals = Totals(
            now_ns,
            self._gpu.busy_ns,
            self._gpu.prefill_ns,
            self._tiers.bytes_written,
            self._channel.bytes_moved,
        )
        return totals if self._mover is None else totals.plus(self._mover.totals())

    def holds_in_dram(self, key: SessionKey) -> bool:
        """Return whether a session is in DRAM."""
        return self._tiers.find(key) is Tier.DRAM

    def shares(self) -> dict[Tier, tuple[int, int]]:
        """Return for each tier the bytes of sessions, and those of their states or windows."""
        return self._tiers.shares(self._parts_bytes)

    def report(self) -> ServerReport:
        """Return the server's report to a router of sessions."""
        return ServerReport(
            num_turns=len(self._turns),
            num_places=self._hardware.engine.slots,
            turn_s=self._pace.turn_s,
            compute_s=self._hardware.engine.prefill_s_per_token,
            starts_per_s=self._pace.starts.per_s(self._now_ns),
            fetch_s=self._mover.fetch_s if self._mover else None,
            stored_after_s=self._mover.stored_after_s if self._mover else 0.0,
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._tiers.check()
        self._placement.queue.check()

    # --------------------------------------------------------------------------------------- events

    def next_ns(self) -> int | None:
        """Return when the next event under way ends, or a push is due; None: never."""
        ends = [self._gpu.next_ns(), self._channel.next_ns()]
        if self._mover is not None:
            ends += self._mover.next_ns()
        return min((end for end in ends if end is not None), default=None)

    def expires_ns(self) -> int | None:
        """Return when the next TTL passes."""
        return self._ttl.next_deadline_ns()

    def supersede(self, key: SessionKey) -> None:
        """Record that another session continues in this one's place."""
        self._placement.policy.on_supersede(key)

    def forget(self, key: SessionKey) -> None:
        """Drop a session."""
        self._reading.cancel(key)
        self._tiers.drop(key)

    def arrive(self, request: Request, now_ns: int) -> None:
        """Queue a turn."""
        self._now_ns = now_ns
        key = request.key
        self._turns[key] = request.turn
        self._waiting.append(request)
        if self._mover is not None and self._tiers.find(key) is None:
            self._mover.fetch(request.session, request.turn.history_tokens, now_ns)
        waiting = QueuedRequests([(0, 0.0, request.number)], [key], [request.turn.history_tokens])
        self._report_queue(
            QueueChange(waiting=waiting, interval_ns=round(self._pace.interval_ns)), now_ns
        )
        self._settle()

    def step(self, now_ns: int) -> Request | None:
        """Let one thing end that is due now; return a turn that ended: `end` is owed for it."""
        self._now_ns = now_ns
        if (session := self._gpu.end_prefill(now_ns)) is not None:
            self._running[session].record.answered_ns = now_ns
        elif (session := self._gpu.end_decode(now_ns)) is not None:
            return self._running.pop(session)
        elif (read := self._channel.end(now_ns)) is not None:
            self._on_read_end(read)
        elif self._mover is not None:
            self._move(self._mover)
        self._settle()
        return None

    def _move(self, mover: Mover) -> None:
        """Push a session that is due, or take in a fetch that has ended."""
        if (due := mover.pop_due(self._now_ns)) is not None:
            if self._tiers.find(plan_key(due)) is not None:
                mover.push(due, self._now_ns)
        elif (fetched := mover.step(self._now_ns)) is not None:
            request = self._running.get(fetched)
            if request is not None and request.record.is_fetched:
                self._prefill(request)

    def drain(self, now_ns: int) -> None:
        """Push all sessions that were not pushed yet, and from now on each that is stored."""
        if self._mover is not None:
            self._mover.is_draining = True
            for session in self._mover.unpushed:
                if self._tiers.find(plan_key(session)) is not None:
                    self._mover.push(session, now_ns)

    def resume(self) -> None:
        """End a drain."""
        if self._mover is not None:
            self._mover.is_draining = False

    def abandon(self) -> list[Request]:
        """Return the turns that wait or run, for other servers: this server is lost."""
        return [*self._running.values(), *self._waiting]

    def end(self, request: Request, now_ns: int, *, is_last: bool) -> None:
        """Store the session of a turn that has ended, unless an engine would not."""
        self._now_ns = now_ns
        key = request.key
        self._hbm_bytes -= request.hbm_bytes
        del self._turns[key]
        self._pace.on_end(request.record.started_ns, now_ns)
        self._report_queue(QueueChange(left=[request.number]), now_ns)
        if self._options.load_policy != "never":
            self._keep(key, request, is_last=is_last)
        self._settle()

    def _keep(self, key: SessionKey, request: Request, *, is_last: bool) -> None:
        if is_last and self._options.end_hints:
            self._placement.policy.on_end(key)
            self._tiers.drop(key)  # an engine does not store a session's last turn
            return
        if request.turn.tools and self._options.tool_hints:  # before it is ranked to be stored
            self._placement.policy.on_await(key, request.turn.tools, self._now_ns)
        self._store(key, request)

    def expire(self, now_ns: int) -> None:
        """Drop sessions whose TTL has passed, except those with turns that wait or run."""
        self._now_ns = now_ns
        while (key := self._ttl.pop_due(self._now_ns)) is not None:
            deadline_ns = self._deadlines_ns[key]
            if deadline_ns > self._now_ns:
                self._ttl.schedule(key, deadline_ns)
            elif self._placement.is_busy(key):
                continue  # it gets another TTL when it is stored
            elif self._tiers.is_reading(key):
                self._ttl.schedule(key, self._now_ns + RECHECK_NS)
            else:
                self._tiers.drop(key)
        self._settle()

    # ------------------------------------------------------------------------------------- internal

    def _settle(self) -> None:
        """Start turns that can start, and prefetch."""
        while self._waiting and self._has_room(self._waiting[0]):
            self._start(self._waiting.popleft())
        self._reading.look_ahead(self._now_ns)

    def _start(self, request: Request) -> None:
        """Give a turn its slot, and load its history if that is held and loading pays."""
        self._pace.on_start(self._now_ns)
        key, record = request.key, request.record
        self._running[request.session] = request
        self._hbm_bytes += request.hbm_bytes
        self._report_queue(QueueChange(running=[RunningRequest(request.number, key)]), self._now_ns)
        record.started_ns = self._now_ns
        self._look_up(key, request)
        self._on_start(self, request)
        if record.is_fetched:
            self._begin_fetched(request)
        elif record.found_in is Tier.SSD and record.loaded_tokens:
            self._reading.demand(key, self._costs.loaded_bytes(record.loaded_tokens), self._now_ns)
        else:
            self._prefill(request)

    def _begin_fetched(self, request: Request) -> None:
        """Prefill a turn whose history has been fetched; otherwise it waits."""
        assert self._mover is not None
        fetch = self._mover.fetch_of(request.session, self._now_ns)
        assert fetch is not None
        if fetch.transfer.ends_ns <= self._now_ns:
            self._prefill(request)

    def _on_read_end(self, read: Transfer) -> None:
        """Record that a read has ended, for a turn or as a prefetch."""
        if self._reading.on_end(plan_key(read.session), read) and read.session in self._running:
            self._prefill(self._running[read.session])

    def _has_room(self, request: Request) -> bool:
        if len(self._running) >= self._hardware.engine.slots:
            return False
        hbm_bytes = self._hardware.hbm_bytes
        return (
            not hbm_bytes or not self._running or self._hbm_bytes + request.hbm_bytes <= hbm_bytes
        )

    def _look_up(self, key: SessionKey, request: Request) -> None:
        """Record where a turn's history is, and how many tokens of it to load."""
        turn, record = request.turn, request.record
        found_in = record.found_in = self._tiers.find(key)
        kept = NOTHING if found_in is None else self._kept[key].within(turn.history_tokens)
        self._kept[key] = kept
        fetch = self._mover.fetch_of(request.session, self._now_ns) if self._mover else None
        if fetch is not None:
            wait_ns = max(0, fetch.transfer.ends_ns - self._now_ns)
            if self._pays(turn, wait_ns, fetch.tokens):
                self._kept[key] = fetch.kept
                record.found_in = None  # what is held here may be gone when the fetch ends
                record.loaded_tokens, record.is_fetched = fetch.tokens, True
                return
        if not kept.num_tokens:
            record.found_in = None
            return
        tokens = self._costs.loadable(kept)
        record.lacks_part = not tokens
        wait_ns = 0
        if found_in is Tier.SSD:
            num_bytes = self._costs.loaded_bytes(tokens)
            wait_ns = self._reading.expected_ns(key, num_bytes, self._now_ns)
        if self._pays(turn, wait_ns, tokens):
            record.loaded_tokens = tokens

    def _pays(self, turn: Turn, wait_ns: int, tokens: int) -> bool:
        """Return whether loading so many tokens pays, by the engine's own rule."""
        if self._options.load_policy == "always":
            return True
        return loading_pays(
            wait_ns / NS_PER_S,
            self._costs.stall_ns(turn, tokens) / NS_PER_S,
            self._costs.compute_ns(tokens) / NS_PER_S,
            self._traffic(),
        )

    def _traffic(self) -> Traffic:
        return Traffic(
            num_waiting=len(self._waiting),
            num_loading=len(self._running) - 1 - self._gpu.num_turns,
            num_places=self._hardware.engine.slots,
            starts_per_s=self._pace.starts.per_s(self._now_ns),
            backlog_s=self._gpu.backlog_ns(self._now_ns) / NS_PER_S,
        )

    def _prefill(self, request: Request) -> None:
        """Queue a turn's prefill; a held session is loaded into the engine's memory, or dropped."""
        key, record = request.key, request.record
        self._reading.cancel(key)
        if self._mover is not None:
            self._mover.on_run(request.session)
            self._mover.drop_fetch(request.session)
        if record.found_in is None:
            self._tiers.drop(key)  # what is held is no part of this prompt
        else:
            self._tiers.run(key)
        prefill_ns = self._costs.prefill_ns(request.turn, record.loaded_tokens)
        decode_ns = self._costs.decode_ns(request.turn)
        self._gpu.add(Prefill(request.session, prefill_ns, decode_ns), self._now_ns)

    def _store(self, key: SessionKey, request: Request) -> None:
        before = self._kept[key]
        kept = self._kept[key] = self._costs.kept_after(request.turn, before)
        num_bytes = self._costs.kept_bytes(kept)
        if not num_bytes:
            self._tiers.drop(key)
            return
        clean = Kept(before.num_tokens, before.ends_in(kept))
        request.record.stored_bytes = self._costs.new_bytes(kept, clean)
        self._placement.policy.on_access(key, self._now_ns)
        self._placement.observe_size(self._costs.charge(num_bytes))
        self._placement.policy.on_resize(key, kept.num_tokens)
        expires_ns = None
        if self._options.ttl_s is not None:
            expires_ns = self._now_ns + round(self._options.ttl_s * NS_PER_S)
            self._deadlines_ns[key] = expires_ns
            self._ttl.schedule(key, expires_ns)
        if self._mover is not None:
            stored = Stored(kept, request.number, expires_ns)
            self._mover.on_store(request.session, stored, self._now_ns)
        self._tiers.store(key, num_bytes, self._costs.kept_bytes(clean), self._now_ns)

    def _wanted_bytes(self, key: SessionKey) -> int:
        """Return the bytes to read of a session: all while its next prompt is unknown."""
        num_bytes = self._tiers.num_bytes(key)
        if not num_bytes or not self._placement.is_busy(key):
            return num_bytes
        history_tokens = self._turns[key].history_tokens
        loadable = self._costs.loadable(self._kept[key].within(history_tokens))
        return min(num_bytes, self._costs.loaded_bytes(loadable))

    def _parts_bytes(self, key: SessionKey) -> int:
        return self._costs.parts_bytes(self._kept[key])

    def _make_policy(self, context: PolicyContext) -> EvictionPolicy:
        if self._options.policy == BeladyPolicy.name:
            return BeladyPolicy(context, self._returns_ns)
        return POLICIES[self._options.policy](context)
