"""The table of all metrics of the service. Pure; `values.py` fills it at each scrape.

A tenant is a label only if the settings name it; all others are "other". The label `history` is the
state of a turn's history: "none" (there was none), "reused", "partial", "recomputed".
"""

from inference_svc.metrics.transcript_table import TRANSCRIPT_METRICS
from shared.serving.metric_export import Metric, MetricTable
from shared.serving.process_metrics import PROCESS_METRICS, connection_metrics

METRICS = MetricTable(
    (
        Metric(
            "inference_model_info",
            "info",
            "The served model",
            ("model", "fingerprint", "architecture", "dtype", "device", "version"),
        ),
        Metric("inference_ready", "gauge", "1 while new turns are accepted"),
        Metric(
            "inference_kvd_state",
            "gauge",
            "1 for the state of the connection with kvd, 0 for the others",
            ("state",),
        ),
        # ------------------------------------------------------------------------------ turns
        Metric(
            "inference_turns_total",
            "counter",
            "Turns by outcome; those handed back or expired are among the failed ones",
            ("outcome",),
            {
                "finished": "turns_finished",
                "cancelled": "turns_cancelled",
                "failed": "turns_failed",
                "replayed": "turns_replayed",
                "handed_back": "turns_handed_back",
                "expired": "expired",
            },
        ),
        Metric(
            "inference_turn_ends_total",
            "counter",
            "Turns by how they ended: a finish reason, or the slug of an error",
            ("reason",),
        ),
        Metric(
            "inference_limit_refusals_total",
            "counter",
            "Turns, sessions and streams that a limit refused",
            ("limit",),
            {
                "queue": "turns_refused",
                "rate": "refused_rate_limited",
                "turns": "refused_too_many_turns",
                "sessions": "refused_too_many_sessions",
                "streams": "refused_too_many_streams",
            },
        ),
        Metric(
            "inference_refused_turns_total",
            "counter",
            "Refused turns, by the slug of the error",
            ("reason",),
        ),
        Metric(
            "inference_tenant_turns_total",
            "counter",
            "Turns by tenant and outcome",
            ("tenant", "outcome"),
        ),
        Metric(
            "inference_tenant_tokens_total",
            "counter",
            "Tokens by tenant: computed ones of prompts, reused ones, and output",
            ("tenant", "kind"),
        ),
        *TRANSCRIPT_METRICS,
        Metric("inference_running_turns", "gauge", "Turns being computed"),
        Metric("inference_waiting_turns", "gauge", "Turns waiting for admission"),
        Metric(
            "inference_turn_places", "gauge", "Most turns computed at once", (), {"": "turn_places"}
        ),
        Metric(
            "inference_preemptions_total",
            "counter",
            "Preemptions of turns, which resumed later",
            (),
            {"": "preempted"},
        ),
        # ---------------------------------------------------------------------------- latency
        Metric(
            "inference_ttft_seconds",
            "histogram",
            "From a turn's arrival to its first token",
            ("history",),
        ),
        Metric(
            "inference_tpot_seconds",
            "histogram",
            "Mean time per token of an answer after its first",
        ),
        Metric("inference_itl_seconds", "histogram", "Time between two tokens of an answer"),
        Metric(
            "inference_e2e_seconds",
            "histogram",
            "From a turn's arrival to its last token",
            ("history",),
        ),
        Metric("inference_queue_seconds", "histogram", "From a turn's arrival to its admission"),
        Metric(
            "inference_prefill_seconds",
            "histogram",
            "From the first step of a turn to its first token",
            ("history",),
        ),
        Metric(
            "inference_load_seconds",
            "histogram",
            "From a turn's admission to the last token of its history, if it has one",
        ),
        Metric(
            "inference_read_buffer_layers",
            "histogram",
            "Layers of a history that had to be loaded before its turn joined, by slowest tier",
            ("tier",),
        ),
        Metric(
            "inference_stall_seconds",
            "histogram",
            "Time that compute waited for layers being loaded",
        ),
        # ----------------------------------------------------------------------------- tokens
        Metric(
            "inference_tokens_total",
            "counter",
            "Tokens by kind: history is reused or recomputed, new ones computed, output answered, "
            "of drafted ones some accepted, of reused ones some kept behind an edit",
            ("kind",),
            {
                "history": "history_tokens",
                "reused": "reused_tokens",
                "recomputed": "recomputed_tokens",
                "new": "new_tokens",
                "output": "output_tokens",
                "drafted": "drafted_tokens",
                "accepted": "accepted_tokens",
                "kept": "kept_tokens",
                "healed": "healed_tokens",
                "stored": "stored_tokens",
                "dropped": "dropped_tokens",
                "compressed": "compressed_tokens",
                "embedded": "embedded_tokens",
            },
        ),
        Metric(
            "inference_embeddings_total",
            "counter",
            "Embedded inputs",
            counters={"": "embeddings"},
        ),
        Metric(
            "inference_reused_tokens_total",
            "counter",
            "Reused tokens by the tier where they were found",
            ("tier",),
        ),
        Metric(
            "inference_recomputed_tokens_total",
            "counter",
            "Recomputed tokens by reason",
            ("reason",),
        ),
        Metric(
            "inference_missed_tokens_total",
            "counter",
            "Tokens computed because a conversation came back in other words, by cause",
            ("cause",),
        ),
        # ------------------------------------------------------------------------------ store
        Metric(
            "inference_loads_total",
            "counter",
            "Loads from kvd, by result",
            ("result",),
            {
                "hit": "load_hits",
                "miss": "load_misses",
                "refused": "loads_refused",
                "error": "load_errors",
                "failed_late": "load_failed_late",
                "retried": "loads_retried",
            },
        ),
        Metric(
            "inference_saves_total",
            "counter",
            "Turns by the result of saving their KV",
            ("result",),
            {
                "saved": "saves",
                "refused": "saves_refused",
                "error": "save_errors",
                "dropped": "save_dropped",
            },
        ),
        Metric(
            "inference_states_total",
            "counter",
            "States of a model with a recurrent state, stored in kvd and loaded from there",
            ("what",),
            {"stored": "stored_states", "loaded": "loaded_states"},
        ),
        Metric(
            "inference_window_tokens_total",
            "counter",
            "Tokens whose KV of layers with a window was stored in kvd and loaded from there",
            ("what",),
            {"stored": "stored_window_tokens", "loaded": "loaded_window_tokens"},
        ),
        Metric(
            "inference_expectations_total",
            "counter",
            "Hints of what is to become of a session (tools awaited, superseded), by whether kvd "
            "heard them: it may be away, too old, or have stored nothing of it",
            ("result",),
            {"told": "expectations", "lost": "expectations_lost"},
        ),
        Metric(
            "inference_saves_cut_short_total",
            "counter",
            "Blocks stored before they were full, to free slots of the write ring",
            (),
            {"": "saves_cut_short"},
        ),
        Metric(
            "inference_copiers_lost_total",
            "counter",
            "Deaths of the GPU's copier; copies then used shared memory",
            (),
            {"": "copiers_lost"},
        ),
        Metric(
            "inference_write_stalls_total",
            "counter",
            "Planned steps in which a turn found no room in the write ring",
            (),
            {"": "write_stalls"},
        ),
        Metric(
            "inference_write_stall_seconds_total",
            "counter",
            "Time that turns waited for room in the write ring",
            (),
            {"": "write_stall_s"},
        ),
        Metric(
            "inference_saves_under_way",
            "gauge",
            "Saves in progress",
            (),
            {"": "saves_under_way"},
        ),
        # ---------------------------------------------------------------------- working memory
        Metric(
            "inference_kv_token_slots",
            "gauge",
            "Token slots of the working KV: all there are, free ones, those reserved for turns, "
            "those of idle sessions, those that it would take more if sessions shared no pages; "
            "those of the write ring, and the free ones there",
            ("state",),
            {
                "pool": "pool_token_slots",
                "free": "pool_free_token_slots",
                "reserved": "reserved_token_slots",
                "resident": "resident_token_slots",
                "shared": "shared_token_slots",
                "write_ring": "write_ring_token_slots",
                "write_ring_free": "write_ring_free_token_slots",
            },
        ),
        Metric(
            "inference_resident_sessions",
            "gauge",
            "Idle sessions whose KV is in memory",
            (),
            {"": "resident_sessions"},
        ),
        Metric(
            "inference_resident_events_total",
            "counter",
            "Turns that found their session's KV in memory, those that moved it to a larger place, "
            "those that began with another session's, and sessions that had to leave memory",
            ("event",),
            {
                "hit": "resident_hits",
                "moved": "moves",
                "shared": "prefixes_shared",
                "evicted": "residents_evicted",
            },
        ),
        Metric(
            "inference_pool_misses_total",
            "counter",
            "Token slots allocated outside the pool, which is only slower",
            (),
            {"": "pool_misses"},
        ),
        Metric(
            "inference_discards_total",
            "counter",
            "Times that tokens of a session were dropped, and what became of their KV",
            ("event",),
            {
                "overflow": "overflows",
                "client": "discards",
                "shifted": "shifts",
                "shift_failed": "shifts_failed",
                "stored": "store_discards",
                "store_failed": "store_discards_failed",
            },
        ),
        # -------------------------------------------------------------------------- computing
        Metric(
            "inference_steps_total",
            "counter",
            "Forward passes; failed ones were computed again, turn by turn; replayed: from a graph",
            ("result",),
            {"begun": "steps", "failed": "steps_failed", "replayed": "steps_replayed"},
        ),
        Metric("inference_step_turns", "histogram", "Turns in a forward pass: the batch"),
        Metric("inference_step_tokens", "histogram", "Tokens in a forward pass"),
        Metric(
            "inference_step_seconds", "histogram", "Compute time of a forward pass, without stalls"
        ),
        Metric(
            "inference_compute_busy_seconds_total",
            "counter",
            "Total compute time",
            (),
            {"": "compute_busy_s"},
        ),
        Metric(
            "inference_prefill_tokens_per_second",
            "gauge",
            "Measured speed of prefill",
            (),
            {"": "prefill_tokens_per_s"},
        ),
        Metric(
            "inference_step_estimate_seconds",
            "gauge",
            "Estimated time of a step: fixed, per token, per attending pair of tokens",
            ("part",),
            {"step": "step_constant_s", "token": "step_token_s", "pair": "step_pair_s"},
        ),
        Metric(
            "inference_load_tokens_per_second",
            "gauge",
            "Measured speed of loads, by tier",
            ("tier",),
            {tier: f"load_tokens_per_s_{tier}" for tier in ("dram", "ssd")},
        ),
        Metric(
            "inference_load_latency_seconds",
            "gauge",
            "Measured fixed time of a load, by tier",
            ("tier",),
            {tier: f"load_latency_s_{tier}" for tier in ("dram", "ssd")},
        ),
        # ------------------------------------------------------------------------------- calls
        Metric("inference_rpcs_total", "counter", "gRPC calls", ("method", "code")),
        Metric("inference_rpc_seconds", "histogram", "gRPC calls, to their last byte", ("method",)),
        Metric(
            "inference_refused_calls_total",
            "counter",
            "Refused callers, by reason and by their name in the settings",
            ("reason", "client"),
        ),
        Metric(
            "inference_tls_connections_unused_total",
            "counter",
            "TLS connections for gRPC without a call in 15 s: handshakes that failed, mostly",
        ),
        Metric(
            "inference_http_requests_total",
            "counter",
            "HTTP requests of clients",
            ("method", "route", "status"),
        ),
        Metric(
            "inference_http_request_seconds",
            "histogram",
            "HTTP requests of clients, to their last byte",
            ("route",),
        ),
        *connection_metrics("inference"),
        *PROCESS_METRICS,
    )
)
