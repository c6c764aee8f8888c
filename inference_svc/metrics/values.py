"""Fills the service's metrics from the service's parts, at each scrape. Nothing is counted here."""

from dataclasses import dataclass, field
from functools import partial

from inference_svc.core.turn_histograms import TurnHistograms
from inference_svc.metrics.table import METRICS
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.service_assembly import ServiceParts
from shared.serving.http_connections import ConnectionMetrics
from shared.serving.http_observer import HttpMetrics
from shared.serving.metric_export import MetricExporter, Scrape
from shared.serving.process_metrics import fill_connections, fill_process
from shared.serving.rpc_observer import RpcMetrics

KVD_STATES = ("attached", "detached", "off")


@dataclass(frozen=True)
class Calls:
    """Metrics of the servers: gRPC calls, HTTP requests and HTTP connections."""

    rpcs: RpcMetrics = field(default_factory=RpcMetrics)
    http: HttpMetrics = field(default_factory=HttpMetrics)
    connections: ConnectionMetrics = field(default_factory=ConnectionMetrics)


def make_exporter(parts: ServiceParts, calls: Calls) -> MetricExporter:
    """Make the exporter of the service's metrics.

    Args:
        parts: the service's parts.
        calls: the metrics of its servers.
    """
    return MetricExporter(METRICS, partial(_fill, parts, calls))


def _fill(parts: ServiceParts, calls: Calls, scrape: Scrape) -> None:
    """Put the values of all metrics into a scrape."""
    engine_parts, engine = parts.engine_parts, parts.engine_parts.engine
    _fill_model(scrape, parts)
    scrape.put("inference_ready", not parts.turns.is_draining)
    for state in KVD_STATES:
        scrape.put("inference_kvd_state", engine_parts.store.state == state, state)
    scrape.put("inference_running_turns", engine.scheduler.num_running)
    scrape.put("inference_waiting_turns", len(engine.scheduler.queue))
    scrape.put_counters(
        {
            **engine_parts.counters.snapshot(),
            **engine.gauges(),
            **engine_parts.rates.as_dict(),
        }
    )
    _fill_histograms(scrape, engine_parts.histograms)
    _fill_transcripts(scrape, parts.transcripts)
    scrape.put_tally("inference_rpcs_total", calls.rpcs.ended)
    scrape.put_tally("inference_refused_calls_total", calls.rpcs.refused)
    scrape.put("inference_tls_connections_unused_total", calls.rpcs.tls.count_unused())
    scrape.put_histogram("inference_rpc_seconds", calls.rpcs.seconds)
    scrape.put_tally("inference_http_requests_total", calls.http.ended)
    scrape.put_histogram("inference_http_request_seconds", calls.http.seconds)
    fill_connections("inference", calls.connections, scrape)
    fill_process(scrape)


def _fill_transcripts(scrape: Scrape, transcripts: TranscriptStore) -> None:
    scrape.put_tally("inference_transcript_errors_total", transcripts.trouble.errors)
    sharing = transcripts.sharing
    if sharing is not None:  # without a shared store its metrics have no value
        scrape.put_tally("inference_transcript_store_calls_total", sharing.store.calls.ended)
        scrape.put("inference_transcript_store_up", not sharing.store.calls.is_silent)
        scrape.put("inference_transcripts_behind", len(sharing.behind))
        if sharing.histories is not None:
            scrape.put_tally("inference_histories_asked_total", sharing.histories.asked)


def _fill_model(scrape: Scrape, parts: ServiceParts) -> None:
    about = parts.gateway.describe()
    scrape.put(
        "inference_model_info",
        1,
        about.name,
        about.fingerprint,
        about.architecture,
        about.dtype,
        about.device,
        about.version,
    )


def _fill_histograms(scrape: Scrape, histograms: TurnHistograms) -> None:
    for name, tally in (
        ("inference_turn_ends_total", histograms.ended),
        ("inference_refused_turns_total", histograms.refused),
        ("inference_tenant_turns_total", histograms.tenant_turns),
        ("inference_tenant_tokens_total", histograms.tenant_tokens),
        ("inference_reused_tokens_total", histograms.reused_tokens),
        ("inference_recomputed_tokens_total", histograms.recomputed_tokens),
        ("inference_missed_tokens_total", histograms.missed_tokens),
    ):
        scrape.put_tally(name, tally)
    for name, histogram in (
        ("inference_ttft_seconds", histograms.ttft_s),
        ("inference_tpot_seconds", histograms.tpot_s),
        ("inference_itl_seconds", histograms.itl_s),
        ("inference_e2e_seconds", histograms.total_s),
        ("inference_queue_seconds", histograms.queue_s),
        ("inference_prefill_seconds", histograms.prefill_s),
        ("inference_load_seconds", histograms.load_s),
        ("inference_read_buffer_layers", histograms.buffer_layers),
        ("inference_stall_seconds", histograms.stall_s),
        ("inference_step_turns", histograms.step_turns),
        ("inference_step_tokens", histograms.step_tokens),
        ("inference_step_seconds", histograms.step_s),
    ):
        scrape.put_histogram(name, histogram)
