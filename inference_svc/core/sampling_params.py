"""How the next token is chosen, and when an answer ends. Pure: values, no choosing."""

from dataclasses import dataclass
from math import isfinite

from inference_svc.core.errors import InvalidSamplingError

MAX_TOP_LOGPROBS = 20  # what one token event may carry
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256  # a stop string delays the stream by its own length


@dataclass(frozen=True)
class SamplingParams:
    """One turn's sampling; the defaults are greedy decoding.

    Attributes:
        temperature: 0 is greedy (the lowest id wins a tie).
        top_k: keep the k most likely tokens; 0: off.
        top_p: keep the smallest set whose probability reaches it, in (0, 1].
        min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1).
        repetition_penalty: divides (or, if negative, multiplies) the logits of tokens seen; 1: off.
        seed: of the random draw; the draw of step i depends on (seed, i) alone.
        logprobs: 0: none; n: report the token's and the n most likely tokens' log-probabilities.
        stop: the answer ends before the first of these strings.
        max_tokens: upper bound of the answer's length.
        ignore_eos: go on after an end-of-turn token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int = 0
    stop: tuple[str, ...] = ()
    max_tokens: int = 256
    ignore_eos: bool = False

    def check(self) -> None:
        """Raise InvalidSamplingError that lists every value out of range."""
        problems = [text for text, is_right in self._rules() if not is_right]
        if problems:
            raise InvalidSamplingError("; ".join(problems), "correct these sampling values")

    def _rules(self) -> list[tuple[str, bool]]:
        """Pairs of (what to say, whether the value is right)."""
        lengths = [len(text) for text in self.stop]
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
            (
                f"logprobs {self.logprobs} is more than {MAX_TOP_LOGPROBS}",
                self.logprobs <= MAX_TOP_LOGPROBS,
            ),
            ("max_tokens 0 leaves no room for an answer", self.max_tokens > 0),
            (
                f"{len(self.stop)} stop strings are more than {MAX_STOP_STRINGS}",
                len(self.stop) <= MAX_STOP_STRINGS,
            ),
            (
                f"a stop string is empty or longer than {MAX_STOP_CHARACTERS} characters",
                all(0 < length <= MAX_STOP_CHARACTERS for length in lengths),
            ),
        ]
