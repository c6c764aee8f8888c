"""RpcObserver: counts and times every RPC of a server, and gives it a span and a trace id.

It has to be the outermost interceptor, to see the status that the others have made of an error.
Long-lived streams (an engine's attachment, its queue, a watch) are counted when they end, and have
no span: a span that never ends is useless.
"""

import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import Span

from shared.access.credentials import TlsConnections
from shared.serving.grpc_handlers import CallInterceptor, Handler, behaviour_of, with_behaviour
from shared.serving.tracing import enter_request, extract_trace_context, fail_span
from shared.types.histogram import Histogram, Tally

# Calls of grpc's own services (health, reflection) are neither counted nor traced: probes come
# every few seconds, and say nothing about ours.
FOREIGN = "/grpc."
# A client's deadline passes earlier than ours, which began when the call arrived. So its
# cancellation may arrive before ours has passed.
EARLY_S = 0.01


@dataclass(frozen=True)
class RpcMetrics:
    """Counts of the calls of all servers of a process.

    Attributes:
        ended: number of calls by method ("Engine/PrepareLoad") and code ("OK").
        seconds: seconds of calls by method, without long-lived ones.
        refused: number of refused calls by reason and by the client's name in the settings, "" for
            an unknown caller.
        tls: TLS connections, as far as gRPC reports them.
    """

    ended: Tally = field(default_factory=Tally)
    seconds: Histogram = field(default_factory=Histogram)
    refused: Tally = field(default_factory=Tally)
    tls: TlsConnections = field(default_factory=TlsConnections)


class RpcObserver(CallInterceptor):
    """Counts and times every RPC of a server, and gives it a span and a trace id.

    Args:
        metrics: the counts.
        long_lived: methods ("Engine/Attach") whose calls last as long as their client.
    """

    def __init__(self, metrics: RpcMetrics, long_lived: Collection[str] = ()) -> None:
        self._metrics = metrics
        self._long_lived = frozenset(long_lived)

    def wrap(self, handler: Any, method: str) -> Handler:
        """See CallInterceptor."""
        if method.startswith(FOREIGN):
            return handler  # type: ignore[no-any-return]
        short = method.rpartition(".")[2]  # "/kvd.v1.Engine/PrepareLoad": what follows "v1."
        wrap = self._streaming if handler.response_streaming else self._single
        return with_behaviour(handler, wrap(short, behaviour_of(handler)))

    def _single(self, method: str, behaviour: Any) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            call = self._begin(method, context)
            is_answered = False
            try:
                response = await behaviour(request, context)
                is_answered = True
            finally:
                self._record_end(call, context, is_answered=is_answered)
            return response

        return answer

    def _streaming(self, method: str, behaviour: Any) -> Any:
        async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
            call = self._begin(method, context)
            # A callback, not `finally`: a generator abandoned at a yield is not closed in time.
            context.add_done_callback(
                lambda _: self._record_end(call, context, is_answered=context.done())
            )
            async for response in behaviour(request, context):
                yield response

        return answer

    def _begin(self, method: str, context: Any) -> "_Call":
        span = None
        if method not in self._long_lived:
            carrier = extract_trace_context(context.invocation_metadata())
            span = enter_request(method, carrier, {"rpc.system": "grpc", "rpc.method": method})
        return _Call(method, time.monotonic(), span)

    def _record_end(self, call: "_Call", context: Any, *, is_answered: bool) -> None:
        """Count a call that has ended, and end its span."""
        code = _code_of(context, is_answered=is_answered)
        self._metrics.ended.add(call.method, code)
        if call.span is None:
            return
        self._metrics.seconds.observe(time.monotonic() - call.began_s, call.method)
        if code != "OK":
            fail_span(call.span, code)
        call.span.end()


@dataclass(slots=True)  # not frozen: that takes three times as long to make
class _Call:
    method: str
    began_s: float
    span: Span | None


def _code_of(context: Any, *, is_answered: bool) -> str:
    """Return the status's name. grpc sets none for success, and none when the caller is gone."""
    if context.code():
        return str(context.code().name)
    if is_answered:
        return "OK"
    return code_without_answer(context.time_remaining())


def code_without_answer(left_s: float | None) -> str:
    """Return the code of a call without a status, by the time left to its deadline; None: none."""
    return "CANCELLED" if left_s is None or left_s > EARLY_S else "DEADLINE_EXCEEDED"
