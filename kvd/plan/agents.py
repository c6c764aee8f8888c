"""Random sessions that resemble those of coding agents, for plans without a trace. Pure; seeded.

A person asks. The agent takes steps: each calls tools and continues with their results, until the
agent answers. The person reads, and asks again. When the context outgrows the agent's own limit, it
is compacted: a new session begins with the system prompt and a summary, and supersedes the old one.

The distributions below are published for 4,265 sessions of two agents (TraceLab, arXiv 2606.30560).
The drawn sessions match them, within the tolerances in tests/kvd/plan/test_agents.py:

requests    9 a session in the mean, median 1, P99 137
tool steps  74 a session in the mean, P90 135; 1.36 calls each
tokens      154K in and 523 out a step; 95.8 % of those in are read from a cache (of five minutes)
tool gaps   0.3 s median, 13.6 s P90, 3.6 minutes P99
human gaps  1.4 minutes median, 20.6 minutes P90, 13.9 hours P99
compaction  of 64K tokens or more in 4.5 % of one agent's sessions and 18 % of the other's, 63 to
            92 % of them between two steps of one request

Not published, therefore invented here: the values between and beyond these quantiles; that each
agent has half of the sessions; the sizes of prompts, results and summaries; where contexts are
compacted; and the tools (TOOLS), with how often they are called and how long they take. They were
chosen so that the gaps of all steps, each as long as its slowest call, are the published ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.plan.trace import Session, Turn


class Tool(NamedTuple):
    """A tool, whose time is LogNormal.

    Attributes:
        share: its share of all calls.
        median_s, sigma: the parameters of its time.
    """

    name: str
    share: float
    median_s: float
    sigma: float


TOOLS = (
    Tool("read", 0.34, 0.12, 0.8),
    Tool("search", 0.14, 0.22, 0.9),
    Tool("edit", 0.14, 0.15, 0.7),
    Tool("shell", 0.27, 1.0, 1.9),
    Tool("test", 0.05, 20.0, 1.2),
    Tool("web", 0.04, 2.5, 0.8),
    Tool("agent", 0.02, 130.0, 0.9),
)
CALLS = 1.36  # mean of a step's calls of tools, which are geometric
LONGEST_TOOL_S = 7200.0
# Quantiles (share, value); between them the value's logarithm is linear.
REQUESTS = ((0.0, 1.0), (0.56, 1.0), (0.75, 4.0), (0.9, 14.0), (0.99, 138.0), (1.0, 310.0))
TOOL_STEPS = ((0.0, 0.5), (0.5, 16.0), (0.9, 136.0), (0.99, 780.0), (1.0, 3200.0))
HUMAN_GAPS_S = ((0.0, 2.0), (0.5, 84.0), (0.9, 1236.0), (0.99, 50_040.0), (1.0, 259_200.0))
LIKE_SHARE = 0.7  # of the sessions rank alike in steps and in requests; others at random
# Tokens, LogNormal: median and sigma.
SYSTEM_PROMPT = (22_000.0, 0.35)
QUESTION = (60.0, 1.5)
RESULT = (330.0, 1.6)
ANSWER = (200.0, 1.386)
SUMMARY = (6_000.0, 0.5)
MOST_TOKENS = 25_000  # of each of these
COMPACTED_AT = (680_000, 168_000)  # tokens of a prompt, by agent
QUESTION_SHARE = 0.975  # of these, when a person asks: agents compact early before a new task
# The times of an idle server, to compute when sessions begin that continue after a compaction.
PREFILL_S, DECODE_S = 0.2, 0.02

Floats = NDArray[np.float64]
Quantiles = Sequence[tuple[float, float]]


class Step(NamedTuple):
    """One request to the model; `gap_s` is the time since the answer before it."""

    tokens: int
    output_tokens: int
    gap_s: float
    tools: tuple[str, ...]


def agents(num_sessions: int, rate: float, seed: int) -> list[Session]:
    """Draw sessions that begin at `rate` a second (Poisson), the same ones for the same seed.

    Sessions that continue after a compaction come in addition to `num_sessions`.
    """
    random = np.random.default_rng(seed)
    starts_s = np.cumsum(random.exponential(1 / rate, num_sessions)).tolist()
    ranks = (random.permutation(num_sessions) + random.random(num_sessions)) / num_sessions
    requests = quantiles(REQUESTS, ranks)
    (unlike,) = np.nonzero(random.random(num_sessions) >= LIKE_SHARE)
    ranks[unlike] = random.permutation(ranks[unlike])
    tool_steps = quantiles(TOOL_STEPS, ranks)
    parts = [
        part
        for number, start_s in enumerate(starts_s)
        for part in _parts(
            start_s,
            _steps(random, int(requests[number]), int(tool_steps[number])),
            int(_sizes(random, SYSTEM_PROMPT, 1)[0]),
            COMPACTED_AT[number % len(COMPACTED_AT)],
            random,
        )
    ]
    return _in_order(parts)


def quantiles(table: Quantiles, shares: Floats) -> Floats:
    """Return the quantiles at these shares."""
    at, values = np.array(table).T
    found: Floats = np.exp(np.interp(shares, at, np.log(values)))
    return found


def _steps(random: np.random.Generator, num_requests: int, num_tool_steps: int) -> list[Step]:
    """Draw the steps of one session."""
    weights = random.exponential(1.0, num_requests)
    of_requests = random.multinomial(num_tool_steps, weights / weights.sum())
    total = num_requests + num_tool_steps
    is_question = np.zeros(total, bool)
    is_question[np.cumsum(of_requests + 1) - of_requests - 1] = True
    human_s = quantiles(HUMAN_GAPS_S, random.random(total))
    tokens = np.where(
        is_question, _sizes(random, QUESTION, total), _sizes(random, RESULT, total)
    ).tolist()
    outputs = _sizes(random, ANSWER, total).tolist()
    calls = _calls(random, total)
    steps = []
    before_s = 0.0
    for number in range(total):
        is_last = number + 1 == total or is_question[number + 1]
        gap_s = float(human_s[number]) if is_question[number] else before_s
        names, before_s = ((), 0.0) if is_last else calls[number]
        steps.append(Step(tokens[number], outputs[number], gap_s if number else 0.0, names))
    return steps


def _calls(random: np.random.Generator, number: int) -> list[tuple[tuple[str, ...], float]]:
    """Draw for each step the tools it calls, and the time of the slowest."""
    counts = random.geometric(1 / CALLS, number)
    shares, medians, sigmas = np.array([tool[1:] for tool in TOOLS]).T
    which = random.choice(len(TOOLS), int(counts.sum()), p=shares)
    times_s = medians[which] * np.exp(sigmas[which] * random.standard_normal(len(which)))
    ends = np.cumsum(counts)
    slowest_s = np.minimum(np.maximum.reduceat(times_s, ends - counts), LONGEST_TOOL_S)
    names = [TOOLS[index].name for index in which.tolist()]
    return [
        (tuple(names[end - count : end]), time_s)
        for end, count, time_s in zip(
            ends.tolist(), counts.tolist(), slowest_s.tolist(), strict=True
        )
    ]


def _sizes(random: np.random.Generator, of: tuple[float, float], number: int) -> NDArray[np.int64]:
    median, sigma = of
    drawn = median * np.exp(sigma * random.standard_normal(number))
    return np.clip(np.rint(drawn), 1, MOST_TOKENS).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a session between two compactions; `is_continued`: it continues the part before."""

    start_s: float
    turns: tuple[Turn, ...]
    is_continued: bool


def _parts(
    start_s: float,
    steps: Sequence[Step],
    system_tokens: int,
    compacted_at: int,
    random: np.random.Generator,
) -> Iterator[_Part]:
    """Split a session's steps into parts, at its compactions."""
    turns: list[Turn] = []
    begins_s = now_s = start_s
    context, first_tokens, is_continued, was_called = 0, system_tokens, False, False
    for step in steps:
        most_tokens = compacted_at if was_called else compacted_at * QUESTION_SHARE
        if turns and context + step.tokens > most_tokens:
            yield _Part(begins_s, tuple(turns), is_continued)
            first_tokens = system_tokens + int(_sizes(random, SUMMARY, 1)[0])
            turns, context, is_continued = [], 0, True
            begins_s = now_s + step.gap_s
        new_tokens = step.tokens if turns else first_tokens + step.tokens
        turns.append(Turn(new_tokens, step.output_tokens, context, step.gap_s, step.tools))
        context, was_called = turns[-1].kept_tokens, bool(step.tools)
        now_s += step.gap_s + PREFILL_S + DECODE_S * step.output_tokens
    yield _Part(begins_s, tuple(turns), is_continued)


def _in_order(parts: Sequence[_Part]) -> list[Session]:
    """Return the parts as sessions, in the order in which they begin."""
    order = sorted(range(len(parts)), key=lambda number: parts[number].start_s)
    places = {number: place for place, number in enumerate(order)}
    return [
        Session(
            parts[number].start_s,
            parts[number].turns,
            places[number - 1] if parts[number].is_continued else None,
        )
        for number in order
    ]
