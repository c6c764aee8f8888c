"""Random sessions that resemble ShareGPT's, for plans without a trace. Pure; seeded.

turns      one with probability 0.27, else 2 + floor(LogNormal(mu, 1.2)), at most 40, with mu such
           that the sample's mean is the paper's 5.75
answers    the lengths of ShareGPT-90k's 733,551 replies, by how many are at least so long, times
           1.6 (another tokenizer, other languages), times a factor per session, at most 2,048
prompts    LogNormal(3.14, 1.45), 2 to 3,000: fitted to ShareGPT's
thinking   LogNormal with a median of 110 s, 1 s to an hour: fitted to a public chat trace

Contexts are truncated as in the paper: while history and new tokens exceed the window, half a
window of history is dropped; the same after the answer.

*Source:* CachedAttention §4.1 (sessions, turns, truncation); reply lengths published with
YitaoYuan/sharegpt-statistics.
"""

from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from kvd.plan.trace import Session, Turn, truncated

MEAN_TURNS = 5.75
SINGLE_TURN_SHARE = 0.27
TURNS_SIGMA = 1.2
MAX_TURNS = 40
MU_BOUNDS = (-6.0, 6.0)  # of mu, which is found by bisection
MU_STEPS = 60  # of the bisection
# (length of a reply, number of replies that are at least so long)
REPLIES = (
    (1, 733551), (100, 608557), (119, 582530), (141, 553357), (168, 520211), (200, 483996),
    (238, 441474), (283, 390390), (336, 330676), (400, 265532), (476, 208468), (566, 163379),
    (673, 129630), (800, 103292), (951, 76855), (1131, 58808), (1345, 43937), (1600, 31182),
    (1903, 20392), (2263, 12014), (2691, 6601), (3200, 3393), (3805, 1626), (4525, 907),
    (5382, 549), (6400, 449), (9051, 368), (15222, 223), (25600, 93), (51200, 9),
)  # fmt: skip
REPLY_SCALE = 1.6
REPLY_BOUNDS = (1, 2048)
SESSION_SIGMA = 0.7  # of a session's factor of reply lengths
PROMPT = (3.14, 1.45)  # mean and sigma of the length's logarithm
PROMPT_BOUNDS = (2, 3000)
THINK = (log(110.0), 1.14)
THINK_BOUNDS_S = (1.0, 3600.0)

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


def sharegpt_like(num_sessions: int, rate: float, window_tokens: int, seed: int) -> list[Session]:
    """Draw sessions that begin at `rate` a second (Poisson), the same ones for the same seed."""
    random = np.random.default_rng(seed)
    starts_s = np.cumsum(random.exponential(1 / rate, num_sessions))
    num_turns = turn_counts(random, num_sessions)
    total = int(num_turns.sum())
    factors = random.lognormal(-(SESSION_SIGMA**2) / 2, SESSION_SIGMA, num_sessions)  # mean 1
    outputs = _whole(_replies(random, total) * np.repeat(factors, num_turns), REPLY_BOUNDS)
    prompts = _whole(random.lognormal(*PROMPT, total), PROMPT_BOUNDS)
    thinks_s = think_times(random, total)
    ends = np.cumsum(num_turns)
    return [
        Session(
            float(starts_s[index]),
            turns_in_window(
                prompts[end - count : end].tolist(),
                outputs[end - count : end].tolist(),
                thinks_s[end - count : end].tolist(),
                window_tokens,
            ),
        )
        for index, (end, count) in enumerate(zip(ends.tolist(), num_turns.tolist(), strict=True))
    ]


def think_times(random: np.random.Generator, number: int) -> Floats:
    """Draw the times that users think, in seconds."""
    return np.clip(random.lognormal(*THINK, number), *THINK_BOUNDS_S)


def turn_counts(random: np.random.Generator, num_sessions: int) -> Counts:
    """Draw the number of turns of each session; their mean is MEAN_TURNS, as far as possible."""
    is_single = random.random(num_sessions) < SINGLE_TURN_SHARE
    normal = random.standard_normal(num_sessions)

    def counts(mu: float) -> Counts:
        more = 2 + np.floor(np.exp(mu + TURNS_SIGMA * normal))
        return np.where(is_single, 1, np.minimum(MAX_TURNS, more)).astype(np.int64)

    low, high = MU_BOUNDS
    for _ in range(MU_STEPS):
        middle = (low + high) / 2
        if counts(middle).mean() < MEAN_TURNS:
            low = middle
        else:
            high = middle
    return counts(low)


def _replies(random: np.random.Generator, number: int) -> Floats:
    """Draw lengths of replies: the inverse of REPLIES, log-linear between its points."""
    lengths, survivors = np.array(REPLIES, dtype=np.float64).T
    shares = survivors[::-1] / survivors[0]
    replies: Floats = np.exp(np.interp(random.random(number), shares, np.log(lengths)[::-1]))
    return REPLY_SCALE * replies


def _whole(values: Floats, bounds: tuple[int, int]) -> Counts:
    return np.clip(np.rint(values), *bounds).astype(np.int64)


def turns_in_window(
    prompts: Sequence[int], outputs: Sequence[int], thinks_s: Sequence[float], window_tokens: int
) -> tuple[Turn, ...]:
    """Return the turns of one session, whose context is truncated to the window."""
    turns: list[Turn] = []
    context = 0
    for prompt, output, think_s in zip(prompts, outputs, thinks_s, strict=True):
        new = min(prompt, window_tokens)
        history = truncated(context, new, window_tokens)
        turns.append(Turn(new, output, history, think_s if turns else 0.0))
        context = truncated(history + new + output, 0, window_tokens)
    return tuple(turns)
