"""The table of all of kvd's metrics. Pure; kvd/metrics/values.py fills it at each scrape.

The label `layout` is the beginning of a layout's fingerprint, which `kvd_layout_info` explains;
there are few layouts (limits.max_layouts). Only tenants that the settings name are labels.
"""

from collections.abc import Mapping

from shared.serving.metric_export import Metric, MetricTable
from shared.serving.process_metrics import PROCESS_METRICS, connection_metrics


def _counter(
    name: str, explanation: str, *labels: str, counted: str | Mapping[str, str] | None = None
) -> Metric:
    """Return a counter per layout; `counted`: Metric.counters, or the name if it has no label."""
    names = {"": counted} if isinstance(counted, str) else counted or {}
    return Metric(name, "counter", explanation, ("layout", *labels), names)


def _gauge(name: str, explanation: str, *labels: str) -> Metric:
    return Metric(name, "gauge", explanation, ("layout", *labels))


def _histogram(name: str, explanation: str, *labels: str) -> Metric:
    return Metric(name, "histogram", explanation, ("layout", *labels))


METRICS = MetricTable(
    (
        Metric("kvd_build_info", "info", "The running release", ("version",)),
        Metric(
            "kvd_layout_info",
            "info",
            "Stored layouts, with their model and how their bytes are kept",
            ("layout", "model", "block_tokens", "admission", "arena_keep", "arena_pages", "direct"),
        ),
        # ------------------------------------------------------------------------------ loads
        _counter(
            "kvd_loads_total",
            "Loads by result; busy: no free slot to read into, to be repeated",
            "result",
            counted={"hit": "load_hits", "miss": "load_misses", "busy": "loads_busy"},
        ),
        _counter("kvd_load_misses_total", "Loads that found nothing, by reason", "reason"),
        _counter(
            "kvd_loaded_tokens_total",
            "Tokens whose KV was granted, by the tier where it was found",
            "tier",
            counted={"dram": "load_tokens_dram", "ssd": "load_tokens_ssd"},
        ),
        _counter(
            "kvd_loaded_states_total",
            "States of recurrent layers that were granted",
            counted="load_states",
        ),
        _counter(
            "kvd_loaded_windows_total",
            "Windows of blocks that were handed out, of layers that attend to the last tokens",
            counted="load_windows",
        ),
        _histogram("kvd_load_seconds", "From the grant of a load to its completion by the engine"),
        _histogram(
            "kvd_load_wait_seconds",
            "From the grant of a load to the arrival of the last block that it had to wait for",
        ),
        _counter(
            "kvd_fetch_waits_total",
            "Loads that waited for their session to be fetched from the remote store, by how that "
            "ended: fetched, absent (or it could not be), unanswered (nobody fetches), late "
            "(nothing came in time), partly (some of it did)",
            "result",
            counted={
                result: f"fetch_waits_{result}"
                for result in ("fetched", "absent", "unanswered", "late", "partly")
            },
        ),
        _histogram("kvd_fetch_wait_seconds", "How long they waited", "result"),
        # ----------------------------------------------------------------------------- stores
        _counter(
            "kvd_stores_total",
            "Stores by result; waited: no free slots, to be repeated",
            "result",
            counted={"stored": "stores", "refused": "stores_refused", "waited": "stores_waited"},
        ),
        _counter(
            "kvd_stored_tokens_total", "Tokens whose KV was published", counted="store_tokens"
        ),
        _counter(
            "kvd_stored_states_total",
            "States of recurrent layers that were published",
            counted="store_states",
        ),
        _counter(
            "kvd_stored_windows_total",
            "Windows of blocks that were published, of layers that attend to the last tokens",
            counted="store_windows",
        ),
        _histogram(
            "kvd_store_seconds", "From the grant of a store to its completion by the engine"
        ),
        # ------------------------------------------------------------------------------ tiers
        _gauge("kvd_tier_capacity_bytes", "Capacity of a tier", "tier"),
        _gauge("kvd_tier_used_bytes", "Used bytes of a tier", "tier"),
        _gauge("kvd_tier_blocks", "Blocks in a tier", "tier"),
        _gauge(
            "kvd_tier_physical_bytes",
            "Memory, or file system space, allocated for a tier",
            "tier",
        ),
        _gauge(
            "kvd_tier_surplus_bytes",
            "Bytes of a tier behind its end, after it was made smaller: their blocks are being "
            "moved before it, then the space is given back",
            "tier",
        ),
        _gauge(
            "kvd_tier_degraded",
            "1 while writes to a tier are suspended because its device is full or fails",
            "tier",
        ),
        _gauge(
            "kvd_layout_unavailable",
            "1 while a layout's stored blocks cannot be opened, so that its engines recompute",
        ),
        _gauge("kvd_dirty_bytes", "Bytes that are in DRAM only and would be lost with it"),
        _gauge(
            "kvd_unverified_blocks", "Blocks of an earlier kvd's DRAM that are not verified yet"
        ),
        _gauge(
            "kvd_unhashed_blocks", "Stored blocks without checksums, which a restart would lose"
        ),
        _counter(
            "kvd_moved_bytes_total",
            "Bytes moved: loaded from DRAM and stored in it by engines, read from SSD and written, "
            "copied within it (relocate) after it was made smaller",
            "move",
            counted={
                "read": "ssd_read_bytes",
                "write": "ssd_written_bytes",
                "relocate": "relocated_bytes",
            },
        ),
        _histogram(
            "kvd_read_seconds",
            "Time to read one block from SSD and verify it, by purpose",
            "purpose",
        ),
        _histogram("kvd_write_seconds", "Time to write one block to SSD durably"),
        Metric(
            "kvd_index_queued_bytes",
            "gauge",
            "Bytes of index entries that are not committed yet",
        ),
        _gauge(
            "kvd_index_waiting_rows",
            "Index entries for which that has no room: of blocks, sessions and their uses",
            "kind",
        ),
        Metric("kvd_io_queue_jobs", "gauge", "Jobs waiting for a thread of the I/O pool"),
        Metric("kvd_io_in_flight_bytes", "gauge", "Bytes of running I/O"),
        _counter(
            "kvd_io_errors_total",
            "Operations that failed, by kind",
            "operation",
            counted={"read": "read_errors", "write": "write_errors", "hash": "hash_errors"},
        ),
        _counter(
            "kvd_ssd_refused_blocks_total",
            "Blocks that found no room on SSD, and stay in DRAM only",
            counted="ssd_refused",
        ),
        # --------------------------------------------------------------------------- eviction
        _counter(
            "kvd_evicted_blocks_total",
            "Blocks evicted to make room, by what was short",
            "reason",
            counted={"dram": "evictions_dram", "ssd": "evictions_ssd", "quota": "evictions_quota"},
        ),
        _counter(
            "kvd_dropped_sessions_total",
            "Sessions dropped completely, by reason",
            "reason",
            counted={
                "evicted": "sessions_dropped",
                "expired": "sessions_expired",
                "flushed": "sessions_flushed",
            },
        ),
        _counter(
            "kvd_demoted_blocks_total",
            "Blocks written to SSD because their slot in DRAM was needed",
            counted="demotions",
        ),
        _histogram(
            "kvd_rest_before_evict_seconds",
            "How long a session had not been used when the last of it left a tier to make room",
            "tier",
        ),
        _histogram(
            "kvd_gone_before_asked_seconds",
            "How long ago a session had left a tier when it was asked for again: short is regret",
            "tier",
        ),
        # --------------------------------------------------------------------------- prefetch
        _counter(
            "kvd_prefetched_blocks_total",
            "Prefetched blocks, by result",
            "result",
            counted={
                "begun": "prefetch_blocks",
                "hit": "prefetch_hits",
                "late": "prefetch_late",
                "wasted": "prefetch_wasted",
            },
        ),
        _counter(
            "kvd_prefetched_tokens_total",
            "Tokens of prefetched blocks",
            counted="prefetch_tokens",
        ),
        _counter(
            "kvd_prefetch_cancelled_sessions_total",
            "Sessions whose turn left the queue before they were completely prefetched",
            counted="prefetch_cancelled",
        ),
        _gauge("kvd_queue_waiting_jobs", "Turns waiting in the engines' queues"),
        _gauge("kvd_queue_running_sessions", "Sessions with a running turn"),
        _gauge(
            "kvd_prefetch_window_jobs",
            "Look-ahead window of prefetching: sessions of mean size that fit in DRAM",
        ),
        _gauge(
            "kvd_eviction_window_jobs",
            "Look-ahead window of eviction: sessions of mean size that fit in both tiers",
        ),
        _gauge("kvd_mean_session_bytes", "Mean size of a session"),
        # -------------------------------------------------------------------------- integrity
        _counter(
            "kvd_corrupt_blocks_total",
            "Copies whose bytes were not the ones stored, by tier; they were misses",
            "tier",
            counted={"dram": "blocks_corrupt_dram", "ssd": "blocks_corrupt_ssd"},
        ),
        _counter(
            "kvd_corrupt_copies_total", "The same, in both tiers together", counted="blocks_corrupt"
        ),
        _counter(
            "kvd_verified_blocks_total",
            "Copies in DRAM that matched their checksums",
            counted="verified_blocks",
        ),
        _counter(
            "kvd_adopted_blocks_total",
            "Blocks adopted from an earlier kvd's DRAM",
            counted="adopted_blocks",
        ),
        Metric(
            "kvd_encryption",
            "gauge",
            "1 for what holds: SSD is written encrypted; blocks that are not may be there",
            ("state",),
        ),
        Metric("kvd_encryption_tenants", "gauge", "Tenants that have a key of their own"),
        # -------------------------------------------------------------------- leases, engines
        _gauge("kvd_leases", "Leases held by engines, by kind", "kind"),
        _gauge("kvd_quarantined_leases", "Stores of living processes that are no longer attached"),
        _gauge("kvd_quarantined_slots", "Slots of these stores"),
        _counter(
            "kvd_lost_leases_total",
            "Completions of leases that no longer existed",
            counted="leases_lost",
        ),
        _gauge("kvd_engines", "Attached engines"),
        Metric("kvd_copiers", "gauge", "Processes that copy for engines, one for each GPU"),
        Metric(
            "kvd_copiers_failed_total",
            "counter",
            "Copiers that died or were killed as stuck; their engines copied themselves",
        ),
        Metric("kvd_copier_jobs_total", "counter", "Copies requested from copiers"),
        Metric(
            "kvd_copier_bytes_total",
            "counter",
            "Bytes copied by copiers: loaded to GPUs, stored from them",
            ("way",),
        ),
        Metric("kvd_copier_locked_bytes", "gauge", "Memory of slots locked for GPUs"),
        # --------------------------------------------------------------------------- sessions
        _gauge("kvd_sessions", "Stored sessions"),
        _gauge("kvd_pinned_sessions", "Pinned sessions", "pin"),
        _gauge("kvd_retained_sessions", "Retained sessions"),
        _counter(
            "kvd_sessions_wanted_total",
            "Sessions that turns waited for and kvd did not have, or not all of: asked for at the "
            "remote store",
            counted="sessions_wanted",
        ),
        _counter(
            "kvd_retentions_total",
            "Retentions requested by clients, counted for each turn",
            counted="retentions",
        ),
        _counter(
            "kvd_retentions_cut_total",
            "Of these, those shortened by settings or TTLs, perhaps to nothing",
            counted="retentions_cut",
        ),
        _counter(
            "kvd_awaits_total",
            "Answers that call tools, as engines said: their sessions are back when those answer",
            counted="awaits",
        ),
        _counter(
            "kvd_supersedes_total",
            "Sessions in whose place others went on, as engines said: they go first",
            counted="supersedes",
        ),
        _counter(
            "kvd_returns_total",
            "Turns that arrived of sessions stored before, by where all of the session was, or the "
            "farthest of it; gone: in no tier, as far as kvd remembers",
            "where",
            counted={"dram": "returns_dram", "ssd": "returns_ssd", "gone": "returns_gone"},
        ),
        _counter(
            "kvd_tool_returns_total",
            "Of these, turns of sessions that awaited tools",
            "where",
            counted={
                "dram": "tool_returns_dram",
                "ssd": "tool_returns_ssd",
                "gone": "tool_returns_gone",
            },
        ),
        _gauge(
            "kvd_tenant_used_bytes",
            "What a tenant that the settings name stores, as its quota counts it",
            "tenant",
        ),
        _gauge("kvd_tenant_quota_bytes", "Its quota, if set", "tenant"),
        _gauge("kvd_tenant_sessions", "Its sessions", "tenant"),
        _counter(
            "kvd_discards_total",
            "Discards of tokens of stored sessions",
            counted="discards",
        ),
        _counter(
            "kvd_discarded_tokens_total",
            "Stored tokens dropped by discards",
            counted="discarded_tokens",
        ),
        _counter(
            "kvd_grafts_total",
            "Grafts: KV of another session added to a session",
            counted="grafts",
        ),
        _counter("kvd_grafted_tokens_total", "Tokens added by grafts", counted="grafted_tokens"),
        _counter(
            "kvd_compactions_total",
            "Compactions of sessions after discards, by result",
            "result",
            counted={"done": "compactions", "given_up": "compactions_given_up"},
        ),
        _counter(
            "kvd_compacted_tokens_total",
            "Tokens whose KV was compacted",
            counted="compacted_tokens",
        ),
        _counter(
            "kvd_compacted_blocks_total",
            "Blocks written by compactions",
            counted="compacted_blocks",
        ),
        # ------------------------------------------------------------------------------- RPCs
        Metric(
            "kvd_refused_calls_total",
            "counter",
            "Refused callers, by reason and by their name in the settings",
            ("reason", "client"),
        ),
        Metric(
            "kvd_tls_connections_unused_total",
            "counter",
            "TLS connections for gRPC without a call in 15 s: handshakes that failed, mostly",
        ),
        Metric("kvd_rpcs_total", "counter", "Calls by method and status", ("method", "code")),
        Metric(
            "kvd_rpc_seconds",
            "histogram",
            "Duration of calls, except streams without an end",
            ("method",),
        ),
        *connection_metrics("kvd"),
        *PROCESS_METRICS,
    )
)
