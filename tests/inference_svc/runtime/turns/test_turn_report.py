"""Reports of turns: spans, log lines, and the histograms of refused ones."""

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from structlog.testing import capture_logs

from inference_svc.core.errors import InvalidTurnError, TurnCancelledError, TurnMismatchError
from inference_svc.core.scheduling.request import Request
from inference_svc.core.submission import TurnNames
from inference_svc.core.turn_histograms import TurnHistograms
from inference_svc.core.turn_record import Finished, Usage
from inference_svc.runtime.engine.loads import PreloadPolicy
from inference_svc.runtime.turns.turn_report import MAX_NAME, TurnReport, turn_span
from shared.types.units import NS_PER_S
from tests.memory_engine import loaded_model
from tests.turn_service import KEY, make_turn, serving


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


async def test_a_turns_span_has_its_phases(model, tmp_path, monkeypatch):
    """And the counts of its input and output."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("shared.serving.tracing._TRACER", provider.get_tracer("test"))
    async with serving(model, tmp_path) as service:
        usages = [(await service.run(new))[-1].usage for new in (range(20, 40), [50, 51])]
        turn = await service.turns.submit(make_turn([60]))
        events = turn.follow()
        await anext(events)
        turn.cancel()
        rest = [event async for event in events]
    assert [type(event) for event in rest] == [Finished], "nothing comes after the last event"
    *whole, cancelled = [span for span in exporter.get_finished_spans() if span.name == "turn"]
    assert [span.attributes["gen_ai.usage.input_tokens"] for span in whole] == [20, 27 + 3]
    assert [span.attributes["kv.reused_tokens"] for span in whole] == [0, 27]
    assert [span.attributes["gen_ai.usage.output_tokens"] for span in whole] == [8, 8]
    for span, usage in zip(whole, usages, strict=True):
        seconds = phases(exporter, span)
        assert seconds["queue"] == pytest.approx(usage.queue_s, abs=1e-6)
        assert seconds["prefill"] == pytest.approx(usage.prefill_s, abs=1e-6)
        assert seconds["decode"] == pytest.approx(usage.tpot_s * 7, abs=1e-6)
    assert not {"prefill", "decode"} & phases(exporter, cancelled).keys()
    assert cancelled.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)


async def test_the_span_of_a_failed_turn_has_the_reason(model, tmp_path, monkeypatch):
    """And its session and tenant."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("shared.serving.tracing._TRACER", provider.get_tracer("test"))
    async with serving(model, tmp_path) as service:
        turn = await service.turns.submit(make_turn([10**6]))
        with pytest.raises(InvalidTurnError):
            _ = [event async for event in turn.follow()]
    (span,) = (span for span in exporter.get_finished_spans() if span.name == "turn")
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "invalid_input"
    assert span.attributes["session.id"] == KEY.session_id


@pytest.mark.parametrize(("buffer_layers", "chosen"), [(0, [0.0]), (None, [])])
async def test_a_turn_that_started_during_its_load_reports_the_layers(
    model, tmp_path, monkeypatch, buffer_layers, chosen
):
    """In its span, and by tier; not if all were loaded, as this store usually does."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("shared.serving.tracing._TRACER", provider.get_tracer("test"))
    preload = PreloadPolicy(buffer_layers=buffer_layers)
    async with serving(model, tmp_path, preload=preload, keeps_residents=False) as service:
        for new in (range(20, 40), [50, 51]):
            await service.run(new)
            await service.engine.loop.idle.wait()
        found = service.histograms.buffer_layers.series
    spans = [span for span in exporter.get_finished_spans() if span.name == "turn"]
    assert [span.attributes["kv.reused_tokens"] for span in spans] == [0, 27]
    said = [span.attributes.get("kv.buffer_layers") for span in spans]
    assert said == [None, *(chosen or [None])]
    assert {labels: series.count for labels, series in found.items()} == (
        {("dram",): 1} if chosen else {}
    )


def phases(exporter, turn):
    """Return seconds of the spans under a turn's."""
    return {
        span.name: (span.end_time - span.start_time) / NS_PER_S
        for span in exporter.get_finished_spans()
        if span.parent is not None and span.parent.span_id == turn.context.span_id
    }


def test_an_unfinished_phase_has_no_span(monkeypatch):
    """Nor has one that did not begin."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    monkeypatch.setattr("shared.serving.tracing._TRACER", tracer)
    request = Request(1, KEY, [1, 2], max_tokens=1, arrived_ns=5, admitted_ns=7, started_ns=8)
    with tracer.start_as_current_span("turn") as turn:
        TurnReport(TurnHistograms()).answered(
            make_turn([1]), request, "cancelled", Usage(), 0, cancelled=True
        )
    assert phases(exporter, turn) == {"queue": 2 / NS_PER_S}


def test_refusals_are_measured_by_tenant():
    """The default one if none is named; ten per second and client are logged."""
    histograms = TurnHistograms({"acme"})
    report = TurnReport(histograms)
    error = TurnMismatchError("it is not so", "look")
    for tenant in ("", "acme", "unknown"):
        report.turned_away("client", TurnNames(tenant, "s", "r"), error)
    assert histograms.refused.counts == {(error.reason,): 3}
    assert histograms.tenant_turns.counts == {
        ("default", "refused"): 1,
        ("acme", "refused"): 1,
        ("other", "refused"): 1,
    }


def test_a_refused_turn_has_a_log_line_too():
    """Its names are cut to the maximal length, as they were not checked."""
    report = TurnReport(TurnHistograms())
    error = TurnMismatchError("it is not so", "look")
    with capture_logs() as lines:
        report.turned_away("client", TurnNames("t" * 999, "s" * 999, "r" * 999), error)
    (line,) = lines
    assert (line["event"], line["finish_reason"], line["client"]) == ("turn", "refused", "client")
    assert (line["error"], line["retryable"]) == (error.reason, error.retryable)
    assert [line[name] for name in ("tenant", "session", "request_id")] == [
        letter * MAX_NAME for letter in "tsr"
    ]
    assert "more" not in line


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (TurnMismatchError("it is not so", "look"), "failed"),
        (TurnCancelledError("it was cancelled", "submit it again"), "cancelled"),
    ],
)
def test_a_turn_without_an_answer_is_counted_and_logged(error, ended):
    """Cancellation is no failure."""
    histograms = TurnHistograms()
    with capture_logs() as lines:
        TurnReport(histograms).failed(make_turn([1]), error)
    assert histograms.ended.counts == {(error.reason,): 1}
    assert histograms.tenant_turns.counts == {("default", ended): 1}
    (line,) = lines
    assert (line["finish_reason"], line["error"]) == (ended, error.reason)


def test_times_are_logged_in_microseconds():
    """More digits are useless."""
    request = Request(1, KEY, [1, 2], max_tokens=1, arrived_ns=5)
    usage = Usage(ttft_s=1.23456789, output_tokens=3)
    with capture_logs() as lines:
        TurnReport(TurnHistograms()).answered(make_turn([1]), request, "stop", usage, 1)
    assert (lines[0]["ttft_s"], lines[0]["output_tokens"]) == (1.234568, 3)


def test_lines_logged_within_a_turn_have_its_context():
    """Whatever module logs them."""
    submission = make_turn([1], request_id="r")
    with structlog.contextvars.bound_contextvars(session="another's", request_id="another's"):
        with turn_span(submission):
            bound = structlog.contextvars.get_contextvars()
        assert (bound["session"], bound["request_id"]) == (str(KEY), "r")
