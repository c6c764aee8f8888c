"""What operators see of a layout, as protobuf messages: statistics, leases, verification. Pure."""

from collections.abc import Iterable

from kvd.caches.tenant_secrets import EncryptionInfo
from kvd.caches.unavailable import UnavailableLayout
from kvd.core.records.records import (
    Admission,
    EngineStats,
    LeaseInfo,
    QueueStats,
    ScrubReport,
    TenantUsage,
    Tier,
    TierStats,
)
from kvd.engines.attached import OwnerFacts
from kvd.tiers.arena import ArenaInfo
from kvd.tiers.segment_files import VolumeInfo
from kvd.wire.messages import TIERS, key_message
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.engine_id import shown_id
from shared.types.kv_layout import KVLayout
from shared.types.units import NS_PER_S

_KINDS = {"load": kvd_pb2.LEASE_KIND_LOAD, "store": kvd_pb2.LEASE_KIND_STORE}


def lease_message(
    lease: LeaseInfo, layout: KVLayout, holder: OwnerFacts | None, now_ns: int
) -> kvd_pb2.LeaseInfo:
    """Encode; instants become durations from now (D17)."""
    message = kvd_pb2.LeaseInfo(
        lease_id=lease.lease_id,
        kind=_KINDS[lease.kind],
        layout=layout.fingerprint,
        num_slots=lease.num_slots,
        bytes=lease.num_slots * layout.block_bytes,
        age_s=max(0.0, (now_ns - lease.since_ns) / NS_PER_S),
        pending=lease.is_pending,
        quarantined=lease.is_orphan,
        engine_id=shown_id(lease.owner),
    )
    if lease.key is not None:
        message.session.CopyFrom(key_message(lease.key))
    if holder is not None:
        message.engine_name = holder.name
        message.pid = holder.pid
        message.process_status = holder.state
    return message


def unavailable_message(layout: UnavailableLayout, now_s: float) -> kvd_pb2.UnavailableLayout:
    """Encode; instants, of the monotonic clock, become durations from now."""
    return kvd_pb2.UnavailableLayout(
        layout=layout.fingerprint,
        why=layout.why,
        remedy=layout.remedy,
        since_s=now_s - layout.since_s,
        attempts=layout.num_attempts,
        next_attempt_s=max(0.0, layout.try_at_s - now_s),
    )


def layout_stats_message(
    stats: EngineStats,
    layout: KVLayout,
    arena: ArenaInfo | None,
    volume: VolumeInfo,
    admission: Admission,
    tenants: Iterable[TenantUsage],
    queue: QueueStats,
) -> kvd_pb2.LayoutStats:
    """Encode; without an arena (no engine yet) its message is empty."""
    physical_bytes = {
        Tier.DRAM: arena.physical_bytes if arena else 0,
        Tier.SSD: volume.physical_bytes,
    }
    return kvd_pb2.LayoutStats(
        layout=layout.fingerprint,
        model=layout.model,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        num_sessions=stats.num_sessions,
        tiers=[_tier_message(tier, physical_bytes[tier.tier]) for tier in stats.tiers],
        dirty_bytes=stats.dirty_bytes,
        leases=stats.num_leases,
        counters=stats.counters,
        orphan_leases=stats.num_orphan_leases,
        quarantined_slots=stats.num_quarantined_slots,
        unverified_blocks=stats.num_unverified,
        soft_pins=stats.num_soft_pins,
        hard_pins=stats.num_hard_pins,
        arena=_arena_message(arena) if arena else None,
        volume=kvd_pb2.VolumeStats(
            direct=volume.is_direct,
            buffered_reason=volume.buffered_reason,
            admission=admission.value,
        ),
        tenants=[
            kvd_pb2.TenantStats(
                tenant=usage.tenant,
                used_bytes=usage.used_bytes,
                quota_bytes=usage.quota_bytes or 0,
                has_quota=usage.quota_bytes is not None,
                num_sessions=usage.num_sessions,
            )
            for usage in tenants
        ],
        queue=kvd_pb2.QueueStats(
            waiting_jobs=queue.waiting_jobs,
            running_sessions=queue.running_sessions,
            prefetch_window=queue.prefetch_window,
            eviction_window=queue.eviction_window,
            mean_session_bytes=queue.mean_session_bytes,
        ),
    )


def encryption_message(info: EncryptionInfo) -> kvd_pb2.EncryptionStats:
    """Encode."""
    return kvd_pb2.EncryptionStats(
        key=info.key,
        encrypting=info.is_sealing,
        may_have_plain=info.may_have_plain,
        tenants=info.num_tenants,
    )


def verify_message(
    report: ScrubReport, layout: str, num_copies: int, *, done: bool
) -> kvd_pb2.VerifyProgress:
    """Encode."""
    return kvd_pb2.VerifyProgress(
        done=done,
        layout=layout,
        dram=kvd_pb2.TierVerified(
            num_blocks=report.dram_blocks,
            bytes=report.dram_bytes,
            num_corrupt=report.dram_corrupt,
        ),
        ssd=kvd_pb2.TierVerified(
            num_blocks=report.ssd_blocks, bytes=report.ssd_bytes, num_corrupt=report.ssd_corrupt
        ),
        num_copies=num_copies,
        num_repaired=report.repaired,
        num_lost=report.lost,
        num_errors=report.errors,
    )


def _tier_message(tier: TierStats, physical_bytes: int) -> kvd_pb2.TierStats:
    return kvd_pb2.TierStats(
        tier=TIERS[tier.tier],
        capacity_bytes=tier.capacity_bytes,
        used_bytes=tier.used_bytes,
        num_blocks=tier.num_blocks,
        degraded=bool(tier.degraded_reason),
        degraded_reason=tier.degraded_reason,
        physical_bytes=physical_bytes,
    )


def _arena_message(arena: ArenaInfo) -> kvd_pb2.ArenaStats:
    return kvd_pb2.ArenaStats(
        arena_id=arena.arena_id,
        keep=arena.keep,
        pages=arena.pages,
        epoch=arena.epoch,
        adopted_blocks=arena.num_adopted,
        prefaulted=arena.is_prefaulted,
    )
