"""Turns and sessions as messages to clients."""

from dataclasses import asdict

from inference_svc.core.answers import AnswerToken
from inference_svc.core.discards import Discard
from inference_svc.core.transcript_format import Transcript
from inference_svc.core.turn_record import Accepted, Started, Tokens, TurnEvent, TurnRecord, Usage
from shared.pb.inference.v1 import inference_pb2 as pb


def encode_event(event: TurnEvent) -> pb.TurnEvent:
    """One event of a turn's stream."""
    if isinstance(event, Accepted):
        return pb.TurnEvent(
            accepted=pb.Accepted(
                session_id=event.session_id,
                turn=event.turn,
                request_id=event.request_id,
                queue_length=event.queue_length,
                replayed=event.is_replayed,
            )
        )
    if isinstance(event, Started):
        return pb.TurnEvent(started=pb.Started(**asdict(event)))
    if isinstance(event, Tokens):
        return pb.TurnEvent(tokens=pb.Tokens(tokens=map(_encode_token, event.tokens)))
    return pb.TurnEvent(
        finished=pb.Finished(
            finish_reason=event.finish_reason,
            text=event.text,
            usage=_encode_usage(event.usage),
            turns=event.turns,
        )
    )


def encode_session(transcript: Transcript, *, is_busy: bool, with_turns: bool) -> pb.Session:
    """A session as its transcript has it."""
    header, context_ids = transcript.header, transcript.context_ids
    return pb.Session(
        tenant=header.tenant,
        model=header.model,
        session_id=header.session_id,
        turns=len(transcript.turns),
        num_tokens=transcript.num_tokens,
        busy=is_busy,
        ended=transcript.has_ended,
        turn_records=map(_encode_record, transcript.turns) if with_turns else (),
        context_tokens=len(context_ids),
        dropped_tokens=transcript.num_tokens - len(context_ids),
        context_ids=context_ids if with_turns else (),
        discards=(_encode_discard(*found) for found in transcript.all_discards if with_turns),
    )


def _encode_record(record: TurnRecord) -> pb.TurnRecord:
    return pb.TurnRecord(
        turn=record.turn,
        request_id=record.request_id,
        input_ids=record.input_ids,
        output_ids=record.output_ids,
        text=record.text,
        finish_reason=record.finish_reason,
        usage=_encode_usage(record.usage),
        created_unix_s=record.created_unix_s,
    )


def _encode_discard(turn: int, discard: Discard) -> pb.Discarded:
    return pb.Discarded(
        turn=turn,
        after_tokens=discard.after_tokens,
        ranges=(pb.TokenRange(start=start, end=end) for start, end in discard.ranges),
        reason=discard.reason,
    )


def _encode_usage(usage: Usage) -> pb.Usage:
    return pb.Usage(**asdict(usage))


def _encode_token(token: AnswerToken) -> pb.Token:
    top = [pb.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top]
    return pb.Token(token_id=token.token_id, text=token.text, logprob=token.logprob, top=top)
