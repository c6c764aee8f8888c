"""Figures 23 and 24 of the preprint: long documents. Pure."""

from collections.abc import Iterator

from kvd.plan.hardware import MODELS
from kvd.plan.outcome import Outcome
from kvd.plan.paper import numbers, reasons
from kvd.plan.paper.numbers import LONG_ANSWER_TOKENS, LONG_DOCUMENT_TOKENS
from kvd.plan.paper.runs import LONG_MODEL, RECOMPUTE, Run, long_engine
from kvd.plan.paper.tables import OutcomeOf, Row, Table, notes, ratio

_CACHED = Run(model=LONG_MODEL, charge="packed")
_RECOMPUTED = Run(model=LONG_MODEL, charge="packed", policy=RECOMPUTE)
_PAPER_PCIE = 26e9  # "about 26 GB/s of effective data transmission bandwidth" (§2.4)


def runs() -> Iterator[Run]:
    """What these figures need."""
    yield _CACHED
    yield _RECOMPUTED


def tables(of: OutcomeOf) -> Iterator[Table]:
    """The figures."""
    yield _prefills(of(_CACHED), of(_RECOMPUTED))
    yield _overall(of(_CACHED), of(_RECOMPUTED))


def _prefills(cached: Outcome, recomputed: Outcome) -> Table:
    ttft_s, re_ttft_s = _prefill_s(cached), _prefill_s(recomputed)
    load_s = LONG_DOCUMENT_TOKENS * MODELS[LONG_MODEL].kv_bytes_per_token / _PAPER_PCIE
    return Table(
        "Figure 23 of the preprint",
        "questions about a document of 28K tokens, Mistral-7B",
        (
            Row("RE: TTFT", "s", re_ttft_s, preprint=numbers.LONG_RE_TTFT_S),
            Row("CA: TTFT", "s", ttft_s, preprint=numbers.LONG_TTFT_S),
            Row(
                "TTFT below RE's",
                "%",
                100 * (1 - ratio(ttft_s, re_ttft_s)),
                preprint=numbers.LONG_TTFT_REDUCTION,
            ),
            Row(
                "prefill throughput",
                "x",
                ratio(re_ttft_s, ttft_s),
                preprint=numbers.LONG_PREFILL_SPEEDUP,
            ),
        ),
        notes(reasons.LONG_PREFILLS, load_s=load_s),
    )


def _overall(cached: Outcome, recomputed: Outcome) -> Table:
    decode_s = LONG_ANSWER_TOKENS * long_engine().decode_step_s
    seconds = {True: _prefill_s(cached) + decode_s, False: _prefill_s(recomputed) + decode_s}
    return Table(
        "Figure 24 of the preprint",
        "what prefills are of the GPU time, and answers, 28K tokens, Mistral-7B",
        (
            Row(
                "RE: share of prefills",
                "%",
                100 * ratio(_prefill_s(recomputed), seconds[False]),
                preprint=numbers.LONG_RE_PREFILL_SHARE,
            ),
            Row(
                "CA: share of prefills",
                "%",
                100 * ratio(_prefill_s(cached), seconds[True]),
                preprint=numbers.LONG_PREFILL_SHARE,
            ),
            Row(
                "output throughput above RE's",
                "%",
                100 * (ratio(seconds[False], seconds[True]) - 1),
                preprint=numbers.LONG_OUTPUT_GAIN,
            ),
        ),
        notes(reasons.LONG_OVERALL),
    )


def _prefill_s(outcome: Outcome) -> float:
    """Of one turn: turns run one at a time, so nothing is waited for between start and prefill."""
    return outcome.start_ttft_mean_s
