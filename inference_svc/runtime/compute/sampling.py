"""Chooses the next token from a row of logits.

Everything is computed in numpy on the CPU in float64 from float32 logits: the same on every device.
The draw of step i is a hash of (seed, i), not a generator's state, so that a replayed turn draws
the same numbers.

Order: repetition penalty, temperature, top-k, top-p, min-p. Log-probabilities are of the model's
own distribution, before any of these.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from inference_svc.core.answers import SamplingParams
from inference_svc.core.errors import EngineFailedError

Row = npt.NDArray[np.float64]


class Sampled(NamedTuple):
    """One chosen token.

    Attributes:
        logprob: natural log of its probability, at most 0; None unless requested.
        top: the most likely tokens' ids with their log-probabilities, most likely first.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Samples one turn's answer; holds the number of tokens drawn so far."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._step = 0

    def sample(self, logits_row: Tensor, prior_token_ids: Sequence[int]) -> Sampled:
        """Choose the next token.

        Args:
            logits_row: [vocab] float32.
            prior_token_ids: prompt and answer so far, for the repetition penalty.

        Raises:
            EngineFailedError: if no logit is finite, as when a half-precision model overflows.
        """
        logits = logits_row.numpy(force=True)
        best = int(logits.argmax())  # the first of equals, and the first NaN
        if not np.isfinite(logits[best]):
            raise EngineFailedError(
                "the model computed logits that are not finite",
                "serve it with dtype float32 or bfloat16",
            )
        params = self._params
        if params.repetition_penalty != 1.0:
            penalised = _penalise(logits, prior_token_ids, params.repetition_penalty)
            best = int(penalised.argmax())
        else:
            penalised = logits
        chosen = best if params.temperature == 0 else self._draw(penalised)
        self._step += 1
        return _report(logits, chosen, params.logprobs)

    def _draw(self, logits: npt.NDArray[np.float32]) -> int:
        candidates, probabilities = _candidates(logits, self._params)
        digest = hashlib.blake2b(
            f"{self._params.seed}:{self._step}".encode(), digest_size=8
        ).digest()
        uniform = (int.from_bytes(digest, "little") >> 11) * 2.0**-53  # [0, 1), as random.random()
        cumulated = np.cumsum(probabilities)
        index = int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))
        return int(candidates[index])  # there is one: the product is below the sum, rounded too


def _penalise(
    logits: npt.NDArray[np.float32], prior_token_ids: Sequence[int], penalty: float
) -> npt.NDArray[np.float32]:
    """Make tokens seen before less likely: divide positive logits, multiply negative ones."""
    seen = np.unique(np.asarray(prior_token_ids, dtype=np.int64))
    penalised = logits.copy()
    values = penalised[seen]
    penalised[seen] = np.where(values > 0, values / penalty, values * penalty)
    return penalised


def _candidates(
    logits: npt.NDArray[np.float32], params: SamplingParams
) -> tuple[npt.NDArray[np.int64], Row]:
    """Return the tokens left to draw from, most likely first, and their weights."""
    order = np.argsort(-logits, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    scaled = logits[order].astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled[0])
    keep = len(order)
    if params.top_p < 1.0:
        cumulated = np.cumsum(weights)
        keep = int(np.searchsorted(cumulated, params.top_p * cumulated[-1], side="left")) + 1
    if params.min_p > 0.0:
        keep = min(keep, int(np.count_nonzero(weights >= params.min_p * weights[0])))
    return order[:keep], weights[:keep]


def _report(logits: npt.NDArray[np.float32], chosen: int, num_top: int) -> Sampled:
    """Attach log-probabilities, if requested (`num_top` > 0)."""
    if num_top == 0:
        return Sampled(chosen, None, ())
    row = logits.astype(np.float64)
    shifted = row - row.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    order = np.argsort(-logits, kind="stable")[:num_top]
    top = tuple((int(token_id), float(logprobs[token_id])) for token_id in order)
    return Sampled(chosen, float(logprobs[chosen]), top)
