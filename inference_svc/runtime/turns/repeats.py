"""A turn that is submitted again: the same one, answered from its record."""

from inference_svc.core.errors import RequestIdReusedError
from inference_svc.core.stopping import AnswerToken
from inference_svc.core.submission import Submission
from inference_svc.core.turn_events import Accepted, Finished, Started, Tokens
from inference_svc.core.turn_record import TurnRecord
from inference_svc.runtime.turns.turn import Turn


def replay(submission: Submission, record: TurnRecord) -> Turn:
    """A turn that is over, with the events of its record."""
    logprobs = record.logprobs or (None,) * len(record.output_ids)
    top = record.top_logprobs or ((),) * len(record.output_ids)
    rows = zip(record.output_ids, record.pieces, logprobs, top, strict=True)
    usage = record.usage
    turn = Turn(submission)
    turn.publish(
        Accepted(submission.key.session_id, record.turn, record.request_id, 0, is_replayed=True),
        Started(usage.history_tokens, usage.reused_tokens, usage.queue_s),
        Tokens(tuple(AnswerToken(*row) for row in rows)),
        Finished(record.finish_reason, record.text, usage, record.turn + 1),
    )
    turn.close()
    return turn


def check_same(submission: Submission, digest: str) -> None:
    """See that a repeat asks for what the turn of its request id was asked for.

    Raises:
        RequestIdReusedError: it does not.
    """
    if submission.digest and submission.digest != digest:
        raise RequestIdReusedError(
            f"request id {submission.request_id!r} was used with another input or sampling",
            "make a new request id for each new turn",
        )
