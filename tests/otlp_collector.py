"""A collector of OpenTelemetry spans over real gRPC, for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it was exported; ids are hex."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, str | int | float | list[str]]
    is_error: bool
    start_ns: int
    end_ns: int


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that it receives.

    Attributes:
        spans: in order of arrival.
        endpoint: for `tracing.endpoint`.
    """

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.endpoint = ""

    async def Export(self, request, _context):  # noqa: N802  # the proto's name
        """Take spans."""
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_span(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[CollectedSpan]:
        """Return the spans of one trace."""
        return [span for span in self.spans if span.trace_id == trace_id]


@asynccontextmanager
async def running_collector() -> AsyncIterator[Collector]:
    """Run a collector at a free port."""
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    collector.endpoint = f"http://127.0.0.1:{port}"
    try:
        yield collector
    finally:
        await server.stop(None)


def _span(service, span):
    return CollectedSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _attributes(span.attributes),
        span.status.code == span.status.STATUS_CODE_ERROR,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
    )


def _attributes(pairs):
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else ""
