"""`kvd plan --observe`: hit rates of the turns that can be judged, beside the daemon's own."""

import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from kvd.core.state.turn_log import RecordedTurn
from kvd.plan.observe import (
    MIN_JUDGED,
    HitRates,
    Observation,
    num_replays,
    observation_tables,
    observe,
)
from kvd.plan.recorded_replay import ObservedCache
from shared.types.units import NS_PER_S

TOKENS = 64
BYTES = 64_000  # tokens per session
MANY = 10_000


def _round(sessions: int, rounds: int) -> list[RecordedTurn]:
    """Yield turns of so many sessions in a circle."""
    turns = []
    for at in range(sessions * rounds):
        session, number = at % sessions, at // sessions + 1
        now_ns = at * NS_PER_S
        wanted = TOKENS if number > 1 else 0
        turns.append(
            RecordedTurn(session, number, now_ns, now_ns, now_ns, wanted, 0, 0, TOKENS, True)
        )
    return turns


def _cache(dram_sessions: int, ssd_sessions: int = 0) -> ObservedCache:
    return ObservedCache(16, BYTES // 4, dram_sessions * BYTES, ssd_sessions * BYTES, "lru")


def _text(observed: Observation) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        for table in observation_tables("ab" * 16, observed):
            console.print(table)
    return captured.get()


def test_the_knee_of_sessions_in_a_circle() -> None:
    """LRU finds nothing of six sessions in room for two or four, and everything in eight."""
    observed = observe(_round(6, 100), _cache(2), MANY)
    assert [(size.dram_scale, size.rates.tok) for size in observed.reachable] == [
        (1, 0.0),
        (2, 0.0),
        (4, 1.0),
    ]
    assert [size.is_filled for size in observed.reachable] == [True, True, False]
    assert observed.footprint_bytes == 6 * BYTES
    assert observed.num_judged == 300
    assert observed.span_s == 599
    assert "holds all that was seen" in _text(observed)


def test_ssd_and_dram_are_scaled_separately() -> None:
    """Nine sizes; more SSD finds more, more DRAM finds more of it in DRAM."""
    observed = observe(_round(8, 60), _cache(2, 5), MANY)
    by_scale = {(size.dram_scale, size.ssd_scale): size.rates for size in observed.reachable}
    assert len(by_scale) == 9
    assert by_scale[1, 1].tok < 0.5
    assert by_scale[1, 2] == HitRates(1.0, 1.0, 0.0)
    assert by_scale[4, 2] == HitRates(1.0, 1.0, 1.0)


def test_the_daemons_hit_rate_is_of_the_same_turns() -> None:
    """Second half only, turns with history and loads; a tail below a block is no miss."""
    turns = _round(4, 10)
    turns[25] = replace(turns[25], dram_tokens=TOKENS - 1)
    turns[26] = replace(turns[26], ssd_tokens=TOKENS // 2)
    turns[27] = replace(turns[27], is_asked=False)
    turns[2] = replace(turns[2], dram_tokens=TOKENS)  # not judged
    observed = observe(turns, _cache(8), MANY)
    assert observed.num_judged == 19
    assert observed.had.tok == pytest.approx((63 + 32) / (19 * 64))
    assert observed.had.fu == pytest.approx(1 / 19)
    assert observed.had.dram == pytest.approx(63 / 95)


def test_too_few_observations_are_reported() -> None:
    """Few turns, few sessions, or none that can be judged."""
    assert observe(_round(4, 4), _cache(2), MANY).is_too_few
    assert observe(_round(10, 100), _cache(2), MANY).is_too_few  # ten sessions only
    enough = observe(_round(60, 10), _cache(30), MANY)
    assert not enough.is_too_few
    assert enough.num_judged >= MIN_JUDGED
    assert "too few" in _text(observe(_round(4, 4), _cache(2), MANY))
    assert "too few" not in _text(enough)


def test_first_turns_cannot_be_judged() -> None:
    """There is nothing to report, and no table."""
    observed = observe(_round(40, 1), _cache(2), MANY)
    assert (observed.num_turns, observed.num_judged) == (40, 0)
    assert "DRAM share" not in _text(observed)
    assert observe([], _cache(2), MANY).num_turns == 0


def test_misses_with_enough_room_are_reported() -> None:
    """If everything seen fits, misses have another cause."""
    text = _text(observe(_round(60, 10), _cache(100), MANY))
    assert "missed its KV for lack of room" in text


def test_a_full_log_and_its_document() -> None:
    """Forgotten turns are reported; the document has plain values."""
    observed = observe(_round(6, 10), _cache(2), 60)
    assert observed.is_log_full
    assert "older ones are forgotten" in _text(observed)
    document = json.loads(json.dumps(asdict(observed)))
    assert document["had"] == {"tok": 0.0, "fu": 0.0, "dram": 0.0}
    assert len(document["reachable"]) == 3


def test_progress_is_reported() -> None:
    """After each replay."""
    progress: list[int] = []
    observe(_round(4, 4), _cache(2), MANY, progress.append)
    assert progress == [1, 2, 3]
    assert num_replays(_cache(2)) == 3
    assert num_replays(_cache(2, 2)) == 9
