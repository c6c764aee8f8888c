"""The demo's bar: what has to be shown before it says that it has passed."""

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
    """What the only shortfall of these turns is."""
    summary = summarise(turns)
    assert not summary.passed
    (found,) = summary.shortfalls
    return found


def test_everything_shown():
    """First turns, which have no history, count for nothing but their answers."""
    summary = summarise([FIRST, NEXT, KILLED])
    assert (summary.passed, summary.shortfalls) == (True, ())
    assert (summary.reused_share, summary.reused_share_after_kill) == (1.0, 1.0)
    assert summary.ttft_ratio == pytest.approx(5.0)


@pytest.mark.parametrize("reused_tokens", [0, 1, 899])
def test_too_little_is_loaded_after_the_kill(reused_tokens):
    """One token is not what was promised."""
    found = shortfall(FIRST, NEXT, replace(KILLED, reused_tokens=reused_tokens))
    assert found.startswith(f"after the kill {reused_tokens} of 1000 tokens of history")
    assert found.endswith("not 90%")


@pytest.mark.parametrize("reused_tokens", [0, 1, 899])
def test_too_little_is_loaded_before_the_kill(reused_tokens):
    """A kill does not make up for it."""
    found = shortfall(FIRST, replace(NEXT, reused_tokens=reused_tokens), KILLED)
    assert found.startswith(f"before the kill {reused_tokens} of 1000 tokens of history")


def test_nine_tenths_will_do():
    """Of all turns together: one may miss."""
    missed = replace(NEXT, reused_tokens=0, recompute_ttft_s=0.1)
    for after_kill in (False, True):
        turns = [replace(turn, after_kill=after_kill) for turn in [*[NEXT] * 9, missed]]
        other = replace(NEXT, after_kill=not after_kill)
        assert summarise([FIRST, *turns, other]).passed
        assert not summarise([FIRST, *turns[1:], other]).passed


@pytest.mark.parametrize(("ttft_s", "passed"), [(0.5, False), (0.6, False), (0.49, True)])
def test_the_first_token_comes_sooner(ttft_s, passed):
    """In the median, so that one slow turn is not the verdict; as late is not sooner."""
    turns = [replace(NEXT, ttft_s=ttft_s), replace(KILLED, ttft_s=ttft_s)]
    slow, fast = replace(NEXT, ttft_s=9.0), replace(NEXT, ttft_s=0.001)
    assert summarise([*turns, slow, fast]).passed == passed
    if not passed:
        assert "median of 2 turns" in shortfall(*turns)


def test_every_answer_is_identical():
    """Those that are not are named, the first few of them."""
    wrong = [replace(KILLED, session_id=name, identical=False) for name in "bcde"]
    found = shortfall(FIRST, NEXT, *wrong)
    assert found.startswith("4 answers differ")
    assert "(turn 3 of b, turn 3 of c, turn 3 of d, …)" in found
    assert "turn 1 of a" in shortfall(replace(FIRST, identical=False), NEXT, KILLED)


@pytest.mark.parametrize("turns", [(), (FIRST,), (FIRST, NEXT), (FIRST, KILLED)])
def test_what_was_not_tried_is_not_shown(turns):
    """A demo that ends early has not passed."""
    assert not summarise(turns).passed


def test_the_document_says_what_is_missing():
    """Whoever reads JSON need not work it out."""
    document = as_document([FIRST, NEXT, replace(KILLED, reused_tokens=1)], "m")
    assert document["passed"] is False
    assert (
        document["shortfalls"]
        == summarise([FIRST, NEXT, replace(KILLED, reused_tokens=1)]).shortfalls
    )
