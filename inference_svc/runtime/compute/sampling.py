"""Sampling: chooses the next token from a row of logits.

Everything is computed in numpy on the CPU, in float64 from float32 logits: results are the same on
every device. The random number of step i is a hash of (seed, i), not a generator's state, so that a
replayed turn draws the same numbers.

Order: 1. repetition penalty; 2. bias, frequency and presence penalty (`TokenOffsets`); 3. end
tokens before `min_tokens` are masked; 4. tokens that the grammar does not allow are masked;
5. temperature, top-k, top-p, min-p. Greedy decoding takes the most likely token after step 4.
Reported log-probabilities are those of the model's own distribution, before any of these.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from inference_svc.core.answers import SamplingParams
from inference_svc.core.errors import EngineFailedError
from inference_svc.runtime.compute.answer_grammar import AnswerGrammar, CallGrammar, Logits

Row = npt.NDArray[np.float64]


class Sampled(NamedTuple):
    """One chosen token.

    Attributes:
        logprob: natural log of its probability, at most 0; None unless requested.
        top: the most likely tokens' ids with their log-probabilities, most likely first.
        is_in_call: whether the token is inside a constrained tool call, and does not end it.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    is_in_call: bool = False


class TokenOffsets:
    """Offsets added to logits: each token's bias, less its penalties for repeating in the answer.

    The penalties count the tokens of the answer, not those of the prompt: a token that was drawn
    c > 0 times loses frequency_penalty * c + presence_penalty.

    *Source:* OpenAI API reference, "Chat" (`logit_bias`) and "Frequency and presence penalties";
    vLLM counts the same tokens.

    Attributes:
        values: [vocab] float32.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.values: Logits = np.zeros(vocab_size, np.float32)
        self._params = params
        self._counts: Counter[int] = Counter()
        for token_id, bias in params.logit_bias.items():
            self.values[token_id] = bias

    def count(self, token_id: int) -> None:
        """Count a token of the answer, and update its penalty."""
        params = self._params
        self._counts[token_id] += 1
        penalty = params.frequency_penalty * self._counts[token_id] + params.presence_penalty
        self.values[token_id] = params.logit_bias.get(token_id, 0.0) - penalty


class Sampler:
    """The sampler of one turn's answer, with its counts of drawn tokens.

    A request keeps its sampler from arrival to end. The sampler counts its own draws, because a
    discard in the middle of the answer removes tokens from the request. So a turn continues exactly
    as it would have after a preemption, a truncation, or a load that failed and was recomputed.

    Args:
        params: the turn's sampling parameters.
        eos_ids: ids of the model's end-of-turn tokens.
        grammar: constrains the answer, or its tool calls; None: any token may come.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: frozenset[int] = frozenset(),
        grammar: AnswerGrammar | CallGrammar | None = None,
    ) -> None:
        self._params = params
        self._step = 0
        self._grammar = grammar
        self._adjusts = params.has_offsets or params.repetition_penalty != 1.0
        self._end_ids = sorted(params.end_ids(eos_ids)) if params.min_tokens else []
        self._offsets: TokenOffsets | None = None  # made by the first step that needs them

    def start(self) -> None:
        """Start to compute the grammar's mask, while the model computes the logits."""
        if self._grammar is not None:
            self._grammar.start_mask()

    def sample(self, logits_row: Tensor, prior_token_ids: Sequence[int]) -> Sampled:
        """Choose the next token, and count it.

        Args:
            logits_row: [vocab] float32.
            prior_token_ids: prompt and answer so far, for the repetition penalty.

        Raises:
            EngineFailedError: the best logit is not finite, as when a half-precision model
                overflows; or the answer's grammar failed.
        """
        logits = logits_row.numpy(force=True)
        best = int(logits.argmax())  # the first among equals; the first NaN if there is one
        if not np.isfinite(logits[best]):
            raise EngineFailedError(
                "the model computed logits that are infinite or not numbers",
                "serve it with dtype float32 or bfloat16",
            )
        params, grammar, adjusted = self._params, self._grammar, logits
        is_free = grammar is None or grammar.is_free
        was_in_call = grammar is not None and grammar.is_in_call
        if self._adjusts or self._step < params.min_tokens or not is_free:
            adjusted = self._adjust(logits, prior_token_ids)
            best = int(adjusted.argmax())
        chosen = best if params.temperature == 0 else self._draw(adjusted)
        # A call grammar masks nothing outside of calls: it may refuse the token that begins one.
        while grammar is not None and not grammar.accept(chosen):
            adjusted = adjusted.copy()
            adjusted[chosen] = -np.inf
            best = int(adjusted.argmax())
            chosen = best if params.temperature == 0 else self._draw(adjusted)
        self._step += 1
        if self._offsets is not None:
            self._offsets.count(chosen)
        found = _report(logits, chosen, params.logprobs)
        is_in_call = was_in_call and grammar is not None and grammar.is_in_call
        return found._replace(is_in_call=True) if is_in_call else found

    def _adjust(self, logits: Logits, prior_token_ids: Sequence[int]) -> Logits:
        """Return a copy of the logits, [vocab], with penalties, bias and masks applied."""
        params, adjusted = self._params, logits.copy()
        if params.repetition_penalty != 1.0:
            _penalise(adjusted, prior_token_ids, params.repetition_penalty)
        if params.has_offsets:
            self._offsets = self._offsets or TokenOffsets(params, len(logits))
            adjusted += self._offsets.values
        if self._step < params.min_tokens:
            # A model's configuration may name end tokens beyond its logits.
            adjusted[[each for each in self._end_ids if each < len(logits)]] = -np.inf
        if self._grammar is not None:
            self._grammar.mask(adjusted)  # masks nothing where any token may come
        return adjusted

    def _draw(self, logits: Logits) -> int:
        digest = hashlib.blake2b(
            f"{self._params.seed}:{self._step}".encode(), digest_size=8
        ).digest()
        uniform = (int.from_bytes(digest, "little") >> 11) * 2.0**-53  # [0, 1), like random.random
        return draw(logits, self._params, uniform)


LARGEST_LOGIT = 1e37  # of a penalised token: in float32 a bias may still be added to it


def _penalise(logits: Logits, prior_token_ids: Sequence[int], penalty: float) -> None:
    """Make prior tokens less likely: divide positive logits, multiply negative ones; in place.

    Where a tiny penalty makes them very likely they stay finite.
    """
    seen = np.unique(np.asarray(prior_token_ids, dtype=np.int64))
    values = logits[seen]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        values = np.where(values > 0, values / penalty, values * penalty)
    logits[seen] = np.clip(values, -LARGEST_LOGIT, LARGEST_LOGIT)


LEAST_TEMPERATURE = 1e-30  # no logit divided by it overflows; one below draws the same tokens
FIRST_CANDIDATES = 256  # sorted first: a confident model draws one of these


def draw(logits: Logits, params: SamplingParams, uniform: float) -> int:
    """Draw a token by inverse transform sampling over the candidates' weights.

    Candidates are ordered from the most likely to the least, equals by id. Only as many are sorted
    as are needed to decide: to sort a whole vocabulary takes longer than a small model computes.

    Args:
        logits: [vocab], adjusted.
        params: the turn's sampling parameters.
        uniform: a random number in [0, 1).

    Returns:
        The token's id.
    """
    if 0 < params.top_k < len(logits):
        candidates = _first(logits, params.top_k)
        weights = _weights(logits[candidates], params.temperature)
        return int(candidates[_place(weights, params, uniform)])
    all_weights, num_candidates = _weights(logits, params.temperature), FIRST_CANDIDATES
    total = float(all_weights.sum())
    while 4 * num_candidates <= len(logits):  # beyond, a full sort costs no more
        candidates = _first(logits, num_candidates)
        place = _place(all_weights[candidates], params, uniform, total)
        if place < num_candidates:
            return int(candidates[place])
        num_candidates *= 8
    candidates = _first(logits, len(logits))
    return int(candidates[_place(all_weights[candidates], params, uniform)])


def _place(weights: Row, params: SamplingParams, uniform: float, total: float | None = None) -> int:
    """Return the index of the drawn candidate; `len(weights)` if it lies behind these.

    Args:
        weights: weights of the most likely candidates, in order.
        params: the turn's sampling parameters.
        uniform: see `draw`.
        total: weight of all candidates; None: `weights` has all of them.
    """
    cumulated = np.cumsum(weights)
    num_kept = num_known = len(weights)
    if params.top_p < 1.0:
        mass = params.top_p * (cumulated[-1] if total is None else total)
        num_kept = int(np.searchsorted(cumulated, mass, side="left")) + 1
    if params.min_p > 0.0:
        num_kept = min(num_kept, int(np.count_nonzero(weights >= params.min_p * weights[0])))
    if total is not None and num_kept >= num_known:
        if params.top_p < 1.0 or params.min_p > 0.0:
            return num_known  # candidates behind these may pass the filters too
        return int(np.searchsorted(cumulated, uniform * total, side="right"))
    kept = cumulated[:num_kept]
    return int(np.searchsorted(kept, uniform * kept[-1], side="right"))


def _weights(logits: Logits, temperature: float) -> Row:
    """Return unnormalised probabilities; the most likely token has weight 1."""
    scaled = logits.astype(np.float64) / max(temperature, LEAST_TEMPERATURE)
    weights: Row = np.exp(scaled - scaled.max())
    return weights


def _first(logits: Logits, num_candidates: int) -> npt.NDArray[np.int64]:
    """Return the ids of the most likely tokens in order; among equals the lowest id is first."""
    place = len(logits) - num_candidates
    if place <= 0:
        return np.argsort(-logits, kind="stable")
    ids = np.flatnonzero(logits >= np.partition(logits, place)[place])
    return ids[np.argsort(-logits[ids], kind="stable")][:num_candidates]


def _report(logits: Logits, chosen: int, num_top: int) -> Sampled:
    """Return the chosen token, with log-probabilities if requested (`num_top` > 0)."""
    if num_top == 0:
        return Sampled(chosen, None, ())
    row = logits.astype(np.float64)
    shifted = row - row.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    order = np.argsort(-logits, kind="stable")[:num_top]
    top = tuple((int(token_id), float(logprobs[token_id])) for token_id in order)
    return Sampled(chosen, float(logprobs[chosen]), top)
