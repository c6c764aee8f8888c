"""DRAM and SSD as byte counts: which session is where, whole or not at all. Pure.

Room is made by `SessionPlacement.victims`, as in the daemon. Sessions that run are in the engine's
memory: they hold nothing in DRAM and, with exclusive tiers, nothing on SSD. With inclusive tiers a
session is written to SSD when it is stored, and what was written stays: only new bytes are written.

A session that is stored is a candidate for eviction itself: if it is colder than whatever would
have to go for it, it goes down at once, or is not kept.

Invariants (`check`): 1. the bytes of a tier are those of the sessions in it, and never above its
capacity (DRAM: without the watermark); 2. with exclusive tiers no session is in both, except while
it is read; 3. a session is in the policy's order of a tier exactly while it is in the tier.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvd.core.eviction.session_placement import SessionPlacement
from kvd.core.records.records import Tier
from shared.types.session_key import SessionKey


@dataclass(slots=True)
class Held:
    """What is held of a session.

    Attributes:
        num_bytes: all of it.
        ssd_bytes: how many of these are on SSD; less than all only while DRAM or HBM has the rest.
        in_dram: whether all of it is in DRAM.
        is_reading: whether it is read from SSD, or a turn waits for that: nothing of it moves.
        is_reserved: DRAM keeps room for what is read ahead.
    """

    num_bytes: int
    ssd_bytes: int = 0
    in_dram: bool = False
    is_running: bool = False
    is_reading: bool = False
    is_reserved: bool = False


@dataclass(slots=True)
class TierCounts:
    """One tier's bytes."""

    capacity_bytes: int
    used_bytes: int = 0


class Tiers:
    """DRAM and SSD as byte counts: which session is where.

    Args:
        charge: how many bytes of a tier so many bytes of a session take.
        on_evict: told of each session that is lost to make room, before it is, and when.

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

    # ------------------------------------------------------------------------------------- looking

    def find(self, key: SessionKey) -> Tier | None:
        """Return the faster tier that a session is in; None: it is not held."""
        held = self._sessions.get(key)
        if held is None or held.is_running:
            return None
        return Tier.DRAM if held.in_dram else Tier.SSD

    def num_bytes(self, key: SessionKey) -> int:
        """Return what is held of a session."""
        held = self._sessions.get(key)
        return held.num_bytes if held else 0

    def is_reading(self, key: SessionKey) -> bool:
        """Whether the session is read from SSD, or to be read."""
        held = self._sessions.get(key)
        return held is not None and held.is_reading

    def shares(self, part_bytes: Callable[[SessionKey], int]) -> dict[Tier, tuple[int, int]]:
        """Add up for each tier the bytes of sessions, and those of a part of each.

        Args:
            part_bytes: how large that part of a session is; it is what leaves a tier last.
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
        """Make room in DRAM to read a session ahead, if only colder ones give way.

        The caller owes `end_reading`.
        """
        held = self._sessions[key]
        num_bytes = self._charge(held.num_bytes)
        held.is_reading = True  # so that what gives way does not push it out of SSD
        if not self._make_dram_room(key, num_bytes, now_ns, giving_way_to=key):
            held.is_reading = False
            return False
        self._dram.used_bytes += num_bytes
        held.is_reserved = True
        return True

    def begin_reading(self, key: SessionKey) -> None:
        """Hold a session on SSD for a turn that waits for it; the caller owes `end_reading`."""
        self._sessions[key].is_reading = True

    def end_reading(self, key: SessionKey) -> None:
        """Record that a session was read; what was read ahead is in DRAM now."""
        held = self._sessions[key]
        held.is_reading = False
        if not held.is_reserved:
            return
        held.is_reserved = False
        held.in_dram = True
        self._policy.on_insert(key, Tier.DRAM)
        if self._are_exclusive:
            self._leave_ssd(key, held)

    # ------------------------------------------------------------------------- a session's own life

    def run(self, key: SessionKey) -> None:
        """Record that a session's KV is in the engine's memory; a read of it is not waited for."""
        held = self._sessions[key]
        held.is_reading = False
        self._leave_dram(key, held)
        if self._are_exclusive:
            self._leave_ssd(key, held)
            del self._sessions[key]
        else:
            held.is_running = True

    def store(self, key: SessionKey, num_bytes: int, clean_bytes: int, now_ns: int) -> None:
        """Keep all of a session; its use is known to the policy already.

        Of its bytes, `clean_bytes` were held before the turn, and are the same now.
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
        """Keep nothing of a session."""
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
        """Keep on SSD only what is still part of the session."""
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
        """Have sessions leave DRAM until so much is free; False, and nothing moved: none may."""
        missing_bytes = self._dram.used_bytes + num_bytes - self._dram.capacity_bytes
        victims = self._victims(Tier.DRAM, key, missing_bytes, now_ns, giving_way_to)
        if victims is None:
            return False
        for victim in victims:
            self._demote(victim, self._sessions[victim], now_ns)
        return True

    def _demote(self, key: SessionKey, held: Held, now_ns: int) -> None:
        """Have a session leave DRAM; it is lost if SSD has colder room for it neither."""
        self._leave_dram(key, held)
        if held.ssd_bytes == held.num_bytes or self._write(key, held, now_ns):
            self._placement.prefetching.reopen(key)
        else:
            self._lose(key, now_ns)

    def _write(self, key: SessionKey, held: Held, now_ns: int) -> bool:
        """Have all of a session on SSD; False, and nothing moved: what is there is warmer."""
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
        """Choose the sessions that leave a tier for it; None: that one is last, or too large."""
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
