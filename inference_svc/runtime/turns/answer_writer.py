"""Turns sampled tokens into the events of one turn, and into its record when it is complete."""

import time
from collections.abc import Sequence
from typing import Any

from inference_svc.core.scheduling.request import Request
from inference_svc.core.stopping import AnswerToken, FinishReason, GrowingAnswer
from inference_svc.core.turn_events import Started, Tokens
from inference_svc.core.turn_record import TurnRecord, Usage
from inference_svc.runtime.compute.sampling import Sampled
from inference_svc.runtime.engine.engine_job import EngineJob, LoadOutcome
from inference_svc.runtime.turns.detokenize import Detokenizer
from inference_svc.runtime.turns.turn import Turn
from shared.units import NS_PER_S


class AnswerWriter:
    """The engine's sink for one turn.

    How much of the history was reused is known at the end only: a load may still fail.

    Attributes:
        tokens: the answer so far, as it was shown.
        finish_reason: None until the answer ends.
    """

    def __init__(
        self,
        turn: Turn,
        answer: GrowingAnswer,
        tokenizer: Any | None,
        prompt_ids: Sequence[int],
        history_tokens: int,
    ) -> None:
        self.tokens: list[AnswerToken] = []
        self.finish_reason: FinishReason | None = None
        self._turn = turn
        self._answer = answer
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._history_tokens = history_tokens

    def started(self, request: Request, outcome: LoadOutcome) -> None:
        """See TurnSink."""
        # Another session may have computed more of this prompt than this one has.
        self._history_tokens = max(self._history_tokens, outcome.tokens)
        queue_s = (request.admitted_ns - request.arrived_ns) / NS_PER_S
        self._turn.publish(Started(self._history_tokens, outcome.tokens, queue_s))

    def sampled(self, token: Sampled) -> bool:
        """See TurnSink."""
        text = self._detokenizer.push(token.token_id)
        shown, self.finish_reason = self._answer.push(
            AnswerToken(token.token_id, text, token.logprob, token.top)
        )
        if self._answer.cut_text:
            shown = [*shown, *self._encode_cut(self._answer.cut_text)]
        if shown:
            self.tokens += shown
            self._turn.publish(Tokens(tuple(shown)))
        return self.finish_reason is not None

    def computed_ids(self, request: Request) -> list[int]:
        """Tokens of the prompt and of the answer that have KV."""
        kept = request.token_ids[: request.prompt_tokens + len(self._answer.kept)]
        return kept[: request.computed_tokens]

    def record(self, job: EngineJob, turn: int, history_ids: Sequence[int]) -> TurnRecord:
        """The complete turn; `history_ids` are the session's tokens before it."""
        request, submission = job.request, self._turn.submission
        has_logprobs = submission.sampling.logprobs > 0
        total_tokens = request.prompt_tokens + len(self.tokens)
        return TurnRecord(
            turn=turn,
            request_id=submission.request_id,
            request_digest=submission.digest,
            input_ids=tuple(request.token_ids[len(history_ids) : request.prompt_tokens]),
            output_ids=tuple(token.token_id for token in self.tokens),
            pieces=tuple(token.text for token in self.tokens),
            logprobs=tuple(token.logprob for token in self.tokens) if has_logprobs else (),
            top_logprobs=tuple(token.top for token in self.tokens) if has_logprobs else (),
            uncomputed_tokens=total_tokens - len(self.computed_ids(request)),
            finish_reason=str(self.finish_reason),
            usage=self.usage(job),
            created_unix_s=time.time(),
        )

    def usage(self, job: EngineJob) -> Usage:
        """What the turn has cost so far; also of one that was cancelled."""
        request, outcome = job.request, job.outcome
        now_ns = time.monotonic_ns()
        end_ns = request.finished_ns or now_ns
        first_ns = request.first_token_ns or end_ns
        reused_tokens = min(outcome.tokens, self._history_tokens)
        recomputed_tokens = self._history_tokens - reused_tokens
        sampled_tokens = len(request.output_ids)
        return Usage(
            history_tokens=self._history_tokens,
            reused_tokens=reused_tokens,
            recomputed_tokens=recomputed_tokens,
            new_tokens=request.prompt_tokens - self._history_tokens,
            output_tokens=len(self.tokens),
            tier_tokens=outcome.tier_tokens,
            queue_s=((request.admitted_ns or now_ns) - request.arrived_ns) / NS_PER_S,
            load_s=outcome.load_s,
            prefill_s=(first_ns - (request.started_ns or first_ns)) / NS_PER_S,
            ttft_s=(first_ns - request.arrived_ns) / NS_PER_S,
            tpot_s=(end_ns - first_ns) / NS_PER_S / max(1, sampled_tokens - 1),
            total_s=(now_ns - request.arrived_ns) / NS_PER_S,
            recompute_reason=outcome.reason if recomputed_tokens else "",
            preemptions=request.num_preemptions,
            stall_s=outcome.stall_s,
        )

    def _encode_cut(self, text: str) -> list[AnswerToken]:
        """Tokens for what stands before a stop string that begins inside a token."""
        assert self._tokenizer is not None, "without a tokenizer there is no text"  # noqa: S101
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        texts = [text, *[""] * (len(token_ids) - 1)]
        return [AnswerToken(*pair) for pair in zip(token_ids, texts, strict=True)]
