"""The real pair seen from outside: metrics, probes, traces through both processes, log lines.

One pair for all tests: some turns, kvd restarted in between so that history comes from SSD, and
then their output is checked. All spans are exported, because both processes export the
rest when they end.
"""

import asyncio
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from aiohttp import ClientSession, UnixConnector
from prometheus_client.parser import text_string_to_metric_families

from inference_svc.client import turn_request
from inference_svc.core.counters import COUNTERS
from inference_svc.metrics.table import METRICS as INFERENCE
from kvd.core.state.outbox import COUNTERS as KVD_COUNTERS
from kvd.metrics.table import METRICS as KVD
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.pb.inference.v1 import inference_pb2_grpc
from shared.types.errors import ReportedError
from tests.inference_processes import InferenceProcess, wait_kvd_state, wait_saved
from tests.otlp_collector import CollectedSpan, Collector, running_collector
from tests.processes import KvdProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SECRET = "sk-do-not-log-me-0123456789"  # noqa: S105  # of nothing
SAMPLING = pb.Sampling(max_tokens=6, ignore_eos=True)


@dataclass(frozen=True)
class Seen:
    """The output of a run of the pair."""

    kvd: dict
    inference: dict
    probes: dict
    spans: Collector
    kvd_log: list
    log: list
    text: str  # of both logs

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels."""
        samples = self.kvd if name.startswith("kvd_") else self.inference
        return sum(
            value
            for (found, pairs), value in samples.items()
            if found == name and set(labels.items()) <= set(pairs)
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(tiny_model):
    """Run the pair, stop it, and return its output."""
    with tempfile.TemporaryDirectory(prefix="ca-") as name:
        async with running_collector() as collector:
            yield await _run(tiny_model, Path(name), collector)


async def _run(model: Path, directory: Path, collector: Collector) -> Seen:
    sockets = {process: directory / f"{process}.metrics" for process in ("kvd", "inference")}
    for process, socket in sockets.items():
        (directory / f"{process}.toml").write_text(
            f'[metrics]\nlisten = "unix:{socket}"\n[tracing]\nendpoint = "{collector.endpoint}"\n'
        )
    with (directory / "kvd.toml").open("a") as settings:
        # Without reading ahead, so that the load visibly waits for SSD.
        settings.write('[prefetch]\nin_flight_bytes = "0"\n')
    kvd = KvdProcess(
        directory / "kvd", ["--config", str(directory / "kvd.toml"), "--dram", "64MB"], keep="none"
    )
    with (directory / "inference.toml").open("a") as settings:
        settings.write(f'[openai]\nlisten = "unix:{directory}/openai.sock"\n')
    flags = ["--config", str(directory / "inference.toml")]
    service = InferenceProcess(model, directory, kvd.runtime_dir, flags)
    await kvd.start()
    try:
        await service.start()
        try:
            probes = await _converse(service, kvd, sockets)
            scraped = [_samples(await _get(socket, "/metrics")) for socket in sockets.values()]
        finally:
            await service.stop()
    finally:
        await kvd.stop()
    text = kvd.log() + service.log_path.read_text()
    return Seen(
        *scraped,
        probes,
        collector,
        _lines(kvd.log()),
        _lines(service.log_path.read_text()),
        text,
    )


async def _converse(service: InferenceProcess, kvd: KvdProcess, sockets: dict) -> dict:
    async with service.client() as client:
        await wait_kvd_state(client, "attached")
        for number in range(2):
            await client.submit(turn_request(list(range(5, 70 + number)), "s-1", sampling=SAMPLING))
        await _fail(client, turn_request([1], "s-1", expected_turn=9, sampling=SAMPLING))
        await _fail(client, turn_request([1], f"../{SECRET}", sampling=SAMPLING))
        await _fail(client, turn_request([1], "s-1", tenant="another"))
        await wait_saved(client)
        await kvd.stop()  # it keeps no DRAM: the next history comes from SSD
        await wait_kvd_state(client, "detached")
        await kvd.start()
        await wait_kvd_state(client, "attached")
        request = turn_request([7, 8], "s-1", request_id="r-traced", sampling=SAMPLING)
        await _submit_traced(service.address, request)
        await client.submit(request)  # a repeat: the recorded result
        await wait_saved(client)
    await _get(sockets["inference"].with_name("openai.sock"), "/v1/models")
    return {
        (process, path): await _get(socket, path)
        for process, socket in sockets.items()
        for path in ("/healthz", "/readyz")
    }


async def _submit_traced(address: str, request: pb.SubmitTurnRequest) -> None:
    metadata = (
        ("traceparent", f"00-{TRACE}-{CALLER}-01"),
        ("authorization", f"Bearer {SECRET}"),
    )
    async with grpc.aio.insecure_channel(address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).SubmitTurn(request, metadata=metadata)
        events = [event async for event in call]
    assert events[-1].HasField("finished")


async def _fail(client, request):
    with pytest.raises(ReportedError):
        await client.submit(request)


async def _get(socket: Path, path: str) -> str:
    async with (
        ClientSession(connector=UnixConnector(str(socket))) as session,
        session.get(f"http://localhost{path}") as response,
    ):
        assert response.status == 200
        return await response.text()


def _samples(text: str) -> dict:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _lines(log: str) -> list:
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


# ----------------------------------------------------------------------------------------- metrics


async def test_probes(seen):
    """Both processes are alive and ready."""
    assert seen.probes == {
        ("kvd", "/healthz"): "alive\n",
        ("kvd", "/readyz"): "ready\n",
        ("inference", "/healthz"): "alive\n",
        ("inference", "/readyz"): "ready\n",
    }


async def test_every_row_has_values(seen):
    """Every metric is scraped, but for events that did not happen and optional ones."""
    not_now = {
        *("kvd_rest_before_evict_seconds", "kvd_gone_before_asked_seconds"),  # nothing was evicted
        "kvd_fetch_wait_seconds",  # there is no store to fetch from
        "kvd_write_seconds",  # the last blocks may not be on SSD yet
        "inference_read_buffer_layers",  # a history that is complete at once waits for no layer
        *("kvd_tenant_used_bytes", "kvd_tenant_quota_bytes", "kvd_tenant_sessions"),
        *("kvd_http_cut_connections_total", "inference_http_cut_connections_total"),  # nobody was
        *("inference_recomputed_tokens_total", "kvd_load_misses_total"),
        *("kvd_refused_calls_total", "inference_refused_calls_total"),  # nobody was
        "inference_transcript_errors_total",  # the disk had room
        *("inference_transcript_store_calls_total", "inference_transcript_store_up"),  # none is
        *("inference_transcripts_behind", "inference_histories_asked_total"),
        "inference_missed_tokens_total",  # no text came in other words
        *("inference_load_tokens_per_second", "inference_load_latency_seconds"),  # learned later
        *("inference_prefill_tokens_per_second", "inference_step_estimate_seconds"),
    }
    for table, samples in ((KVD, seen.kvd), (INFERENCE, seen.inference)):
        names = {name for name, _ in samples}
        empty = {row.name for row in table if not names.intersection(row.exported_names)}
        assert empty <= not_now


async def test_every_counter_has_a_value(seen):
    """Each counter of both processes is scraped, also those that are zero."""
    for table, samples, counters in (
        (KVD, seen.kvd, KVD_COUNTERS),
        (INFERENCE, seen.inference, COUNTERS),
    ):
        for row in table:
            for label, counter in row.counters.items():
                if counter in counters:
                    found = [
                        pairs
                        for name, pairs in samples
                        if name == row.name and (not label or (row.labels[-1], label) in pairs)
                    ]
                    assert found, f"{counter} is not scraped as {row.name}"


async def test_metrics_match_the_turns(seen):
    """Counts and times are those of the turns of this run."""
    assert seen.value("inference_turns_total", outcome="finished") == 3
    assert seen.value("inference_turns_total", outcome="replayed") == 1
    assert seen.value("inference_turn_ends_total", reason="turn_mismatch") == 1
    assert seen.value("inference_refused_turns_total", reason="invalid_name") == 1
    assert seen.value("inference_refused_turns_total", reason="tenant_denied") == 1
    assert seen.value("inference_tokens_total", kind="output") == 3 * 6
    assert seen.value("inference_ttft_seconds_count") == 3
    assert seen.value("inference_ttft_seconds_count", history="none") == 1
    assert seen.value("inference_ttft_seconds_count", history="reused") == 2
    assert seen.value("inference_itl_seconds_count") == 3 * 5
    assert seen.value("inference_reused_tokens_total", tier="ssd") > 0
    assert seen.value("inference_kvd_state", state="attached") == 1
    assert seen.value("inference_rpcs_total", method="Inference/SubmitTurn", code="OK") == 4
    assert seen.value("inference_http_requests_total", route="/v1/models", status="200") == 1
    assert seen.value("inference_http_request_seconds_count", route="/v1/models") == 1
    assert seen.value("kvd_loaded_tokens_total", tier="ssd") > 0
    assert seen.value("kvd_read_seconds_count", purpose="load") >= 1
    assert seen.value("kvd_load_wait_seconds_count") >= 1
    assert seen.value("kvd_moved_bytes_total", move="read") > 0
    assert seen.value("kvd_rpcs_total", method="Engine/PrepareLoad", code="OK") >= 1
    assert seen.value("kvd_engines") == 1
    assert seen.value("kvd_sessions") == 1


# ------------------------------------------------------------------------------------------ traces


async def test_one_trace_through_both_processes(seen):
    """The caller's trace goes from its call through the turn's phases to kvd's work for it."""
    spans = seen.spans.of_trace(TRACE)
    by_id = {span.span_id: span for span in spans}

    def path(span: CollectedSpan) -> str:
        parent = by_id.get(span.parent_id)
        return f"{path(parent)} > {span.name}" if parent else span.name

    turn = "Inference/SubmitTurn > turn"
    paths = {path(span): span for span in spans}
    expected = {
        "Inference/SubmitTurn": "inference-svc",
        turn: "inference-svc",
        **{
            f"{turn} > {phase}": "inference-svc" for phase in ("queue", "load", "prefill", "decode")
        },
        f"{turn} > load > Engine/PrepareLoad": "kvd",
        f"{turn} > load > Engine/PrepareLoad > read": "kvd",
        f"{turn} > load > Engine/CompleteLoad": "kvd",
        f"{turn} > save": "inference-svc",
        f"{turn} > save > Engine/PrepareStore": "kvd",
        f"{turn} > save > Engine/CompleteStore": "kvd",
    }
    assert {name: span.service for name, span in paths.items()} == expected
    assert paths["Inference/SubmitTurn"].parent_id == CALLER
    assert not any(span.is_error for span in spans)
    about = paths[turn].attributes
    assert about["session.id"] == "s-1"
    assert about["gen_ai.usage.output_tokens"] == 6
    assert about["kv.reused_tokens"] == about["kv.history_tokens"] > 0
    for phase in ("queue", "prefill", "decode"):
        span = paths[f"{turn} > {phase}"]
        assert span.start_ns <= span.end_ns <= paths[turn].end_ns


async def test_failures_are_marked(seen):
    """The call of a refused turn is an error, and the span of a failed one has the reason."""
    refused = [s for s in seen.spans.spans if s.attributes.get("error.type") == "INVALID_ARGUMENT"]
    failed = [s for s in seen.spans.spans if s.attributes.get("error.type") == "turn_mismatch"]
    assert [span.name for span in refused] == ["Inference/SubmitTurn"]
    assert [span.name for span in failed] == ["turn"]
    assert all(span.is_error for span in refused + failed)


# -------------------------------------------------------------------------------------------- logs


async def test_each_turn_has_one_log_line(seen):
    """However a turn ends it has one line, with its session and its trace."""
    lines = [line for line in seen.log if line["event"] == "turn"]
    ends = [(line["finish_reason"], line.get("error")) for line in lines]
    assert ends == [
        ("length", None),
        ("length", None),
        ("failed", "turn_mismatch"),
        ("refused", "invalid_name"),
        ("refused", "tenant_denied"),
        ("length", None),
        ("replayed", None),
    ]
    assert all(len(line["trace_id"]) == 32 for line in lines)
    assert all({"session", "tenant", "client", "request_id"} <= line.keys() for line in lines)
    traced = lines[5]
    assert (traced["trace_id"], traced["request_id"]) == (TRACE, "r-traced")
    assert traced["tpot_s"] > 0
    assert traced["tier_tokens"].keys() == {"ssd"}


async def test_one_line_for_each_http_request(seen):
    """A request over HTTP has a line with its route, status and client, and a trace of its own."""
    (line,) = [line for line in seen.log if line["event"] == "http_request"]
    assert (line["method"], line["route"], line["status"]) == ("GET", "/v1/models", 200)
    assert line["client"]
    (span,) = seen.spans.of_trace(line["trace_id"])
    assert (span.name, span.attributes["http.response.status_code"]) == ("GET /v1/models", 200)


async def test_kvds_log_lines_have_the_trace(seen):
    """kvd's lines about a turn's store carry the turn's trace id."""
    lines = [line for line in seen.kvd_log if line.get("trace_id") == TRACE]
    assert "session_stored" in {line["event"] for line in lines}


async def test_secrets_are_not_logged(seen):
    """The logs of a whole run have neither credentials nor anything that looks like them."""
    assert SECRET not in seen.text
    assert "Bearer" not in seen.text


async def test_an_absent_collector_delays_nothing(tiny_model, short_dir):
    """A service whose collector is absent serves and stops as it does without one."""
    del tiny_model
    settings = short_dir / "kvd.toml"
    settings.write_text('[tracing]\nendpoint = "http://127.0.0.1:1"\n')
    kvd = KvdProcess(short_dir, ["--config", str(settings), "--dram", "16MB"], keep="none")
    await kvd.start()
    async with asyncio.timeout(60):
        assert await kvd.stop() == 0
