"""Makes the events of a turn from sampled tokens, and the turn's record when it is complete.

Published text never ends within a character: see `Detokenizer`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from inference_svc.core.answers import GrowingAnswer
from inference_svc.core.ranges import num_in
from inference_svc.core.scheduling.request import Request
from inference_svc.core.turn_record import (
    AnswerToken,
    Discard,
    FinishReason,
    Started,
    Tokens,
    TurnRecord,
    Usage,
    kept_among,
)
from inference_svc.runtime.compute.sampling import Sampled
from inference_svc.runtime.engine.engine_request import EngineRequest
from inference_svc.runtime.turns.turn import Turn
from inference_svc.runtime.turns.turn_prompt import Prompt
from shared.types.histogram import Histogram
from shared.types.units import NS_PER_S

# Last tokens of the prompt: the answer's first token is decoded behind them, as a continuation.
NUM_CONTEXT_TOKENS = 6
MAX_HELD_TOKENS = 8  # a character has at most four bytes: more held tokens are not a character
_QUICKEST = ("hbm", "dram", "ssd")  # tiers, the fastest first
INCOMPLETE = "\ufffd"  # decoders write it for bytes that are not a character


class Detokenizer:
    """Decodes one answer as it is sampled; without a tokenizer every token's text is empty.

    A byte-level token may be part of a character, and a decoder may treat the first token of a text
    differently (a leading space). So each token is decoded together with a few before it, and only
    the text that it adds is returned.

    *Source:* the two-offset window of Hugging Face's text-generation-inference.

    Args:
        tokenizer: the model's tokenizer; None: it has none.
        prompt_ids: the tokens that the answer continues.
        marks: texts of the special tokens that are shown, by token id; others are not shown.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        prompt_ids: Sequence[int],
        marks: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._marks = marks or {}
        self._ids = list(prompt_ids[-NUM_CONTEXT_TOKENS:])
        self._window_start = 0
        self._num_read = len(self._ids)

    def push(self, token_id: int) -> str:
        """Return the text that the next token adds; empty while a character is incomplete."""
        if self._tokenizer is None:
            return ""
        mark = self._marks.get(token_id)
        if mark is not None:
            return self._flush_held() + mark
        self._ids.append(token_id)
        before = self._decode(self._ids[self._window_start : self._num_read])
        text = self._decode(self._ids[self._window_start :])
        is_complete = len(text) > len(before) and not text.endswith(INCOMPLETE)
        if not is_complete and len(self._ids) - self._num_read < MAX_HELD_TOKENS:
            return ""
        self._window_start, self._num_read = self._num_read, len(self._ids)
        return text[len(before) :]

    def _flush_held(self) -> str:
        """Return the text of held tokens, whose character stays incomplete now."""
        before = self._decode(self._ids[self._window_start : self._num_read])
        text = self._decode(self._ids[self._window_start :])
        self._window_start = self._num_read = len(self._ids)
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class AnswerWriter:
    """The engine's sink for one turn: publishes its tokens, and makes its record.

    How much of the history was reused is known only at the end: a load may still fail.

    Args:
        turn: the turn.
        answer: finds the answer's end.
        tokenizer: the model's tokenizer; None: it has none.
        prompt_ids: the prompt's tokens.
        history_tokens: how many of them are the session's history.
        itl_s: observes the seconds between two tokens.
        marks: texts of the special tokens that are shown, by token id.
        beginning: the beginning of the answer's text that the prompt contains; it is published
            with the first token, and no stop string is searched in it.

    Attributes:
        tokens: the answer's tokens that have been published.
        finish_reason: why the answer has ended; None: it has not.
    """

    def __init__(
        self,
        turn: Turn,
        answer: GrowingAnswer,
        tokenizer: Any | None,
        prompt_ids: Sequence[int],
        history_tokens: int,
        itl_s: Histogram,
        marks: Mapping[int, str] | None = None,
        beginning: str = "",
    ) -> None:
        self.tokens: list[AnswerToken] = []
        self.finish_reason: FinishReason | None = None
        self._turn = turn
        self._answer = answer
        self._tokenizer = tokenizer
        self._beginning = beginning
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, marks)
        self._history_tokens = history_tokens
        self._itl_s = itl_s
        self._sampled_ns = 0  # when the last token was sampled, on the monotonic clock
        self._prompt_tokens = len(prompt_ids)

    def on_start(self, request: EngineRequest) -> None:
        """See TurnSink."""
        # Another session may have computed more of this prompt than this session has.
        self._history_tokens = max(self._history_tokens, request.found_tokens)
        queue_s = (request.admitted_ns - request.arrived_ns) / NS_PER_S - request.ahead_s
        new_tokens = self._prompt_tokens - self._history_tokens
        self._turn.publish(Started(self._history_tokens, request.found_tokens, queue_s, new_tokens))

    def on_token(self, token: Sampled) -> bool:
        """See TurnSink."""
        now_ns = time.monotonic_ns()
        if self._sampled_ns:
            self._itl_s.observe((now_ns - self._sampled_ns) / NS_PER_S)
        self._sampled_ns = now_ns
        text = self._detokenizer.push(token.token_id)
        shown, self.finish_reason = self._answer.push(
            AnswerToken(token.token_id, text, token.logprob, token.top),
            is_in_call=token.is_in_call,
        )
        if self._answer.cut_text:
            shown = [*shown, *self._encode_cut(self._answer.cut_text)]
        self._show(shown)
        return self.finish_reason is not None

    def on_window_full(self) -> None:
        """See TurnSink."""
        self.finish_reason = FinishReason.LENGTH
        self._show(self._answer.end())

    @property
    def text(self) -> str:
        """The answer's text so far."""
        return "".join(token.text for token in self.tokens)

    @property
    def stop_string(self) -> str:
        """The stop string that ended the answer; "" if none did."""
        return self._answer.stop_string

    def kept_ids(self, request: Request) -> list[int]:
        """Return the context's tokens without those of a stop string and a token that it cuts."""
        num_cut = request.num_sampled - len(self._answer.kept)
        return request.token_ids[: len(request.token_ids) - num_cut]

    def computed_ids(self, request: Request) -> list[int]:
        """Return those of `kept_ids` that have KV."""
        return self.kept_ids(request)[: request.computed_tokens]

    def context_ids(self, request: Request) -> list[int]:
        """Return the context after the turn.

        Where a stop string begins inside a token, new tokens spell the part of it that is kept.
        """
        new = self.tokens[len(self._answer.kept) :]
        return [*self.kept_ids(request), *(token.token_id for token in new)]

    def record(
        self,
        request: EngineRequest,
        turn: int,
        prompt: Prompt,
    ) -> TurnRecord:
        """Return the record of the complete turn.

        Args:
            request: the turn's request.
            turn: the turn's index in its session.
            prompt: the turn's prompt.
        """
        submission = self._turn.submission
        has_logprobs = submission.sampling.logprobs > 0
        uncomputed_tokens = len(self.context_ids(request)) - len(self.computed_ids(request))
        discards = (*prompt.discards, *self._mid_turn_discards(request, len(prompt.input_ids)))
        digests = submission.digests_in(request.key.session_id, self.text)
        return TurnRecord(
            turn=turn,
            request_id=submission.request_id,
            request_digest=submission.digest,
            input_ids=tuple(prompt.input_ids),
            output_ids=tuple(token.token_id for token in self.tokens),
            pieces=tuple(token.text for token in self.tokens),
            logprobs=tuple(token.logprob for token in self.tokens) if has_logprobs else (),
            top_logprobs=tuple(token.top for token in self.tokens) if has_logprobs else (),
            uncomputed_tokens=uncomputed_tokens,
            finish_reason=str(self.finish_reason),
            usage=self.usage(request, discards),
            created_unix_s=time.time(),
            discards=discards,
            grafts=tuple(request.grafts),
            system_tokens=prompt.system_tokens,
            is_text=prompt.is_text,
            stop_string=self.stop_string,
            tools_digest=submission.tools_digest,
            template_arguments=prompt.template_arguments,
            said=digests.said,
            history=digests.history,
            response=submission.response_id,
        )

    def usage(self, request: EngineRequest, discards: Sequence[Discard] = ()) -> Usage:
        """Return the turn's usage so far; it need not have finished."""
        outcome = request.outcome
        now_ns = time.monotonic_ns()
        end_ns = request.finished_ns or now_ns
        first_ns = request.first_token_ns or end_ns
        reused_tokens = min(request.found_tokens, self._history_tokens)
        recomputed_tokens = self._history_tokens - reused_tokens
        return Usage(
            history_tokens=self._history_tokens,
            reused_tokens=reused_tokens,
            recomputed_tokens=recomputed_tokens,
            new_tokens=self._prompt_tokens - self._history_tokens,
            output_tokens=len(self.tokens),
            tier_tokens=_less_tokens(outcome.tier_tokens, request.ahead_tokens),
            queue_s=((request.admitted_ns or now_ns) - request.arrived_ns) / NS_PER_S
            - request.ahead_s,
            load_s=outcome.load_s,
            prefill_s=(first_ns - (request.started_ns or first_ns)) / NS_PER_S + request.ahead_s,
            ttft_s=(first_ns - request.arrived_ns) / NS_PER_S,
            tpot_s=(end_ns - first_ns) / NS_PER_S / max(1, request.num_sampled - 1),
            total_s=(now_ns - request.arrived_ns) / NS_PER_S,
            recompute_reason=outcome.reason if recomputed_tokens else "",
            preemptions=request.num_preemptions,
            stall_s=outcome.stall_s,
            dropped_tokens=sum(num_in(discard.ranges) for discard in discards),
            drafted_tokens=request.num_drafted,
            accepted_tokens=request.num_accepted,
            kept_tokens=min(reused_tokens, kept_among(request.grafts, outcome.tokens)),
            healed_tokens=sum(graft.healed_tokens for graft in request.grafts),
        )

    def _mid_turn_discards(self, request: EngineRequest, num_input: int) -> list[Discard]:
        """Return the discards made during the answer, as they are recorded.

        The last one may have been made while tokens were held back that then turned out to be a
        stop string. The record lacks these tokens, but the KV of the others was computed over them:
        so the record of the discard names the lineage.
        """
        most_tokens = num_input + len(self.tokens)
        discards = [
            replace(discard, after_tokens=min(discard.after_tokens, most_tokens))
            for discard in request.discards
        ]
        if discards and request.discards[-1].after_tokens > num_input + len(self._answer.kept):
            discards[-1] = replace(discards[-1], lineage=request.lineage)
        return discards

    def _show(self, tokens: Sequence[AnswerToken]) -> None:
        """Publish tokens; the answer's first one gets the beginning before its text."""
        if not tokens:
            return
        if self._beginning:
            first, *later = tokens
            tokens = [replace(first, text=self._beginning + first.text), *later]
            self._beginning = ""
        self.tokens += tokens
        self._turn.publish(Tokens(tuple(tokens)))

    def _encode_cut(self, text: str) -> list[AnswerToken]:
        """Encode the text before a stop string that begins inside a token."""
        assert self._tokenizer is not None, "without a tokenizer there is no text"  # noqa: S101
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        texts = [text, *[""] * (len(token_ids) - 1)]
        return [AnswerToken(*pair) for pair in zip(token_ids, texts, strict=True)]


def _less_tokens(tier_tokens: Mapping[str, int], num_tokens: int) -> dict[str, int]:
    """Subtract a number of tokens from a count by tiers, from the fastest tier first."""
    left = {}
    for tier in sorted(tier_tokens, key=_QUICKEST.index):
        num_left_out = min(num_tokens, tier_tokens[tier])
        num_tokens -= num_left_out
        if tier_tokens[tier] > num_left_out or not num_left_out:
            left[tier] = tier_tokens[tier] - num_left_out
    return left
