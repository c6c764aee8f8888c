"""Traces without an exporter, and the requirements of one."""

import contextvars
import sys

import pytest
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.serving.observing_settings import TracingSettings
from shared.serving.tracing import (
    TracingUnavailableError,
    child_span,
    enter_request,
    extract_trace_context,
    outgoing,
    record_past_span,
    sampler_of,
    start_tracing,
    trace_id_of,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


def in_a_task(step):
    """Run in a separate context, as each request does."""
    return contextvars.copy_context().run(step)


def test_without_an_endpoint_nothing_is_exported():
    """Disabled tracing costs nothing, and ends at once."""
    tracing = start_tracing(TracingSettings(), "test", "0")
    assert tracing.provider is None
    tracing.close()


def test_the_missing_extra_is_named(monkeypatch):
    """An endpoint without the packages for it refuses the start, and names what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(TracingUnavailableError, match=r"cachedattention\[tracing\]") as raised:
        start_tracing(TracingSettings(endpoint="http://127.0.0.1:4317"), "test", "0")
    assert raised.value.exit_code == 78


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "ftp://x", "http://", "http://a/b c"])
def test_invalid_endpoints(endpoint):
    """They are refused with the settings."""
    with pytest.raises(ValueError, match="endpoint"):
        TracingSettings(endpoint=endpoint)


@pytest.mark.parametrize(
    ("ratio", "flag", "is_kept"), [(0, "01", False), (1, "01", True), (1, "00", False)]
)
def test_callers_may_exclude_a_trace_but_not_force_it(ratio, flag, is_kept):
    """The ratio decides, for traces that the caller wants."""
    parent = TraceContextTextMapPropagator().extract(
        {"traceparent": f"00-{TRACE}-b7ad6b7169203331-{flag}"}
    )
    decision = sampler_of(ratio).should_sample(parent, int(TRACE, 16), "call").decision
    assert decision.is_sampled() == is_kept


def test_spans_keep_the_callers_trace():
    """Inside a request, and inside its children, further calls carry the caller's trace id."""

    def request():
        span = enter_request("call", PARENT, {})
        assert trace_id_of(span) == TRACE
        with child_span("inner") as inner:
            assert trace_id_of(inner) == TRACE
            record_past_span(inner, "before", 1, 2, {})
            return dict(outgoing() or ())

    assert in_a_task(request)["traceparent"].split("-")[1] == TRACE
    assert outgoing() is None  # nothing of it is left outside
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("flags", ["00", "01"])
@pytest.mark.parametrize("state", [{}, {"tracestate": "a=b,c=d"}])
def test_a_trace_is_passed_on_as_opentelemetry_does(flags, state):
    """With each value of the caller, also if two callers differ in one of them only."""
    carrier = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-{flags}", **state}

    def request():
        enter_request("call", carrier, {})
        expected = {}
        TraceContextTextMapPropagator().inject(expected)
        return expected, dict(outgoing())

    for _ in range(2):  # the second time, the parent is known
        expected, passed_on = in_a_task(request)
        assert passed_on == expected == carrier


def test_a_later_request_of_the_same_task_has_a_new_trace():
    """On a persistent connection, one request's trace is not the next one's."""

    def connection():
        first = trace_id_of(enter_request("call", PARENT, {}))
        return first, trace_id_of(enter_request("call", {}, {}))

    first, second = in_a_task(connection)
    assert first == TRACE
    assert second not in ("", TRACE)


def test_only_trace_context_is_propagated():
    """No other metadata of a request is read, nor an overlong one."""
    metadata = (
        *PARENT.items(),
        ("tracestate", "a=b"),
        ("authorization", "Bearer x"),
        ("grpc-trace-bin", b"\x00"),
    )
    assert extract_trace_context(metadata) == {**PARENT, "tracestate": "a=b"}
    assert extract_trace_context((("tracestate", "x" * 513),)) == {}
    assert extract_trace_context(None) == {}
