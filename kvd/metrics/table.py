"""The one table of kvd's metrics. Pure; kvd/metrics/values.py fills it at each scrape.

`layout` is the first characters of a layout's fingerprint, which `kvd_layout_info` explains; there
are few of them (limits.max_layouts). A tenant is a label only if the settings name it.
"""

from shared.serving.metric_table import Metric, MetricTable
from shared.serving.process_metrics import PROCESS_METRICS, connection_metrics

LAYOUT = ("layout",)

METRICS = MetricTable(
    (
        Metric("kvd_build_info", "info", "What runs", ("version",)),
        Metric(
            "kvd_layout_info",
            "info",
            "The layouts that are stored, with their model and how their bytes are kept",
            ("layout", "model", "block_tokens", "admission", "arena_keep", "arena_pages", "direct"),
        ),
        # ------------------------------------------------------------------------------ loads
        Metric(
            "kvd_loads_total",
            "counter",
            "Loads by what was found; busy ones found no slot to read into, and are asked again",
            ("layout", "result"),
            {"hit": "load_hits", "miss": "load_misses", "busy": "loads_busy"},
        ),
        Metric(
            "kvd_load_misses_total",
            "counter",
            "Loads that found nothing, by reason",
            ("layout", "reason"),
        ),
        Metric(
            "kvd_loaded_tokens_total",
            "counter",
            "Tokens whose KV was handed out, by the tier where it was found",
            ("layout", "tier"),
            {"dram": "load_tokens_dram", "ssd": "load_tokens_ssd"},
        ),
        Metric(
            "kvd_load_seconds",
            "histogram",
            "From the grant of a load to its completion by the engine",
            LAYOUT,
        ),
        Metric(
            "kvd_load_wait_seconds",
            "histogram",
            "From the grant of a load to the arrival of the last block that it had to wait for",
            LAYOUT,
        ),
        # ----------------------------------------------------------------------------- stores
        Metric(
            "kvd_stores_total",
            "counter",
            "Stores by how they were answered; those that wait for slots are asked again",
            ("layout", "result"),
            {"stored": "stores", "refused": "stores_refused", "waited": "stores_waited"},
        ),
        Metric(
            "kvd_stored_tokens_total",
            "counter",
            "Tokens whose KV was published",
            LAYOUT,
            {"": "store_tokens"},
        ),
        Metric(
            "kvd_store_seconds",
            "histogram",
            "From the grant of a store to its completion by the engine",
            LAYOUT,
        ),
        # ------------------------------------------------------------------------------ tiers
        Metric("kvd_tier_capacity_bytes", "gauge", "What a tier can hold", ("layout", "tier")),
        Metric("kvd_tier_used_bytes", "gauge", "What a tier holds", ("layout", "tier")),
        Metric("kvd_tier_blocks", "gauge", "Blocks in a tier", ("layout", "tier")),
        Metric(
            "kvd_tier_physical_bytes",
            "gauge",
            "Memory, or file system space, that is allocated for a tier",
            ("layout", "tier"),
        ),
        Metric(
            "kvd_tier_degraded",
            "gauge",
            "1 while writes to a tier are held back: its device is full, or fails",
            ("layout", "tier"),
        ),
        Metric(
            "kvd_layout_unavailable",
            "gauge",
            "1 while what is stored of a layout cannot be opened, so that its engines recompute",
            LAYOUT,
        ),
        Metric(
            "kvd_dirty_bytes", "gauge", "What is in DRAM only, and would be lost with it", LAYOUT
        ),
        Metric(
            "kvd_unverified_blocks",
            "gauge",
            "Blocks of an earlier kvd's DRAM that are not checked yet",
            LAYOUT,
        ),
        Metric(
            "kvd_unhashed_blocks",
            "gauge",
            "Stored blocks without checksums yet, which a restart would lose",
            LAYOUT,
        ),
        Metric(
            "kvd_moved_bytes_total",
            "counter",
            "Bytes moved: loaded from DRAM and stored in it by engines, read from SSD and written",
            ("layout", "move"),
            {"read": "ssd_read_bytes", "write": "ssd_written_bytes"},
        ),
        Metric(
            "kvd_read_seconds",
            "histogram",
            "Reading one block from SSD and verifying it, by what it was begun for",
            ("layout", "purpose"),
        ),
        Metric(
            "kvd_write_seconds",
            "histogram",
            "Writing one block to SSD, until it is durable",
            LAYOUT,
        ),
        Metric(
            "kvd_index_queued_bytes",
            "gauge",
            "Rows on their way to the index that are not committed",
        ),
        Metric(
            "kvd_index_waiting_rows",
            "gauge",
            "Rows for which that has no room: of blocks and sessions, and uses of sessions",
            ("layout", "kind"),
        ),
        Metric("kvd_io_queue_jobs", "gauge", "Jobs that wait for a thread of the I/O pool"),
        Metric("kvd_io_in_flight_bytes", "gauge", "Bytes of the I/O that runs"),
        Metric(
            "kvd_io_errors_total",
            "counter",
            "Operations that failed, by kind",
            ("layout", "operation"),
            {"read": "read_errors", "write": "write_errors", "hash": "hash_errors"},
        ),
        Metric(
            "kvd_ssd_refused_blocks_total",
            "counter",
            "Blocks that found no room on SSD, and stay in DRAM only",
            LAYOUT,
            {"": "ssd_refused"},
        ),
        # --------------------------------------------------------------------------- eviction
        Metric(
            "kvd_evicted_blocks_total",
            "counter",
            "Blocks that left to make room, by what was short",
            ("layout", "reason"),
            {"dram": "evictions_dram", "ssd": "evictions_ssd", "quota": "evictions_quota"},
        ),
        Metric(
            "kvd_dropped_sessions_total",
            "counter",
            "Sessions of which nothing is left, by why",
            ("layout", "reason"),
            {
                "evicted": "sessions_dropped",
                "expired": "sessions_expired",
                "flushed": "sessions_flushed",
            },
        ),
        Metric(
            "kvd_demoted_blocks_total",
            "counter",
            "Blocks written to SSD because their room in DRAM was wanted",
            LAYOUT,
            {"": "demotions"},
        ),
        Metric(
            "kvd_rest_before_evict_seconds",
            "histogram",
            "How long a session had not been used when the last of it left a tier to make room",
            ("layout", "tier"),
        ),
        Metric(
            "kvd_gone_before_asked_seconds",
            "histogram",
            "How long ago a session had left a tier when it was asked for again: short is regret",
            ("layout", "tier"),
        ),
        # --------------------------------------------------------------------------- prefetch
        Metric(
            "kvd_prefetched_blocks_total",
            "counter",
            "Blocks read ahead of any load, by what came of it",
            ("layout", "result"),
            {
                "begun": "prefetch_blocks",
                "hit": "prefetch_hits",
                "late": "prefetch_late",
                "wasted": "prefetch_wasted",
            },
        ),
        Metric(
            "kvd_prefetched_tokens_total",
            "counter",
            "Tokens of the blocks read ahead",
            LAYOUT,
            {"": "prefetch_tokens"},
        ),
        Metric(
            "kvd_prefetch_cancelled_sessions_total",
            "counter",
            "Sessions whose turn left the queue before all of them was read",
            LAYOUT,
            {"": "prefetch_cancelled"},
        ),
        Metric("kvd_queue_waiting_jobs", "gauge", "Turns that wait in the engines", LAYOUT),
        Metric("kvd_queue_running_sessions", "gauge", "Sessions with a turn that runs", LAYOUT),
        Metric(
            "kvd_prefetch_window_jobs",
            "gauge",
            "How far into the queue is read ahead: sessions of mean size that fit in DRAM",
            LAYOUT,
        ),
        Metric(
            "kvd_eviction_window_jobs",
            "gauge",
            "How far into the queue sessions are kept: those that fit in both tiers",
            LAYOUT,
        ),
        Metric("kvd_mean_session_bytes", "gauge", "Mean size of a session", LAYOUT),
        # -------------------------------------------------------------------------- integrity
        Metric(
            "kvd_corrupt_blocks_total",
            "counter",
            "Copies whose bytes were not the ones stored, by tier; they were misses",
            ("layout", "tier"),
            {"dram": "blocks_corrupt_dram", "ssd": "blocks_corrupt_ssd"},
        ),
        Metric(
            "kvd_corrupt_copies_total",
            "counter",
            "The same, in both tiers together",
            LAYOUT,
            {"": "blocks_corrupt"},
        ),
        Metric(
            "kvd_verified_blocks_total",
            "counter",
            "Copies in DRAM that were compared with their checksums, and good",
            LAYOUT,
            {"": "verified_blocks"},
        ),
        Metric(
            "kvd_adopted_blocks_total",
            "counter",
            "Blocks found in the DRAM that an earlier kvd left",
            LAYOUT,
            {"": "adopted_blocks"},
        ),
        Metric(
            "kvd_encryption",
            "gauge",
            "1 for what holds: SSD is written encrypted; blocks that are not may be there",
            ("state",),
        ),
        Metric("kvd_encryption_tenants", "gauge", "Tenants that have a key of their own"),
        # -------------------------------------------------------------------- leases, engines
        Metric("kvd_leases", "gauge", "Leases that engines hold, by kind", ("layout", "kind")),
        Metric(
            "kvd_quarantined_leases",
            "gauge",
            "Stores of processes that live and are not attached",
            LAYOUT,
        ),
        Metric("kvd_quarantined_slots", "gauge", "Slots held by them", LAYOUT),
        Metric(
            "kvd_lost_leases_total",
            "counter",
            "Completions of leases that were gone",
            LAYOUT,
            {"": "leases_lost"},
        ),
        Metric("kvd_engines", "gauge", "Engines that are attached", LAYOUT),
        # --------------------------------------------------------------------------- sessions
        Metric("kvd_sessions", "gauge", "Sessions of which something is stored", LAYOUT),
        Metric("kvd_pinned_sessions", "gauge", "Sessions that are pinned", ("layout", "pin")),
        Metric(
            "kvd_tenant_used_bytes",
            "gauge",
            "What a tenant that the settings name stores, as its quota counts it",
            ("layout", "tenant"),
        ),
        Metric("kvd_tenant_quota_bytes", "gauge", "Its quota, if it has one", ("layout", "tenant")),
        Metric("kvd_tenant_sessions", "gauge", "Its sessions", ("layout", "tenant")),
        Metric(
            "kvd_discards_total",
            "counter",
            "Times that tokens of a stored session were dropped",
            LAYOUT,
            {"": "discards"},
        ),
        Metric(
            "kvd_discarded_tokens_total",
            "counter",
            "Stored tokens that were dropped so",
            LAYOUT,
            {"": "discarded_tokens"},
        ),
        Metric(
            "kvd_compactions_total",
            "counter",
            "Times that what discards had left was put together, by what came of it",
            ("layout", "result"),
            {"done": "compactions", "given_up": "compactions_given_up"},
        ),
        Metric(
            "kvd_compacted_tokens_total",
            "counter",
            "Tokens whose rows were put together",
            LAYOUT,
            {"": "compacted_tokens"},
        ),
        Metric(
            "kvd_compacted_blocks_total",
            "counter",
            "Blocks that were made so",
            LAYOUT,
            {"": "compacted_blocks"},
        ),
        # ------------------------------------------------------------------------------- RPCs
        Metric(
            "kvd_refused_calls_total",
            "counter",
            "Callers turned away, by reason and by the name that they have in the settings",
            ("reason", "client"),
        ),
        Metric(
            "kvd_tls_connections_unused_total",
            "counter",
            "TLS connections for gRPC without a call in 15 s: handshakes that failed, mostly",
        ),
        Metric("kvd_rpcs_total", "counter", "Calls by method and status", ("method", "code")),
        Metric(
            "kvd_rpc_seconds", "histogram", "Calls, without those that last for ever", ("method",)
        ),
        *connection_metrics("kvd"),
        *PROCESS_METRICS,
    )
)
