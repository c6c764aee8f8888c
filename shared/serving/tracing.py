"""Traces across both processes, and the trace id in their logs.

A W3C trace context comes with a request (gRPC metadata, HTTP headers), or is made here if the
client sent none. It is passed on to kvd with each call. So the lines that both processes log about
one turn have one trace id, with or without an exporter. Spans are recorded and exported by OTLP
only if `tracing.endpoint` is set; otherwise the calls here use the API's no-op implementations.

*Source:* https://www.w3.org/TR/trace-context/, OpenTelemetry.
"""

import secrets
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import Status, StatusCode

from shared.serving.observing_settings import TracingSettings
from shared.types.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import Sampler

Metadata: TypeAlias = tuple[tuple[str, str], ...]

EXPORT_S = 5.0  # for one export, and for the last one at the end
HEADERS = ("traceparent", "tracestate")
MAX_HEADER = 512  # characters; the length that W3C requires implementations to support
# Parents whose text is not parsed again: an engine makes several calls of kvd for each turn.
MAX_PARENTS = 256

_PROPAGATOR = TraceContextTextMapPropagator()
_TRACER = trace.get_tracer("cachedattention")  # finds the provider once there is one


class TracingUnavailableError(ConfigError):
    """Traces are to be exported, but the packages for it are not installed."""

    reason = "tracing_unavailable"


@dataclass(frozen=True)
class Tracing:
    """The export of traces, while it is on."""

    provider: "TracerProvider | None"

    def close(self) -> None:
        """Export the remaining spans, for a bounded time. Blocks."""
        if self.provider is not None:
            self.provider.force_flush(int(EXPORT_S * 1000))
            self.provider.shutdown()


def start_tracing(settings: TracingSettings, service: str, version: str) -> Tracing:
    """Start the export of spans, if an endpoint is set. Called once per process.

    Raises:
        TracingUnavailableError: the packages are not installed.
    """
    if not settings.endpoint:
        return Tracing(None)
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingUnavailableError(
            "tracing.endpoint is set, but the OpenTelemetry exporter is not installed",
            "run: pip install 'cachedattention[tracing]'; or leave tracing.endpoint empty",
        ) from error
    resource = Resource.create(
        {
            "service.name": service,
            "service.version": version,
            "service.instance.id": str(uuid.uuid4()),
        }
    )
    provider = TracerProvider(sampler_of(settings.sample_ratio), resource)
    is_open = settings.endpoint.startswith("http://")
    exporter = OTLPSpanExporter(settings.endpoint, insecure=is_open, timeout=EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return Tracing(provider)


def sampler_of(ratio: float) -> "Sampler":
    """Return a sampler that keeps a share of the traces by their ids: the same in both processes.

    A caller may exclude its trace, but cannot force it in.
    """
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    share = TraceIdRatioBased(ratio)
    return ParentBased(share, remote_parent_sampled=share)


# ------------------------------------------------------------------------------- between processes


def extract_trace_context(metadata: Sequence[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Return the trace context in an RPC's metadata, or in HTTP headers."""
    return {
        name: value
        for name, value in metadata or ()
        if name in HEADERS and isinstance(value, str) and len(value) <= MAX_HEADER
    }


def outgoing() -> Metadata | None:
    """Return metadata that makes the callee's spans children of the current one; None: no span."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    # As _PROPAGATOR.inject does, in half the time: every call of kvd has them.
    ids = f"{context.trace_id:032x}-{context.span_id:016x}"
    parent = "traceparent", f"00-{ids}-{context.trace_flags:02x}"
    if not context.trace_state:
        return (parent,)
    return parent, ("tracestate", context.trace_state.to_header())


# ------------------------------------------------------------------------------------------- spans


def enter_request(name: str, carrier: Mapping[str, str], attributes: Mapping[str, Any]) -> Span:
    """Begin a request's span, and make it the current one of this task until the task ends.

    The caller ends the span. Log lines of the task, and of tasks made by it, have its trace id.
    """
    parent = _parent_in(tuple(carrier.items()))
    span = _TRACER.start_span(name, parent, SpanKind.SERVER, attributes)
    if not span.get_span_context().is_valid:
        span = NonRecordingSpan(_random_context())
    otel_context.attach(trace.set_span_in_context(span, parent))
    structlog.contextvars.bind_contextvars(trace_id=trace_id_of(span))
    return span


@contextmanager
def child_span(name: str, attributes: Mapping[str, Any] | None = None) -> Iterator[Span]:
    """Open a span under the current one, and make it the current one inside the block."""
    with trace.use_span(
        _TRACER.start_span(name, attributes=attributes),
        end_on_exit=True,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        yield span


def open_span(name: str, attributes: Mapping[str, Any] | None = None) -> Span:
    """Open a span under the current one, which stays current. The caller ends it."""
    return _TRACER.start_span(name, attributes=attributes)


def record_past_span(
    parent: Span, name: str, began_ns: int, ended_ns: int, attributes: Mapping[str, Any]
) -> None:
    """Record a span that is over, under one that is not. Times are of the monotonic clock."""
    if not parent.is_recording():
        return
    to_wall_ns = time.time_ns() - time.monotonic_ns()
    span = _TRACER.start_span(
        name,
        trace.set_span_in_context(parent),
        attributes=attributes,
        start_time=began_ns + to_wall_ns,
    )
    span.end(ended_ns + to_wall_ns)


def fail_span(span: Span, reason: str) -> None:
    """Mark a span as failed."""
    if span.is_recording():
        span.set_attribute("error.type", reason)
        span.set_status(Status(StatusCode.ERROR, reason))


def trace_id_of(span: Span) -> str:
    """Return a span's trace id as W3C writes it; "" if the span has none."""
    context = span.get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


@lru_cache(MAX_PARENTS)
def _parent_in(carrier: Metadata) -> Context:
    """Return a context of which the caller's span is the current one; empty if none is named."""
    return _PROPAGATOR.extract(dict(carrier), context=Context())


def _random_context() -> SpanContext:
    return SpanContext(
        secrets.randbits(128) | 1,
        secrets.randbits(64) | 1,
        is_remote=False,
        trace_flags=TraceFlags(0),
    )
