"""The demo's criteria: what has to be shown for it to pass."""

from dataclasses import replace

import pytest

from inference_svc.demo.report import TurnFacts, as_document, summarise

FIRST = TurnFacts(
    session_id="a",
    turn=0,
    history_tokens=0,
    reused_tokens=0,
    new_tokens=1000,
    output_tokens=32,
    tiers=(),
    ttft_s=0.5,
    recompute_ttft_s=0.5,
    identical=True,
    after_kill=False,
)
NEXT = replace(FIRST, turn=1, history_tokens=1000, reused_tokens=1000, tiers=("dram",), ttft_s=0.1)
KILLED = replace(NEXT, turn=2, tiers=("ssd",), after_kill=True)


def shortfall(*turns):
    """Return the only shortfall of these turns."""
    summary = summarise(turns)
    assert not summary.passed
    (found,) = summary.shortfalls
    return found


def test_a_complete_demo_passes():
    """Of first turns, which have no history, only the answers count."""
    summary = summarise([FIRST, NEXT, KILLED])
    assert (summary.passed, summary.shortfalls) == (True, ())
    assert (summary.reused_share, summary.reused_share_after_kill) == (1.0, 1.0)
    assert summary.ttft_ratio == pytest.approx(5.0)


@pytest.mark.parametrize("reused_tokens", [0, 1, 899])
def test_too_little_loaded_after_the_kill_fails(reused_tokens):
    """One token is not what was promised."""
    found = shortfall(FIRST, NEXT, replace(KILLED, reused_tokens=reused_tokens))
    assert found.startswith(f"after the kill {reused_tokens} of 1000 tokens of history")
    assert found.endswith("not 90%")


@pytest.mark.parametrize("reused_tokens", [0, 1, 899])
def test_too_little_loaded_before_the_kill_fails(reused_tokens):
    """Loads after the kill do not compensate."""
    found = shortfall(FIRST, replace(NEXT, reused_tokens=reused_tokens), KILLED)
    assert found.startswith(f"before the kill {reused_tokens} of 1000 tokens of history")


def test_nine_tenths_suffice():
    """Of all turns together: one may miss."""
    missed = replace(NEXT, reused_tokens=0, recompute_ttft_s=0.1)
    for after_kill in (False, True):
        turns = [replace(turn, after_kill=after_kill) for turn in [*[NEXT] * 9, missed]]
        other = replace(NEXT, after_kill=not after_kill)
        assert summarise([FIRST, *turns, other]).passed
        assert not summarise([FIRST, *turns[1:], other]).passed


@pytest.mark.parametrize(("ttft_s", "passed"), [(0.5, False), (0.6, False), (0.49, True)])
def test_the_first_token_must_come_sooner(ttft_s, passed):
    """By median, so that one slow turn does not decide; equal is not sooner."""
    turns = [replace(NEXT, ttft_s=ttft_s), replace(KILLED, ttft_s=ttft_s)]
    slow, fast = replace(NEXT, ttft_s=9.0), replace(NEXT, ttft_s=0.001)
    assert summarise([*turns, slow, fast]).passed == passed
    if not passed:
        assert "median of 2 turns" in shortfall(*turns)


def test_every_answer_must_be_identical():
    """The first few different ones are named."""
    wrong = [replace(KILLED, session_id=name, identical=False) for name in "bcde"]
    found = shortfall(FIRST, NEXT, *wrong)
    assert found.startswith("4 answers differ")
    assert "(turn 3 of b, turn 3 of c, turn 3 of d, …)" in found
    assert "turn 1 of a" in shortfall(replace(FIRST, identical=False), NEXT, KILLED)


@pytest.mark.parametrize("turns", [(), (FIRST,), (FIRST, NEXT), (FIRST, KILLED)])
def test_an_incomplete_demo_fails(turns):
    """A demo that ends early has not passed."""
    assert not summarise(turns).passed


def test_the_document_lists_the_shortfalls():
    """So scripts need not compute them."""
    document = as_document([FIRST, NEXT, replace(KILLED, reused_tokens=1)], "m")
    assert document["passed"] is False
    assert (
        document["shortfalls"]
        == summarise([FIRST, NEXT, replace(KILLED, reused_tokens=1)]).shortfalls
    )
