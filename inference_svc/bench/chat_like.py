"""Sessions drawn to look like ShareGPT's, for replays without a trace. Pure; seeded.

Turns: one with probability 0.27, else two and more, 5.75 in the mean (the paper's sample). Prompts:
log-normal, fitted to ShareGPT's, 2 to 3,000 tokens. Replies: log-normal with the quartiles of
ShareGPT's (134, 355 and 800 tokens), times a factor that a session keeps, at most 2,048.
Think times: log-normal with the median of 110 s of a public chat trace, 1 s to an hour.
"""

from math import log

import numpy as np

from inference_svc.bench.trace import PlannedTurn, Session

SINGLE_TURN_SHARE = 0.27
MORE_TURNS = (1.12, 1.2)  # mean and sigma of the logarithm; capped, 5.75 turns in the mean
MAX_TURNS = 40
PROMPT = (3.14, 1.45, 2, 3000)  # mean and sigma of the logarithm, bounds
REPLY = (6.05, 1.2, 1, 2048)
SESSION_SIGMA = 0.7  # of how much longer one session's replies are than another's
THINK = (log(110.0), 1.14, 1.0, 3600.0)


def chat_like_sessions(num_sessions: int, seed: int) -> list[Session]:
    """So many sessions; the same for the same seed."""
    random = np.random.default_rng(seed)
    return [_session(random) for _ in range(num_sessions)]


def _session(random: np.random.Generator) -> Session:
    num_turns = 1
    if random.random() >= SINGLE_TURN_SHARE:
        num_turns = min(MAX_TURNS, 2 + int(random.lognormal(*MORE_TURNS)))
    factor = random.lognormal(-(SESSION_SIGMA**2) / 2, SESSION_SIGMA)  # 1 in the mean
    return tuple(
        PlannedTurn(
            round(_draw(random, PROMPT)),
            round(_draw(random, REPLY, factor)),
            _draw(random, THINK) if index else 0.0,
        )
        for index in range(num_turns)
    )


def _draw(
    random: np.random.Generator, of: tuple[float, float, float, float], factor: float = 1.0
) -> float:
    mean, sigma, least, most = of
    return float(np.clip(random.lognormal(mean, sigma) * factor, least, most))
