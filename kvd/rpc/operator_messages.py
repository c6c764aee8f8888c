"""Messages for operators and monitors: leases, statistics, engines, settings, verification.

Instants of the core's and of the monotonic clock become durations from now (D17), as clients do not
share these clocks. Facts about processes are looked up here with psutil; everything else is encoded
from the arguments.
"""

import json
import time
from collections.abc import Iterable

import psutil

from kvd.caches.tenant_secrets import EncryptionInfo
from kvd.caches.unavailable import UnavailableLayout
from kvd.config import Settings, is_live
from kvd.core.records.records import (
    EngineStats,
    LeaseInfo,
    QueueStats,
    ScrubReport,
    TenantUsage,
    TierStats,
)
from kvd.core.records.tier import Admission, Tier
from kvd.core.state.session_history import Move
from kvd.engines.attached import Engine, EngineInfo
from kvd.tiers.arena import ArenaInfo
from kvd.tiers.segment_files import VolumeInfo
from shared.config.settings import LoadedSettings
from shared.kvd_client.messages import key_message, shown_id
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.process.dumps import may_be_dumped
from shared.serving.message_fields import MessageFields
from shared.types.kv_layout import KVLayout
from shared.types.units import NS_PER_S

MAX_COMMAND = 500  # characters of an engine's command line

_LEASE = MessageFields(
    LeaseInfo,
    pb.LeaseInfo,
    renamed={"is_orphan": "quarantined"},
    left_out=("engine_id", "key", "since_ns"),
    given=(
        *("session", "layout", "bytes", "age_s"),
        *("engine_id", "engine_name", "pid", "process_status"),
    ),
)
_LAYOUT = MessageFields(
    EngineStats,
    pb.LayoutStats,
    renamed={"num_unverified": "unverified_blocks", "num_retained": "retained_sessions"},
    left_out=("num_unhashed",),
    given=(
        *("layout", "model", "block_tokens", "block_bytes"),
        *("tiers", "arena", "volume", "tenants", "queue"),
    ),
)
_TIER = MessageFields(TierStats, pb.TierStats, given=("degraded", "physical_bytes"))
_ARENA = MessageFields(
    ArenaInfo,
    pb.ArenaStats,
    renamed={"num_adopted": "adopted_blocks"},
    left_out=("physical_bytes",),
)
_VOLUME = MessageFields(
    VolumeInfo, pb.VolumeStats, left_out=("physical_bytes",), given=("admission",)
)
_TENANT = MessageFields(TenantUsage, pb.TenantStats, given=("has_quota",))
_QUEUE = MessageFields(QueueStats, pb.QueueStats)
_ENCRYPTION = MessageFields(
    EncryptionInfo, pb.EncryptionStats, renamed={"is_sealing": "encrypting"}
)
_VERIFIED = MessageFields(
    ScrubReport,
    pb.VerifyProgress,
    renamed={"repaired": "num_repaired", "lost": "num_lost", "errors": "num_errors"},
    left_out=(
        *("dram_blocks", "dram_bytes", "dram_corrupt"),
        *("ssd_blocks", "ssd_bytes", "ssd_corrupt"),
    ),
    given=("done", "layout", "dram", "ssd", "num_copies"),
)
_MOVE = MessageFields(
    Move,
    pb.SessionMove,
    left_out=("first_ns", "last_ns"),
    given=("kind", "age_s", "duration_s"),
)


def lease_message(
    lease: LeaseInfo, layout: KVLayout, engine: EngineInfo | None, now_ns: int
) -> pb.LeaseInfo:
    """Encode a lease.

    Args:
        lease: the core's record of the lease.
        layout: layout of the leased slots.
        engine: engine that holds the lease; None if it is not known any more.
        now_ns: current time of the core's clock.
    """
    return _LEASE.encode(
        lease,
        session=None if lease.key is None else key_message(lease.key),
        layout=layout.fingerprint,
        bytes=lease.num_slots * layout.block_bytes,
        age_s=max(0.0, (now_ns - lease.since_ns) / NS_PER_S),
        engine_id=shown_id(lease.engine_id),
        engine_name=engine and engine.name,
        pid=engine and engine.pid,
        process_status=engine and engine.process_status,
    )


def history_messages(moves: Iterable[Move], now_ns: int) -> list[pb.SessionMove]:
    """Encode the history of a session; `now_ns` is the current time of the core's clock."""
    return [
        _MOVE.encode(
            move,
            kind=move.kind.value,
            age_s=max(0.0, (now_ns - move.last_ns) / NS_PER_S),
            duration_s=(move.last_ns - move.first_ns) / NS_PER_S,
        )
        for move in moves
    ]


def layout_stats_message(
    stats: EngineStats,
    layout: KVLayout,
    arena: ArenaInfo | None,
    volume: VolumeInfo,
    admission: Admission,
    tenants: Iterable[TenantUsage],
    queue: QueueStats,
) -> pb.LayoutStats:
    """Encode the statistics of a layout.

    Args:
        stats: statistics of the layout's cache engine.
        layout: the layout.
        arena: state of its arena; None: it has none, and the message is empty.
        volume: state of its volume.
        admission: write policy of the settings.
        tenants: usage of the tenants that store something.
        queue: statistics of the queues of all its engines.
    """
    physical_bytes = {
        Tier.DRAM: arena.physical_bytes if arena else 0,
        Tier.SSD: volume.physical_bytes,
    }
    return _LAYOUT.encode(
        stats,
        layout=layout.fingerprint,
        model=layout.model,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        tiers=[
            _TIER.encode(
                tier,
                degraded=bool(tier.degraded_reason),
                physical_bytes=physical_bytes[tier.tier],
            )
            for tier in stats.tiers
        ],
        arena=arena and _ARENA.encode(arena),
        volume=_VOLUME.encode(volume, admission=admission.value),
        tenants=[_TENANT.encode(t, has_quota=t.quota_bytes is not None) for t in tenants],
        queue=_QUEUE.encode(queue),
    )


def encryption_message(info: EncryptionInfo) -> pb.EncryptionStats:
    """Encode the state of encryption at rest."""
    return _ENCRYPTION.encode(info)


def unavailable_message(layout: UnavailableLayout, now_s: float) -> pb.UnavailableLayout:
    """Encode a layout that cannot be opened; `now_s` is the current monotonic time."""
    return pb.UnavailableLayout(
        layout=layout.row.fingerprint,
        why=layout.why,
        remedy=layout.remedy,
        since_s=now_s - layout.since_s,
        attempts=layout.num_attempts,
        next_attempt_s=max(0.0, layout.try_at_s - now_s),
    )


def verify_message(
    report: ScrubReport, layout: str, num_copies: int, *, done: bool
) -> pb.VerifyProgress:
    """Encode the progress of a verification of both tiers.

    Args:
        report: findings so far.
        layout: fingerprint of the layout that is being verified; "" at the end.
        num_copies: number of block copies to verify, as counted at the begin.
        done: whether the verification has ended.
    """
    dram = (report.dram_blocks, report.dram_bytes, report.dram_corrupt)
    ssd = (report.ssd_blocks, report.ssd_bytes, report.ssd_corrupt)
    return _VERIFIED.encode(
        report,
        done=done,
        layout=layout,
        dram=_verified_message(*dram),
        ssd=_verified_message(*ssd),
        num_copies=num_copies,
    )


def _verified_message(num_blocks: int, num_bytes: int, num_corrupt: int) -> pb.TierVerified:
    return pb.TierVerified(num_blocks=num_blocks, bytes=num_bytes, num_corrupt=num_corrupt)


def settings_message(loaded: LoadedSettings[Settings]) -> pb.GetSettingsResponse:
    """Encode the settings in force, without secrets."""
    values = loaded.values()
    settings = [
        pb.Setting(
            key=key, value=value, source=source, live=is_live(key), json=json.dumps(values[key])
        )
        for key, value, source in loaded.rows()
    ]
    file = "" if loaded.file is None else str(loaded.file.absolute())
    return pb.GetSettingsResponse(settings=settings, file=file)


def process_message() -> pb.ProcessStats:
    """Describe this process."""
    process = psutil.Process()
    with process.oneshot():
        times = process.cpu_times()
        return pb.ProcessStats(
            pid=process.pid,
            rss_bytes=process.memory_info().rss,
            open_files=process.num_fds(),
            threads=process.num_threads(),
            cpu_s=times.user + times.system,
            memory_available_bytes=psutil.virtual_memory().available,
            uptime_s=max(0.0, time.time() - process.create_time()),
            dumps=may_be_dumped(),
        )


def engine_message(engine: Engine, queue_jobs: int, running_jobs: int) -> pb.EngineInfo:
    """Describe an attached engine; facts about its process that kvd may not see stay empty.

    Args:
        engine: the engine.
        queue_jobs: number of its waiting requests, as it has reported them.
        running_jobs: number of its running requests.
    """
    message = pb.EngineInfo(
        engine_id=engine.shown_id,
        name=engine.name,
        layout=engine.cache.layout.fingerprint,
        pid=engine.identity.pid,
        attached_s=time.monotonic() - engine.since_s,
        queue_jobs=queue_jobs,
        running_jobs=running_jobs,
        version=engine.version,
    )
    try:
        process = psutil.Process(engine.identity.pid)
        message.command = " ".join(process.cmdline())[:MAX_COMMAND]
        message.rss_bytes = process.memory_info().rss
    except psutil.Error:
        pass  # the process is gone, in another namespace, or hidden from kvd's user
    return message
