"""Drawn agents have the published quantiles, within the tolerance of each test."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

from kvd.plan.agents import COMPACTED_AT, LONGEST_TOOL_S, TOOLS, agents
from kvd.plan.trace import Session, Turn

NUM_SESSIONS = 4265  # as many as in the publication
FORGETS_S = 300.0  # of the providers' caches, to which the published cached reads refer
LEAST_DROPPED = 64_000  # tokens: a drop that counts as a compaction


class Drawn(NamedTuple):
    """Sessions with what comes before, between and after their compactions."""

    chains: list[list[Session]]

    @property
    def turns(self) -> list[list[Turn]]:
        return [[turn for part in chain for turn in part.turns] for chain in self.chains]


def chains_of(sessions: list[Session]) -> list[list[Session]]:
    chains: dict[int, list[Session]] = {}
    firsts: dict[int, int] = {}
    for number, session in enumerate(sessions):
        first = number if session.supersedes is None else firsts[session.supersedes]
        firsts[number] = first
        chains.setdefault(first, []).append(session)
    return list(chains.values())


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return Drawn(chains_of(agents(NUM_SESSIONS, 1.0, seed=7)))


def test_requests_and_steps_match_the_publication(drawn):
    """9 requests (median 1, P99 137) and 74 tool steps (P90 135) of 1.36 calls: within 3 %."""
    assert len(drawn.chains) == NUM_SESSIONS
    steps = np.array([sum(bool(turn.tools) for turn in turns) for turns in drawn.turns])
    requests = np.array([len(turns) for turns in drawn.turns]) - steps
    assert requests.mean() == pytest.approx(9, rel=0.03)
    assert np.percentile(requests, [50, 99]) == pytest.approx([1, 137], rel=0.03)
    assert steps.mean() == pytest.approx(74, rel=0.03)
    assert np.percentile(steps, 90) == pytest.approx(135, rel=0.03)
    calls = [len(turn.tools) for turns in drawn.turns for turn in turns if turn.tools]
    assert np.mean(calls) == pytest.approx(101 / 74, rel=0.03)


def test_gaps_match_the_publication(drawn):
    """Of tools 0.3 s, 13.6 s, 3.6 minutes, of people 1.4, 20.6 minutes, 13.9 hours.

    Within 8 %; the last one, drawn rarely from a long tail, within 20 %.
    """
    of_tools, of_people = [], []
    for turns in drawn.turns:
        assert turns[0].think_s == 0
        for before, turn in pairwise(turns):
            (of_tools if before.tools else of_people).append(turn.think_s)
    found = np.percentile(of_tools, [50, 90, 99])
    assert found == pytest.approx([0.3, 13.6, 216], rel=0.08)
    assert max(of_tools) <= LONGEST_TOOL_S
    assert np.percentile(of_people, [50, 90]) == pytest.approx([84, 1236], rel=0.08)
    assert np.percentile(of_people, 99) == pytest.approx(50_040, rel=0.2)


def test_tokens_match_the_publication(drawn):
    """154K in and 523 out a step, within 8 %; 95.8 % read from a cache of five minutes, within 1.

    The published reads are of providers' caches, which forget: of all history, more is drawn.
    """
    turns = [turn for turns in drawn.turns for turn in turns]
    tokens_in = np.array([turn.history_tokens + turn.new_tokens for turn in turns])
    assert tokens_in.mean() == pytest.approx(154_000, rel=0.08)
    assert np.mean([turn.output_tokens for turn in turns]) == pytest.approx(523, rel=0.08)
    in_time = sum(turn.history_tokens for turn in turns if turn.think_s <= FORGETS_S)
    assert in_time / tokens_in.sum() == pytest.approx(0.958, abs=0.01)


def test_compactions_are_as_frequent_as_published(drawn):
    """In 4.5 % and 18 % of two agents' sessions, within 2 points; 63 to 92 % of them in a loop."""
    for number, published in enumerate((0.045, 0.18)):
        of_agent = drawn.chains[number :: len(COMPACTED_AT)]
        share = np.mean([len(chain) > 1 for chain in of_agent])
        assert share == pytest.approx(published, abs=0.02)
    in_loop, dropped = [], []
    for before, after in (two for chain in drawn.chains for two in pairwise(chain)):
        assert after.turns[0].history_tokens == 0
        assert before.start_s < after.start_s
        dropped.append(before.turns[-1].kept_tokens - after.turns[0].new_tokens)
        in_loop.append(bool(before.turns[-1].tools))
    assert np.mean(np.array(dropped) > LEAST_DROPPED) > 0.98
    assert 0.63 <= np.mean(in_loop) <= 0.92


def test_history_is_everything_before_in_the_session(drawn):
    """Nothing is truncated.

    An answer that calls a tool is the last one only before a compaction.
    """
    for chain in drawn.chains[:300]:
        for session in chain:
            assert session.turns[0].history_tokens == 0
            for before, turn in pairwise(session.turns):
                assert turn.history_tokens == before.kept_tokens
        assert not chain[-1].turns[-1].tools


def test_tools_are_called_with_their_shares_and_durations(drawn):
    """Shares within 1 point; of single calls the medians, within 10 %."""
    assert sum(tool.share for tool in TOOLS) == pytest.approx(1)
    steps = [two for turns in drawn.turns for two in pairwise(turns) if two[0].tools]
    calls = [name for before, _ in steps for name in before.tools]
    for tool in TOOLS:
        assert calls.count(tool.name) / len(calls) == pytest.approx(tool.share, abs=0.01)
        alone = [after.think_s for before, after in steps if before.tools == (tool.name,)]
        assert np.median(alone) == pytest.approx(tool.median_s, rel=0.1)


def test_sessions_begin_in_order_and_at_the_rate():
    """Those that continue after a compaction are among them, behind those they supersede."""
    sessions = agents(500, 0.5, seed=3)
    starts = [session.start_s for session in sessions]
    assert starts == sorted(starts)
    first = [session.start_s for session in sessions if session.supersedes is None]
    assert len(first) == 500
    assert first[-1] / 500 == pytest.approx(2.0, rel=0.15)
    for number, session in enumerate(sessions):
        assert session.supersedes is None or session.supersedes < number


def test_the_seed_determines_everything():
    """The same seed draws the same sessions, another one others; one session can be drawn."""
    assert agents(50, 2.0, 1) == agents(50, 2.0, 1)
    assert agents(50, 2.0, 1) != agents(50, 2.0, 2)
    assert len(chains_of(agents(1, 1.0, 0))) == 1
