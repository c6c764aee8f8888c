"""Leases, statistics and verification as messages."""

from dataclasses import replace

from kvd.core.records.records import (
    EngineStats,
    LeaseInfo,
    QueueStats,
    ScrubReport,
    TenantUsage,
    TierStats,
)
from kvd.core.records.tier import Admission, Tier
from kvd.engines.attached import EngineInfo
from kvd.rpc.operator_messages import layout_stats_message, lease_message, verify_message
from kvd.tiers.arena import ArenaInfo
from kvd.tiers.segment_files import VolumeInfo
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.units import NS_PER_S
from tests.synthetic_engine import key_of, small_layout

LAYOUT = small_layout()
LEASE = LeaseInfo(7, "store", engine_id=11, key=key_of("a"), num_slots=3, since_ns=5 * NS_PER_S)
ENGINE = EngineInfo(11, "engine", 4321, "stopped", is_quarantined=True)
STATS = EngineStats(
    num_sessions=4,
    tiers=(TierStats(Tier.DRAM, 100, 50, 5), TierStats(Tier.SSD, 1000, 500, 9, "no space")),
    dirty_bytes=3,
    num_leases=2,
    num_orphan_leases=1,
    num_quarantined_slots=6,
    num_unverified=8,
    num_unhashed=1,
    num_soft_pins=10,
    num_hard_pins=20,
    num_retained=30,
    counters={"stores": 1},
)
QUEUE = QueueStats(5, 1, 3, 40, 1000)
VOLUME = VolumeInfo(is_direct=False, buffered_reason="no O_DIRECT", physical_bytes=600)


def test_a_lease_names_its_process():
    """A lease has its age, its bytes, and the known facts of its holder."""
    message = lease_message(LEASE, LAYOUT, ENGINE, now_ns=8 * NS_PER_S)
    assert (message.lease_id, message.kind, message.age_s) == (7, kvd_pb2.LEASE_KIND_STORE, 3.0)
    assert (message.num_slots, message.bytes) == (3, 3 * LAYOUT.block_bytes)
    assert (message.pid, message.process_status) == (4321, "stopped")
    assert message.session.session_id == "a"
    assert not message.quarantined


def test_a_lease_of_an_earlier_kvd_has_no_session():
    """An orphan found in the journal is quarantined; unknown fields stay empty."""
    orphan = replace(LEASE, key=None, is_orphan=True)
    message = lease_message(orphan, LAYOUT, None, now_ns=0)
    assert message.quarantined
    assert not message.HasField("session")
    assert (message.age_s, message.pid, message.engine_name) == (0.0, 0, "")


def test_stats_combine_the_core_and_its_tiers():
    """Both tiers have their allocated bytes, and tenants a quota or none."""
    arena = ArenaInfo(
        "ab", keep="file", pages="thp", epoch=3, num_adopted=2, is_prefaulted=True,
        physical_bytes=70,
    )  # fmt: skip
    tenants = (TenantUsage("a", 5, 0, 1), TenantUsage("b", 6, None, 2))
    message = layout_stats_message(
        STATS, LAYOUT, arena, VOLUME, Admission.WRITE_BACK, tenants, QUEUE
    )
    assert [tier.physical_bytes for tier in message.tiers] == [70, 600]
    assert [tier.degraded for tier in message.tiers] == [False, True]
    assert (message.orphan_leases, message.quarantined_slots) == (1, 6)
    assert (message.unverified_blocks, message.soft_pins, message.hard_pins) == (8, 10, 20)
    assert message.retained_sessions == 30
    assert (message.arena.keep, message.arena.pages, message.arena.adopted_blocks) == (
        "file",
        "thp",
        2,
    )
    assert (message.volume.direct, message.volume.admission) == (False, "write_back")
    assert (message.queue.waiting_jobs, message.queue.eviction_window) == (5, 40)
    assert [(t.has_quota, t.quota_bytes) for t in message.tenants] == [(True, 0), (False, 0)]


def test_stats_without_an_arena():
    """A layout without engines has no arena, and no allocated memory."""
    message = layout_stats_message(STATS, LAYOUT, None, VOLUME, Admission.ON_EVICT, (), QUEUE)
    assert not message.HasField("arena")
    assert message.tiers[0].physical_bytes == 0


def test_a_verification_is_reported_by_tier():
    """Every count of a report has its field."""
    report = ScrubReport(*range(1, 10))
    message = verify_message(report, "ff", 12, done=True)
    assert (message.dram.num_blocks, message.dram.bytes, message.dram.num_corrupt) == (1, 2, 3)
    assert (message.ssd.num_blocks, message.ssd.bytes, message.ssd.num_corrupt) == (4, 5, 6)
    assert (message.num_repaired, message.num_lost, message.num_errors) == (7, 8, 9)
    assert (message.done, message.layout, message.num_copies) == (True, "ff", 12)
