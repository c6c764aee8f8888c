"""Replay of a daemon's recent turns at the times at which they happened: open loop. Pure.

Each turn waits, runs and is stored when it did. Only the content of the tiers is simulated, by the
daemon's own SessionPlacement. So a hit does not shorten anything, and the queue is as long as it
was. Sessions are in a tier as a whole or not at all. Tiers are inclusive: what SSD has, it keeps. A
session that a turn needs from SSD is read in no time; a prefetch takes the SSD's time.

At one moment turns are handled in the order in which they started.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvd.core.eviction.policies import POLICIES
from kvd.core.eviction.session_placement import SessionPlacement
from kvd.core.eviction.ttl import TtlClock
from kvd.core.records.tier import Tier
from kvd.core.state.turn_log import RecordedTurn
from kvd.plan.channel import Channel
from kvd.plan.reading import Reading
from kvd.plan.tiers import Tiers
from shared.types.queue_delta import QueueChange, QueuedRequests, RunningRequest
from shared.types.session_key import SessionKey
from shared.types.units import ceil_div

ENGINE = 1  # id of the only engine
ARRIVES, STARTS, ENDS = range(3)


@dataclass(frozen=True, slots=True)
class ObservedCache:
    """The cache of one layout in a daemon.

    Attributes:
        ttl_ns: None: sessions do not expire.
        ssd_bytes_per_s: bandwidth of reads; the daemon does not report it, so this is a guess.
    """

    block_tokens: int
    block_bytes: int
    dram_bytes: int
    ssd_bytes: int
    policy: str
    ttl_ns: int | None = None
    ssd_bytes_per_s: float = 5e9

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a tier that so many tokens take."""
        return ceil_div(num_tokens, self.block_tokens) * self.block_bytes


@dataclass(slots=True)
class Found:
    """The history that a turn would have found.

    Attributes:
        tokens: its tokens, all that the turn wanted or none.
        tier: the tier that has it; None: none.
    """

    tokens: int = 0
    tier: Tier | None = None


class _Event(NamedTuple):
    """An event of a turn."""

    at_ns: int
    turn_index: int
    kind: int


def replay_recorded(
    turns: Sequence[RecordedTurn], cache: ObservedCache, dram_bytes: int, ssd_bytes: int
) -> list[Found]:
    """Return what each turn would have found with tiers of these sizes, empty at first."""
    return _RecordedReplay(turns, cache, dram_bytes, ssd_bytes).run()


class _RecordedReplay:
    """One replay of recorded turns."""

    def __init__(
        self, turns: Sequence[RecordedTurn], cache: ObservedCache, dram_bytes: int, ssd_bytes: int
    ) -> None:
        self._turns = turns
        self._cache = cache
        self._placement = SessionPlacement(POLICIES[cache.policy], lambda: dram_bytes + ssd_bytes)
        self._report_queue = partial(self._placement.change_queue, ENGINE)
        self._tiers = Tiers(
            self._placement,
            {Tier.DRAM: dram_bytes, Tier.SSD: ssd_bytes},
            charge=lambda num_bytes: num_bytes,
            are_exclusive=False,
            watermark=0.0,
        )
        self._keys = {turn.session: _key_of(turn) for turn in turns}
        self._ttl = TtlClock()
        self._deadlines_ns: dict[SessionKey, int] = {}
        self._ssd = Channel(cache.ssd_bytes_per_s)
        self._reading = Reading(
            self._placement, self._tiers, self._ssd, dram_bytes, self._tiers.num_bytes
        )
        self._interval_ns = _mean_interval_ns(turns)
        self._found = [Found() for _ in turns]
        self._now_ns = 0

    def run(self) -> list[Found]:
        """Process all events in order."""
        for event in _events(self._turns):
            self._catch_up(event.at_ns)
            self._now_ns = event.at_ns
            turn = self._turns[event.turn_index]
            if event.kind == ARRIVES:
                self._arrive(event.turn_index, turn)
            elif event.kind == STARTS:
                self._start(event.turn_index, turn)
            else:
                self._end(event.turn_index, turn)
            self._reading.look_ahead(self._now_ns)
        return self._found

    def _catch_up(self, until_ns: int) -> None:
        """Process reads that end, and TTLs that pass, before `until_ns`."""
        while True:
            times = [
                t for t in (self._ssd.next_ns(), self._ttl.next_deadline_ns()) if t is not None
            ]
            if not times or min(times) >= until_ns:
                return
            self._now_ns = max(self._now_ns, min(times))
            read = self._ssd.end(self._now_ns)
            if read is None:
                self._expire()
            else:
                self._reading.on_end(self._keys[read.session], read)
            self._reading.look_ahead(self._now_ns)

    def _arrive(self, index: int, turn: RecordedTurn) -> None:
        key = self._keys[turn.session]
        waiting = QueuedRequests([(0, 0.0, index)], [key], [turn.wanted_tokens])
        self._report_queue(
            QueueChange(waiting=waiting, interval_ns=self._interval_ns), self._now_ns
        )

    def _start(self, index: int, turn: RecordedTurn) -> None:
        key = self._keys[turn.session]
        self._report_queue(QueueChange(running=[RunningRequest(index, key)]), self._now_ns)
        found = self._found[index]
        found.tier = self._tiers.find(key)
        if found.tier is not None:
            found.tokens = turn.wanted_tokens
        self._reading.cancel(key)
        if self._tiers.num_bytes(key):
            self._tiers.run(key)

    def _end(self, index: int, turn: RecordedTurn) -> None:
        key, cache = self._keys[turn.session], self._cache
        self._report_queue(QueueChange(left=[index]), self._now_ns)
        num_bytes = cache.num_bytes(turn.stored_tokens)
        if not num_bytes:
            return
        policy = self._placement.policy
        policy.on_access(key, self._now_ns)
        self._placement.observe_size(num_bytes)
        policy.on_resize(key, turn.stored_tokens)
        self._tiers.store(key, num_bytes, cache.num_bytes(turn.wanted_tokens), self._now_ns)
        if turn.is_ended:
            policy.on_end(key)
        if cache.ttl_ns is not None:
            self._deadlines_ns[key] = self._now_ns + cache.ttl_ns
            self._ttl.schedule(key, self._deadlines_ns[key])

    def _expire(self) -> None:
        while (key := self._ttl.pop_due(self._now_ns)) is not None:
            if self._deadlines_ns[key] > self._now_ns:
                self._ttl.schedule(key, self._deadlines_ns[key])
            elif not self._placement.is_busy(key) and not self._tiers.is_reading(key):
                self._tiers.drop(key)


def _key_of(turn: RecordedTurn) -> SessionKey:
    return SessionKey("observed", "observed", str(turn.session))


def _events(turns: Sequence[RecordedTurn]) -> Iterator[_Event]:
    """Return the events by time. A turn starts only after its session's previous turn has ended."""
    events = []
    ended_ns: dict[int, int] = {}
    for index, turn in enumerate(turns):
        started_ns = max(turn.started_ns, ended_ns.get(turn.session, 0))
        ended_ns[turn.session] = max(turn.ended_ns, started_ns)
        events.append(_Event(min(turn.arrived_ns, started_ns), index, ARRIVES))
        events.append(_Event(started_ns, index, STARTS))
        events.append(_Event(ended_ns[turn.session], index, ENDS))
    return iter(sorted(events))


def _mean_interval_ns(turns: Sequence[RecordedTurn]) -> int:
    """Return the mean time between two starts."""
    if len(turns) < 2:
        return 0
    return max(0, turns[-1].started_ns - turns[0].started_ns) // (len(turns) - 1)
