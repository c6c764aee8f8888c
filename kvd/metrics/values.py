"""The values of kvd's metrics at a scrape, read from the parts that count them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from kvd.caches.caches import Caches
from kvd.config import Settings
from kvd.core.records.records import TenantUsage
from kvd.engines.attached import Engines
from kvd.engines.copiers import Copiers
from kvd.metrics.table import METRICS
from kvd.runtime.cache import Cache
from shared.config.reload import LiveSettings
from shared.serving.http_connections import ConnectionMetrics
from shared.serving.metric_export import MetricExporter, Scrape
from shared.serving.process_metrics import fill_connections, fill_process
from shared.serving.rpc_observer import RpcMetrics
from shared.version import __version__

LAYOUT_CHARS = 12  # of a fingerprint, as many as `kvd stats` shows


@dataclass(frozen=True)
class Sources:
    """The parts of the daemon whose counters are exported."""

    caches: Caches
    engines: Engines
    copiers: Copiers
    rpcs: RpcMetrics
    live: LiveSettings[Settings]
    connections: ConnectionMetrics


def make_exporter(sources: Sources) -> MetricExporter:
    """Return the exporter of kvd's table."""
    return MetricExporter(METRICS, partial(_fill, sources))


def _fill(sources: Sources, scrape: Scrape) -> None:
    scrape.put("kvd_build_info", 1, __version__)
    num_engines = Counter(engine.cache.layout.fingerprint for engine in sources.engines)
    for cache in sources.caches:
        layout = cache.layout.fingerprint[:LAYOUT_CHARS]
        scrape.put("kvd_layout_unavailable", 0, layout)
        scrape.put("kvd_engines", num_engines[cache.layout.fingerprint], layout)
        _fill_info(scrape, layout, cache, sources)
        _fill_counters(scrape, layout, cache)
        _fill_gauges(scrape, layout, cache, sources)
        _fill_histograms(scrape, layout, cache)
        usages = cache.act(lambda core: tuple(core.inspection.tenants))
        _fill_tenants(scrape, layout, usages, sources.live.loaded.settings.tenants)
    for unavailable in sources.caches.unavailable:
        scrape.put("kvd_layout_unavailable", 1, unavailable.row.fingerprint[:LAYOUT_CHARS])
    encryption = sources.caches.secrets.info()
    scrape.put("kvd_encryption", encryption.is_sealing, "encrypting")
    scrape.put("kvd_encryption", encryption.may_have_plain, "may_have_plain")
    scrape.put("kvd_encryption_tenants", encryption.num_tenants)
    _fill_copiers(scrape, sources.copiers)
    num_jobs, in_flight_bytes = sources.caches.io_load()
    scrape.put("kvd_index_queued_bytes", sources.caches.index_queued_bytes)
    scrape.put("kvd_io_queue_jobs", num_jobs)
    scrape.put("kvd_io_in_flight_bytes", in_flight_bytes)
    scrape.put_tally("kvd_rpcs_total", sources.rpcs.ended)
    scrape.put_tally("kvd_refused_calls_total", sources.rpcs.refused)
    scrape.put("kvd_tls_connections_unused_total", sources.rpcs.tls.count_unused())
    scrape.put_histogram("kvd_rpc_seconds", sources.rpcs.seconds)
    fill_connections("kvd", sources.connections, scrape)
    fill_process(scrape)


def _fill_copiers(scrape: Scrape, copiers: Copiers) -> None:
    done = copiers.totals()
    scrape.put("kvd_copiers", copiers.num_running)
    scrape.put("kvd_copiers_failed_total", copiers.num_failed)
    scrape.put("kvd_copier_jobs_total", done.jobs)
    scrape.put("kvd_copier_bytes_total", done.loaded_bytes, "load")
    scrape.put("kvd_copier_bytes_total", done.stored_bytes, "store")
    scrape.put("kvd_copier_locked_bytes", done.registered_bytes)


def _fill_info(scrape: Scrape, layout: str, cache: Cache, sources: Sources) -> None:
    arena, volume = cache.arena_info(sources.caches.keep), cache.volume.files.info()
    scrape.put(
        "kvd_layout_info",
        1,
        layout,
        cache.layout.model,
        str(cache.layout.block_tokens),
        sources.live.loaded.settings.ssd.admission.value,
        arena.keep if arena else "",
        arena.pages if arena else "",
        str(volume.is_direct).lower(),
    )


def _fill_counters(scrape: Scrape, layout: str, cache: Cache) -> None:
    counters = cache.stats().counters
    scrape.put_counters(counters, layout)
    misses = cache.act(lambda core: core.inspection.histograms).misses
    scrape.put_tally("kvd_load_misses_total", misses, layout)
    token_bytes = cache.layout.block_bytes // cache.layout.block_tokens
    loaded_tokens = counters["load_tokens_dram"] + counters["load_tokens_ssd"]
    scrape.put("kvd_moved_bytes_total", loaded_tokens * token_bytes, layout, "load")
    scrape.put("kvd_moved_bytes_total", counters["store_tokens"] * token_bytes, layout, "store")


def _fill_gauges(scrape: Scrape, layout: str, cache: Cache, sources: Sources) -> None:
    stats, arena = cache.stats(), cache.arena_info(sources.caches.keep)
    physical_bytes = {
        "dram": arena.physical_bytes if arena else 0,
        "ssd": cache.volume.files.info().physical_bytes,
    }
    for tier in stats.tiers:
        name = tier.tier.value
        scrape.put("kvd_tier_capacity_bytes", tier.capacity_bytes, layout, name)
        scrape.put("kvd_tier_used_bytes", tier.used_bytes, layout, name)
        scrape.put("kvd_tier_blocks", tier.num_blocks, layout, name)
        scrape.put("kvd_tier_physical_bytes", physical_bytes[name], layout, name)
        scrape.put("kvd_tier_surplus_bytes", tier.surplus_bytes, layout, name)
        scrape.put("kvd_tier_degraded", bool(tier.degraded_reason), layout, name)
    scrape.put("kvd_dirty_bytes", stats.dirty_bytes, layout)
    line, now_ns = cache.act(lambda core: (core.index_line, core.now_ns))
    num_late_uses = line.num_uses if line.are_uses_due(now_ns) else 0
    scrape.put("kvd_index_waiting_rows", len(line), layout, "row")
    scrape.put("kvd_index_waiting_rows", num_late_uses, layout, "use")
    scrape.put("kvd_unverified_blocks", stats.num_unverified, layout)
    scrape.put("kvd_unhashed_blocks", stats.num_unhashed, layout)
    scrape.put("kvd_sessions", stats.num_sessions, layout)
    scrape.put("kvd_pinned_sessions", stats.num_soft_pins, layout, "soft")
    scrape.put("kvd_pinned_sessions", stats.num_hard_pins, layout, "hard")
    scrape.put("kvd_retained_sessions", stats.num_retained, layout)
    kinds = Counter(lease.kind for lease in cache.act(lambda core: core.inspection.leases()))
    for kind in ("load", "store"):
        scrape.put("kvd_leases", kinds[kind], layout, kind)
    scrape.put("kvd_quarantined_leases", stats.num_orphan_leases, layout)
    scrape.put("kvd_quarantined_slots", stats.num_quarantined_slots, layout)
    queue = cache.act(lambda core: core.inspection.queue_stats())
    scrape.put("kvd_queue_waiting_jobs", queue.waiting_jobs, layout)
    scrape.put("kvd_queue_running_sessions", queue.running_sessions, layout)
    scrape.put("kvd_prefetch_window_jobs", queue.prefetch_window, layout)
    scrape.put("kvd_eviction_window_jobs", queue.eviction_window, layout)
    scrape.put("kvd_mean_session_bytes", queue.mean_session_bytes, layout)


def _fill_histograms(scrape: Scrape, layout: str, cache: Cache) -> None:
    histograms, io = cache.act(lambda core: core.inspection.histograms), cache.io_histograms
    for name, histogram in (
        ("kvd_load_seconds", histograms.load_s),
        ("kvd_store_seconds", histograms.store_s),
        ("kvd_fetch_wait_seconds", histograms.fetch_wait_s),
        ("kvd_rest_before_evict_seconds", histograms.rest_before_evict_s),
        ("kvd_gone_before_asked_seconds", histograms.gone_before_asked_s),
        ("kvd_load_wait_seconds", io.load_wait_s),
        ("kvd_read_seconds", io.read_s),
        ("kvd_write_seconds", io.write_s),
    ):
        scrape.put_histogram(name, histogram, layout)


def _fill_tenants(
    scrape: Scrape, layout: str, usages: tuple[TenantUsage, ...], named: Mapping[str, object]
) -> None:
    for usage in usages:
        if usage.tenant not in named:
            continue
        scrape.put("kvd_tenant_used_bytes", usage.used_bytes, layout, usage.tenant)
        scrape.put("kvd_tenant_sessions", usage.num_sessions, layout, usage.tenant)
        if usage.quota_bytes is not None:
            scrape.put("kvd_tenant_quota_bytes", usage.quota_bytes, layout, usage.tenant)
