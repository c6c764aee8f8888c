"""Reports turns that are over: the canonical log line, histograms and trace spans.

Each turn has one line, `turn`, however it ended. A turn that was refused has one, too, at most ten
a second for each client: `more` says how many were left out. `trace_id` is in the line as in every
line of the request that submitted the turn. The spans under the turn's own are made when it is
over, from the times that the request has noted; `load` and `save` are made while these run, because
kvd's spans are their children.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import structlog
from opentelemetry import trace
from opentelemetry.trace import Span

from inference_svc.core.errors import TurnCancelledError
from inference_svc.core.scheduling.request import Request
from inference_svc.core.submission import Submission, TurnNames
from inference_svc.core.turn_histograms import TurnHistograms
from inference_svc.core.turn_record import TurnRecord, Usage
from shared.process.log import LineAllowance, get_logger
from shared.serving.tracing import child_span, record_past_span
from shared.types.errors import ReportedError
from shared.types.session_key import DEFAULT_TENANT

MAX_NAME = 128  # characters that are logged of an unchecked name

log = get_logger(__name__)


class TurnReport:
    """Reports turns that are over.

    Attributes:
        histograms: the histograms of turns.
    """

    def __init__(self, histograms: TurnHistograms) -> None:
        self.histograms = histograms
        self._refused = LineAllowance()

    def answered(
        self,
        submission: Submission,
        request: Request,
        finish_reason: str,
        usage: Usage,
        num_turns: int,
        *,
        cancelled: bool = False,
    ) -> None:
        """Report a turn that has an answer, or a part of it if its client cancelled it."""
        key = submission.key
        self.histograms.on_finish(key.tenant, finish_reason, usage, cancelled=cancelled)
        if request.buffer_layers is not None and usage.tier_tokens:
            self.histograms.on_join(request.buffer_layers, usage.tier_tokens)
        _annotate(trace.get_current_span(), request, finish_reason, usage)
        log.info(
            "turn",
            **_names_of(submission),
            turns=num_turns,
            finish_reason=finish_reason,
            priority=submission.priority,
            **_as_fields(usage),
        )

    def replayed(self, submission: Submission, record: TurnRecord) -> None:
        """Report a repeated submission that was answered from the turn's record."""
        self.histograms.ended.add("replayed")
        log.info(
            "turn",
            **_names_of(submission),
            turns=record.turn + 1,
            finish_reason="replayed",
            output_tokens=len(record.output_ids),
        )

    def failed(self, submission: Submission, error: ReportedError) -> None:
        """Report a turn without an answer: it failed, was cancelled, or was handed back."""
        cancelled = isinstance(error, TurnCancelledError)
        self.histograms.on_failure(submission.key.tenant, error.reason, cancelled=cancelled)
        log.info(
            "turn",
            **_names_of(submission),
            finish_reason="cancelled" if cancelled else "failed",
            error=error.reason,
            retryable=error.retryable,
        )

    def turned_away(self, client: str, names: TurnNames, error: ReportedError) -> None:
        """Report a turn that was refused before it began; its names are unchecked."""
        self.histograms.on_refusal(names.tenant or DEFAULT_TENANT, error.reason)
        left_out = self._refused.take(client)
        if left_out is None:
            return
        log.info(
            "turn",
            session=names.session_id[:MAX_NAME],
            tenant=names.tenant[:MAX_NAME],
            client=client,
            request_id=names.request_id[:MAX_NAME],
            finish_reason="refused",
            error=error.reason,
            retryable=error.retryable,
            **({"more": left_out} if left_out else {}),
        )


@contextmanager
def turn_span(submission: Submission) -> Iterator[Span]:
    """Open the span of a turn that runs in this task, and bind its names to its log lines."""
    key = submission.key
    structlog.contextvars.bind_contextvars(session=str(key), request_id=submission.request_id)
    attributes = {
        "session.id": key.session_id,
        "tenant": key.tenant,
        "client": submission.client,
        "request.id": submission.request_id,
    }
    with child_span("turn", attributes) as span:
        yield span


def _names_of(submission: Submission) -> dict[str, str]:
    """Return the fields of a log line that say whose turn it is."""
    key = submission.key
    return {
        "session": str(key),
        "tenant": key.tenant,
        "client": submission.client,
        "request_id": submission.request_id,
    }


def _as_fields(usage: Usage) -> dict[str, object]:
    """Return a turn's usage as fields of its log line: times in seconds, to the microsecond."""
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in asdict(usage).items()
    }


def _annotate(span: Span, request: Request, finish_reason: str, usage: Usage) -> None:
    """Set the turn's outcome in its span, and add the spans of its phases."""
    span.set_attributes(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.response.finish_reasons": [finish_reason],
            "gen_ai.usage.input_tokens": usage.history_tokens + usage.new_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
            "kv.history_tokens": usage.history_tokens,
            "kv.reused_tokens": usage.reused_tokens,
            "kv.recomputed_tokens": usage.recomputed_tokens,
            "kv.recompute_reason": usage.recompute_reason,
            "ttft_s": usage.ttft_s,
            "tpot_s": usage.tpot_s,
            "stall_s": usage.stall_s,
            "preemptions": usage.preemptions,
        }
    )
    if request.buffer_layers is not None:
        span.set_attribute("kv.buffer_layers", request.buffer_layers)
    for name, instants in (
        ("queue", (request.arrived_ns, request.admitted_ns)),
        ("prefill", (request.started_ns, request.first_token_ns)),
        ("decode", (request.first_token_ns, request.finished_ns)),
    ):
        _add_phase(span, name, instants)


def _add_phase(span: Span, name: str, instants: Sequence[int]) -> None:
    """Add the span of a phase, if the turn has completed it."""
    began_ns, ended_ns = instants
    if began_ns and ended_ns:  # 0: the turn did not get so far
        record_past_span(span, name, began_ns, ended_ns, {})
