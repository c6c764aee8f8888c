"""DRAM and SSD as byte counts: which session is in which tier. Pure.

A session is in a tier as a whole, or not at all. `SessionPlacement.victims` chooses what makes
room, as in the daemon. The KV of running sessions is in the engine's memory: they hold nothing in
DRAM and, with exclusive tiers, nothing on SSD. With inclusive tiers a session is written to SSD
when it is stored, and stays there: later only new bytes are written.

A session that is being stored is a candidate for eviction itself: if it ranks below every session
that would have to make room, it is demoted at once, or is not kept.

Invariants (`check`): 1. the bytes of a tier are those of the sessions in it, and never above its
capacity (DRAM: without the watermark); 2. with exclusive tiers no session is in both, except while
it is read; 3. a session is in the policy's order of a tier exactly while it is in the tier.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvd.core.eviction.session_placement import SessionPlacement
from kvd.core.records.tier import Tier
from shared.types.session_key import SessionKey


@dataclass(slots=True)
class Held:
    """A session's place in the tiers.

    Attributes:
        num_bytes: bytes of the whole session.
        ssd_bytes: bytes of it on SSD; less than all only while DRAM or HBM has the rest.
        in_dram: all of it is in DRAM.
        is_running: it is in the engine's memory.
        is_reading: it is read from SSD, or a turn waits for that: it may not be moved.
        is_reserved: DRAM has room for a prefetch of it.
    """

    num_bytes: int
    ssd_bytes: int = 0
    in_dram: bool = False
    is_running: bool = False
    is_reading: bool = False
    is_reserved: bool = False


@dataclass(slots=True)
class TierCounts:
    """The bytes of one tier."""

    capacity_bytes: int
    used_bytes: int = 0


class Tiers:
    """The sessions in DRAM and on SSD.

    Args:
        placement: chooses victims.
        capacities: bytes of each tier.
        charge: returns the bytes of a tier that a session of so many bytes takes.
        are_exclusive: no session is in both tiers.
        watermark: share of DRAM that is kept free.
        on_evict: called with each session, and the time, before it is lost to make room.

    Attributes:
        bytes_written: bytes written to SSD.
    """

    def __init__(
        self,
        placement: SessionPlacement,
        capacities: dict[Tier, int],
        *,
        charge: Callable[[int], int],
        are_exclusive: bool,
        watermark: float,
        on_evict: Callable[[SessionKey, int], None] | None = None,
    ) -> None:
        self._on_evict = on_evict
        self._placement = placement
        self._policy = placement.policy
        self._charge = charge
        self._are_exclusive = are_exclusive
        self._sessions: dict[SessionKey, Held] = {}
        self._dram = TierCounts(int(capacities[Tier.DRAM] * (1 - watermark)))
        self._ssd = TierCounts(capacities[Tier.SSD])
        self.bytes_written = 0

    # ------------------------------------------------------------------------------------- queries

    def find(self, key: SessionKey) -> Tier | None:
        """Return the fastest tier that has the session; None: none has it."""
        held = self._sessions.get(key)
        if held is None or held.is_running:
            return None
        return Tier.DRAM if held.in_dram else Tier.SSD

    def num_bytes(self, key: SessionKey) -> int:
        """Return the bytes that are held of a session."""
        held = self._sessions.get(key)
        return held.num_bytes if held else 0

    def is_reading(self, key: SessionKey) -> bool:
        """Return whether the session is read from SSD, or will be."""
        held = self._sessions.get(key)
        return held is not None and held.is_reading

    def shares(self, part_bytes: Callable[[SessionKey], int]) -> dict[Tier, tuple[int, int]]:
        """Return for each tier the bytes of all sessions, and those of a part of each session.

        Args:
            part_bytes: returns the bytes of that part; it is the last part to leave a tier.
        """
        in_dram = in_ssd = of_dram = of_ssd = 0
        for key, held in self._sessions.items():
            part = part_bytes(key)
            if held.in_dram:
                in_dram += held.num_bytes
                of_dram += min(part, held.num_bytes)
            in_ssd += held.ssd_bytes
            of_ssd += min(part, held.ssd_bytes)
        return {Tier.DRAM: (in_dram, of_dram), Tier.SSD: (in_ssd, of_ssd)}

    # ------------------------------------------------------------------------------------- reading

    def reserve(self, key: SessionKey, now_ns: int) -> bool:
        """Reserve DRAM to prefetch a session, if sessions of a lower rank can make room.

        The caller owes `end_reading` if this returns True.
        """
        held = self._sessions[key]
        num_bytes = self._charge(held.num_bytes)
        held.is_reading = True  # so that the victims do not push it out of SSD
        if not self._make_dram_room(key, num_bytes, now_ns, giving_way_to=key):
            held.is_reading = False
            return False
        self._dram.used_bytes += num_bytes
        held.is_reserved = True
        return True

    def begin_reading(self, key: SessionKey) -> None:
        """Keep a session on SSD for a turn that waits for it; the caller owes `end_reading`."""
        self._sessions[key].is_reading = True

    def end_reading(self, key: SessionKey) -> None:
        """Record that a session was read; a prefetched one is in DRAM now."""
        held = self._sessions[key]
        held.is_reading = False
        if not held.is_reserved:
            return
        held.is_reserved = False
        held.in_dram = True
        self._policy.on_insert(key, Tier.DRAM)
        if self._are_exclusive:
            self._leave_ssd(key, held)

    # ------------------------------------------------------------------------- changes of a session

    def run(self, key: SessionKey) -> None:
        """Record that a session's KV is in the engine's memory; a read of it is given up."""
        held = self._sessions[key]
        held.is_reading = False
        self._leave_dram(key, held)
        if self._are_exclusive:
            self._leave_ssd(key, held)
            del self._sessions[key]
        else:
            held.is_running = True

    def store(self, key: SessionKey, num_bytes: int, clean_bytes: int, now_ns: int) -> None:
        """Store a session after its turn; the policy already knows of its use.

        `clean_bytes` of its bytes were held before the turn, and have not changed.
        """
        held = self._sessions.setdefault(key, Held(num_bytes))
        held.is_running = False
        held.num_bytes = num_bytes
        self._cut_ssd(key, held, clean_bytes)
        is_written = not self._are_exclusive and self._write(key, held, now_ns)
        if self._make_dram_room(key, self._charge(num_bytes), now_ns):
            self._dram.used_bytes += self._charge(num_bytes)
            held.in_dram = True
        else:
            self._policy.on_evict(key, Tier.DRAM)
            if not is_written and not self._write(key, held, now_ns):
                self._lose(key, now_ns)

    def drop(self, key: SessionKey) -> None:
        """Drop a session from both tiers."""
        held = self._sessions.pop(key, None)
        if held is not None:
            self._leave_dram(key, held)
            self._leave_ssd(key, held)
        self._policy.on_remove(key)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        dram_bytes = ssd_bytes = 0
        for key, held in self._sessions.items():
            in_dram = held.in_dram or held.is_reserved
            dram_bytes += in_dram * self._charge(held.num_bytes)
            ssd_bytes += self._ssd_charge(held)
            assert held.in_dram == self._policy.ranks(key, Tier.DRAM)
            assert bool(held.ssd_bytes) == self._policy.ranks(key, Tier.SSD)
            assert held.ssd_bytes <= held.num_bytes
            assert held.is_running or held.in_dram or held.ssd_bytes == held.num_bytes
            if self._are_exclusive and held.in_dram:
                assert not held.ssd_bytes
        assert dram_bytes == self._dram.used_bytes <= self._dram.capacity_bytes
        assert ssd_bytes == self._ssd.used_bytes <= self._ssd.capacity_bytes

    # ------------------------------------------------------------------------------------- leaving

    def _leave_dram(self, key: SessionKey, held: Held) -> None:
        if held.in_dram or held.is_reserved:
            self._dram.used_bytes -= self._charge(held.num_bytes)
        held.in_dram = held.is_reserved = False
        self._policy.on_evict(key, Tier.DRAM)

    def _leave_ssd(self, key: SessionKey, held: Held) -> None:
        self._ssd.used_bytes -= self._ssd_charge(held)
        held.ssd_bytes = 0
        self._policy.on_evict(key, Tier.SSD)

    def _cut_ssd(self, key: SessionKey, held: Held, clean_bytes: int) -> None:
        """Keep on SSD only bytes that still belong to the session."""
        kept_bytes = min(held.ssd_bytes, clean_bytes)
        self._leave_ssd(key, held)
        if kept_bytes:
            held.ssd_bytes = kept_bytes
            self._ssd.used_bytes += self._ssd_charge(held)
            self._policy.on_insert(key, Tier.SSD)

    def _ssd_charge(self, held: Held) -> int:
        return self._charge(held.ssd_bytes) if held.ssd_bytes else 0

    # ---------------------------------------------------------------------------------- making room

    def _make_dram_room(
        self,
        key: SessionKey,
        num_bytes: int,
        now_ns: int,
        *,
        giving_way_to: SessionKey | None = None,
    ) -> bool:
        """Evict sessions from DRAM to free that many bytes; if it fails, evict none."""
        missing_bytes = self._dram.used_bytes + num_bytes - self._dram.capacity_bytes
        victims = self._victims(Tier.DRAM, key, missing_bytes, now_ns, giving_way_to)
        if victims is None:
            return False
        for victim in victims:
            self._demote(victim, self._sessions[victim], now_ns)
        return True

    def _demote(self, key: SessionKey, held: Held, now_ns: int) -> None:
        """Move a session from DRAM to SSD; it is lost if SSD has no room for its rank."""
        self._leave_dram(key, held)
        if held.ssd_bytes == held.num_bytes or self._write(key, held, now_ns):
            self._placement.prefetching.reopen(key)
        else:
            self._lose(key, now_ns)

    def _write(self, key: SessionKey, held: Held, now_ns: int) -> bool:
        """Write a session to SSD; return False, unchanged, if it ranks below what is there."""
        self._policy.on_insert(key, Tier.SSD)
        more_bytes = self._charge(held.num_bytes) - self._ssd_charge(held)
        missing_bytes = self._ssd.used_bytes + more_bytes - self._ssd.capacity_bytes
        victims = self._victims(Tier.SSD, key, missing_bytes, now_ns, None)
        if victims is None:
            if not held.ssd_bytes:
                self._policy.on_evict(key, Tier.SSD)
            return False
        for victim in victims:
            self._evict_from_ssd(victim, self._sessions[victim], now_ns)
        self.bytes_written += held.num_bytes - held.ssd_bytes
        self._ssd.used_bytes += more_bytes
        held.ssd_bytes = held.num_bytes
        return True

    def _evict_from_ssd(self, key: SessionKey, held: Held, now_ns: int) -> None:
        self._leave_ssd(key, held)
        if not held.in_dram and not held.is_running:
            self._lose(key, now_ns)

    def _lose(self, key: SessionKey, now_ns: int) -> None:
        if self._on_evict is not None:
            self._on_evict(key, now_ns)
        self.drop(key)

    def _victims(
        self,
        tier: Tier,
        key: SessionKey,
        missing_bytes: int,
        now_ns: int,
        giving_way_to: SessionKey | None,
    ) -> list[SessionKey] | None:
        """Choose the sessions that make room for `key`; None: it ranks last, or is too large."""
        victims: list[SessionKey] = []
        if missing_bytes <= 0:
            return victims
        for victim in self._placement.policy.victims(tier, now_ns, giving_way_to=giving_way_to):
            if victim == key:
                return None
            held = self._sessions[victim]
            if held.is_reading:
                continue
            victims.append(victim)
            missing_bytes -= (
                self._charge(held.num_bytes) if tier is Tier.DRAM else (self._ssd_charge(held))
            )
            if missing_bytes <= 0:
                return victims
        return None
