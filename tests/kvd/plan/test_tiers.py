"""DRAM and SSD as byte counts: which sessions move where, and which bytes are written."""

import pytest

from kvd.core.eviction.policies import POLICIES
from kvd.core.eviction.session_placement import SessionPlacement
from kvd.core.records.tier import Tier
from kvd.plan.tiers import Tiers
from shared.types.queue_delta import QueuedRequest
from shared.types.session_key import SessionKey
from tests.queue_changes import queue_change

A, B, C, D = (SessionKey("t", "m", name) for name in "ABCD")


class Shelf:
    """Tiers with a policy, and stores that are reported to it."""

    def __init__(self, dram: int, ssd: int, *, policy="lru", exclusive=True, watermark=0.0):
        self.placement = SessionPlacement(POLICIES[policy], lambda: dram + ssd)
        self.tiers = Tiers(
            self.placement,
            {Tier.DRAM: dram, Tier.SSD: ssd},
            charge=lambda num_bytes: num_bytes,
            are_exclusive=exclusive,
            watermark=watermark,
        )
        self.now_ns = 0

    def store(self, key: SessionKey, num_bytes: int, clean_bytes: int = 0) -> None:
        self.now_ns += 1
        self.placement.policy.on_access(key, self.now_ns)
        self.tiers.store(key, num_bytes, clean_bytes, self.now_ns)
        self.tiers.check()

    def queue(self, *keys: SessionKey) -> None:
        waiting = [QueuedRequest((0, 0.0, number), key) for number, key in enumerate(keys)]
        self.placement.replace_queue(1, queue_change(waiting=waiting), self.now_ns)

    def where(self, *keys: SessionKey) -> list[Tier | None]:
        return [self.tiers.find(key) for key in keys]


def test_the_coldest_session_is_demoted_and_then_dropped():
    """DRAM holds two, SSD one: the fourth store drops the first session."""
    shelf = Shelf(20, 10)
    for key in (A, B, C):
        shelf.store(key, 10)
    assert shelf.where(A, B, C) == [Tier.SSD, Tier.DRAM, Tier.DRAM]
    shelf.store(D, 10)
    assert shelf.where(A, B, C, D) == [None, Tier.SSD, Tier.DRAM, Tier.DRAM]
    assert shelf.tiers.bytes_written == 20


def test_a_session_too_large_for_dram_goes_to_ssd_and_evicts_nothing():
    """A session that fits nowhere is not stored, and nothing is evicted for it."""
    shelf = Shelf(20, 30)
    shelf.store(A, 10)
    shelf.store(B, 25)
    assert shelf.where(A, B) == [Tier.DRAM, Tier.SSD]
    shelf.store(C, 31)
    assert shelf.where(A, B, C) == [Tier.DRAM, Tier.SSD, None]


def test_a_running_session_holds_nothing_with_exclusive_tiers():
    """Its room in either tier is free until it is stored again."""
    shelf = Shelf(10, 10)
    shelf.store(A, 10)
    shelf.store(B, 10)
    assert shelf.where(A, B) == [Tier.SSD, Tier.DRAM]
    for key in (A, B):
        shelf.tiers.run(key)
        shelf.tiers.check()
    assert shelf.where(A, B) == [None, None]
    shelf.store(C, 10)
    shelf.store(D, 10)
    assert shelf.tiers.bytes_written == 20


def test_inclusive_tiers_keep_written_bytes():
    """A session leaves DRAM without a write, and one that grew writes its new bytes."""
    shelf = Shelf(10, 30, exclusive=False)
    shelf.store(A, 8)
    shelf.store(B, 8)
    assert (shelf.where(A, B), shelf.tiers.bytes_written) == ([Tier.SSD, Tier.DRAM], 16)
    shelf.tiers.run(A)
    assert shelf.tiers.find(A) is None  # the engine has it
    shelf.tiers.check()
    shelf.store(A, 10, clean_bytes=8)
    assert (shelf.where(A, B), shelf.tiers.bytes_written) == ([Tier.DRAM, Tier.SSD], 18)
    shelf.tiers.run(A)
    shelf.store(A, 9, clean_bytes=4)  # its history was cut
    assert shelf.tiers.bytes_written == 23


def test_a_copy_on_ssd_may_go_while_dram_has_the_session():
    """SSD for one session: each is written when it is stored, and the last one stays there."""
    shelf = Shelf(20, 10, exclusive=False)
    shelf.store(A, 10)
    shelf.store(B, 10)
    assert shelf.where(A, B) == [Tier.DRAM, Tier.DRAM]
    shelf.store(C, 10)  # A leaves DRAM; on SSD it is colder than C
    assert shelf.where(A, B, C) == [None, Tier.DRAM, Tier.DRAM]


@pytest.mark.parametrize("exclusive", [True, False])
def test_reading_ahead_evicts_only_what_is_needed_later(exclusive):
    """The head of the queue evicts its tail, and not vice versa."""
    shelf = Shelf(10, 30, policy="lookahead_queue", exclusive=exclusive)
    shelf.store(A, 10)
    shelf.store(B, 10)
    assert shelf.where(A, B) == [Tier.SSD, Tier.DRAM]
    shelf.queue(B, A)
    assert not shelf.tiers.reserve(A, shelf.now_ns)
    assert not shelf.tiers.is_reading(A)
    shelf.queue(A, B)
    assert shelf.tiers.reserve(A, shelf.now_ns)
    shelf.tiers.check()
    assert (shelf.where(A, B), shelf.tiers.is_reading(A)) == ([Tier.SSD, Tier.SSD], True)
    shelf.tiers.end_reading(A)
    shelf.tiers.check()
    assert shelf.where(A, B) == [Tier.DRAM, Tier.SSD]


def test_a_session_being_read_is_not_evicted():
    """A turn waits for it: it stays on SSD, though it is the coldest there."""
    shelf = Shelf(10, 20)
    for key in (A, B, C):
        shelf.store(key, 10)
    shelf.tiers.begin_reading(A)
    shelf.store(D, 10)
    assert shelf.where(A, B, C, D) == [Tier.SSD, None, Tier.SSD, Tier.DRAM]
    shelf.tiers.end_reading(A)
    shelf.tiers.run(A)
    shelf.tiers.check()
    assert shelf.tiers.find(A) is None


def test_the_room_of_a_cancelled_read_is_freed():
    """A turn that starts before its session is read, and computes instead, leaves nothing."""
    shelf = Shelf(10, 20, policy="lookahead_queue")
    shelf.store(A, 10)
    shelf.store(B, 10)
    shelf.queue(A)
    assert shelf.tiers.reserve(A, shelf.now_ns)
    shelf.tiers.run(A)
    shelf.tiers.check()
    shelf.store(C, 10)
    assert shelf.where(A, B, C) == [None, Tier.SSD, Tier.DRAM]


def test_a_stored_session_that_is_the_coldest_is_evicted_itself():
    """With DRAM and SSD full of waiting sessions, an idle one is not kept."""
    shelf = Shelf(10, 10, policy="lookahead_queue")
    shelf.store(A, 10)
    shelf.store(B, 10)
    shelf.queue(A, B)
    shelf.store(C, 10)
    assert shelf.where(A, B, C) == [Tier.SSD, Tier.DRAM, None]
    shelf.tiers.drop(A)
    shelf.store(C, 10)
    assert shelf.where(A, B, C) == [None, Tier.DRAM, Tier.SSD]


def test_the_watermark_stays_free():
    """A quarter of DRAM stays free."""
    shelf = Shelf(40, 100, watermark=0.25)
    for key in (A, B, C, D):
        shelf.store(key, 10)
    assert shelf.where(A, B, C, D) == [Tier.SSD, Tier.DRAM, Tier.DRAM, Tier.DRAM]
