"""Answers: how their tokens are sampled, when they end, and which tokens may be shown already.

Pure: values, and no sampling. Tokens come with the text that they add
(`runtime/turns/answer_writer.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, isnan

from inference_svc.core.errors import InvalidSamplingError
from inference_svc.core.grammar import Grammar
from inference_svc.core.turn_record import AnswerToken, FinishReason

MAX_TOP_LOGPROBS = 20  # what one token event may carry
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256  # a stop string delays the stream by its own length
MAX_STOP_TOKENS = 64
MAX_BIASED_TOKENS = 300
MAX_PENALTY = 2.0  # OpenAI's bounds, of both penalties and of a bias
MAX_BIAS = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """One turn's sampling; the defaults are greedy decoding.

    Attributes:
        temperature: 0 is greedy (the lowest id wins a tie).
        top_k: keep the k most likely tokens; 0: off.
        top_p: keep the smallest set whose probability reaches it, in (0, 1].
        min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1).
        repetition_penalty: divides (or, if negative, multiplies) the logits of tokens seen; 1: off.
        frequency_penalty: subtracted from a token's logit for each time that the answer contains
            it.
        presence_penalty: subtracted once if the answer contains the token at all.
        logit_bias: by token id, added to its logit.
        seed: seed of the random draws; the draw of step i depends on (seed, i) alone.
        logprobs: 0: none; n: report the token's and the n most likely tokens' log-probabilities.
        stop: the answer ends before the first of these strings.
        stop_token_ids: the answer ends with the first of these tokens, as with an end-of-turn
            token, and contains it.
        max_tokens: upper bound of the answer's length.
        min_tokens: number of tokens before anything except `max_tokens` may end the answer.
        ignore_eos: whether the answer continues after an end-of-turn token.
        grammar: the grammar that the answer follows. The answer ends where the grammar does, and
            only `max_tokens` cuts it: stop strings and stop tokens do not count. None: any text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    grammar: Grammar | None = None

    @property
    def has_offsets(self) -> bool:
        """Whether anything is added to logits: a bias, or penalties for tokens of the answer."""
        return bool(self.frequency_penalty or self.presence_penalty or self.logit_bias)

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Return the ids of tokens that end the answer; `eos_ids` are the end-of-turn tokens."""
        if self.grammar is not None:
            return eos_ids
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_ids)

    def check(self) -> None:
        """Check the values, and the length of a grammar.

        Raises:
            InvalidSamplingError: it lists every value out of range.
            InvalidGrammarError: the grammar is too long.
        """
        problems = [text for text, is_right in self._rules() if not is_right]
        if problems:
            raise InvalidSamplingError("; ".join(problems), "correct these sampling values")
        if self.grammar is not None:
            self.grammar.check()

    def _rules(self) -> list[tuple[str, bool]]:
        """Return pairs of (message, whether the value is valid)."""
        return [
            (
                f"temperature {self.temperature:g} is not in [0, 100]",
                isfinite(self.temperature) and 0 <= self.temperature <= 100,
            ),
            (f"top_p {self.top_p:g} is not in (0, 1]", 0 < self.top_p <= 1),
            (f"min_p {self.min_p:g} is not in [0, 1)", 0 <= self.min_p < 1),
            (
                f"repetition_penalty {self.repetition_penalty:g} is not in (0, 100]",
                0 < self.repetition_penalty <= 100,
            ),
            *self._rules_of_offsets(),
            (
                f"logprobs {self.logprobs} is more than {MAX_TOP_LOGPROBS}",
                self.logprobs <= MAX_TOP_LOGPROBS,
            ),
            *self._rules_of_ends(),
        ]

    def _rules_of_offsets(self) -> list[tuple[str, bool]]:
        """Return the rules for values that are added to logits."""
        penalties = {
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }
        worst = max(self.logit_bias.values(), key=_magnitude, default=0.0)
        return [
            *(
                (
                    f"{name} {penalty:g} is not in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]",
                    _magnitude(penalty) <= MAX_PENALTY,
                )
                for name, penalty in penalties.items()
            ),
            (
                f"a logit_bias of {worst:g} is not in [-{MAX_BIAS:g}, {MAX_BIAS:g}]",
                _magnitude(worst) <= MAX_BIAS,
            ),
            (
                f"logit_bias names {len(self.logit_bias)} tokens, more than {MAX_BIASED_TOKENS}",
                len(self.logit_bias) <= MAX_BIASED_TOKENS,
            ),
        ]

    def _rules_of_ends(self) -> list[tuple[str, bool]]:
        """Return the rules for values that end the answer."""
        lengths = [len(text) for text in self.stop]
        return [
            ("max_tokens 0 leaves no room for an answer", self.max_tokens > 0),
            (
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}",
                self.min_tokens <= self.max_tokens,
            ),
            (
                f"{len(self.stop)} stop strings are more than {MAX_STOP_STRINGS}",
                len(self.stop) <= MAX_STOP_STRINGS,
            ),
            (
                f"a stop string is empty or longer than {MAX_STOP_CHARACTERS} characters",
                all(0 < length <= MAX_STOP_CHARACTERS for length in lengths),
            ),
            (
                f"{len(self.stop_token_ids)} stop_token_ids are more than {MAX_STOP_TOKENS}",
                len(self.stop_token_ids) <= MAX_STOP_TOKENS,
            ),
            (
                (
                    "an answer by a grammar ends where the grammar does, so ignore_eos and "
                    "min_tokens are not possible"
                ),
                self.grammar is None or not (self.ignore_eos or self.min_tokens),
            ),
        ]


def _magnitude(value: float) -> float:
    """Return the distance from 0; for NaN more than any bound."""
    return inf if isnan(value) else abs(value)


class GrowingAnswer:
    """The answer of one turn while it is sampled.

    Text that could be the beginning of a stop string is held back together with its tokens; a stop
    string may span tokens and may begin inside one. The first `min_tokens` tokens are never part of
    a stop string: they are shown at once, and only text of later tokens is searched. So the answer
    contains them all, however it ends.

    Only `max_tokens` ends an answer within a call that a grammar binds it to: stop strings are
    searched in the text before and behind it.

    Invariants:
        1. released text never contains any part of the stop string that ends the answer;
        2. tokens are released in order, each at most once;
        3. neither a token nor a text ends an answer of at most `min_tokens` tokens.

    Attributes:
        kept: the tokens of the answer, in order, without those of a stop string.
        cut_text: when a stop string begins inside a token, the part of its text that is kept.
        stop_string: the stop string that ended it; "" if none did.
    """

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int]) -> None:
        self._params = params
        self._end_ids = params.end_ids(eos_ids)
        self._stops = () if params.grammar is not None else params.stop
        self._held: list[AnswerToken] = []
        self._num_sampled = 0
        self.kept: list[AnswerToken] = []
        self.cut_text = ""
        self.stop_string = ""

    def push(
        self, token: AnswerToken, *, is_in_call: bool = False
    ) -> tuple[list[AnswerToken], FinishReason | None]:
        """Add the next sampled token.

        Args:
            token: the token.
            is_in_call: whether it is within a call, and does not end it; see `Sampled`.

        Returns:
            The tokens to show now, and why the answer ends; None: it does not.
        """
        self._held.append(token)
        self._num_sampled += 1
        is_full = self._num_sampled >= self._params.max_tokens
        if is_in_call or self._num_sampled <= self._params.min_tokens:
            return self._release(len(self._held)), FinishReason.LENGTH if is_full else None
        held_text = "".join(held.text for held in self._held)
        cut, self.stop_string = self._find_stop(held_text)
        if self.stop_string:
            return self._cut_at(cut), FinishReason.STOP
        if token.token_id in self._end_ids:
            return self._release(len(self._held)), FinishReason.STOP
        if is_full:
            return self._release(len(self._held)), FinishReason.LENGTH
        return self._release(self._num_tokens_within(self._num_safe_characters(held_text))), None

    @property
    def num_held(self) -> int:
        """Number of tokens that may not be shown yet."""
        return len(self._held)

    def end(self) -> list[AnswerToken]:
        """Return the tokens held back, because no other token follows."""
        return self._release(len(self._held))

    def _find_stop(self, text: str) -> tuple[int, str]:
        """Return the position of the first stop string in the text, and the string; "": none."""
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=(0, ""))

    def _num_safe_characters(self, text: str) -> int:
        """Count the first characters that no later text can make part of a stop string."""
        for start in range(len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)

    def _num_tokens_within(self, num_characters: int) -> int:
        """Count the held tokens that lie entirely within the first characters of the held text.

        Tokens without text at their end do not count: they may be pieces of the next character.
        """
        num_tokens = end = 0
        for index, held in enumerate(self._held):
            end += len(held.text)
            if end > num_characters:
                break
            if held.text or not self._stops:
                num_tokens = index + 1
        return num_tokens

    def _cut_at(self, num_characters: int) -> list[AnswerToken]:
        """Keep the tokens before the stop string, and the text before it in the token it splits."""
        released = self._release(self._num_tokens_within(num_characters))
        shown = sum(len(token.text) for token in released)
        self.cut_text = "".join(held.text for held in self._held)[: num_characters - shown]
        self._held.clear()
        return released

    def _release(self, num_tokens: int) -> list[AnswerToken]:
        released, self._held = self._held[:num_tokens], self._held[num_tokens:]
        self.kept += released
        return released
