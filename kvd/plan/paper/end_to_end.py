"""Figures 13 to 17: hit rate, TTFT, prefill throughput, GPU time and cost of four models. Pure."""

from collections.abc import Iterator, Mapping

from kvd.plan.outcome import Outcome
from kvd.plan.paper import numbers, reasons
from kvd.plan.paper.numbers import LLAMA_65B, NUM_GPUS, PAPER, PAPER_MODELS, PREPRINT, Stated
from kvd.plan.paper.runs import CA_POLICY, LETTER_POLICY, RECOMPUTE, SSD_BYTES_PER_S, Run
from kvd.plan.paper.tables import OutcomeOf, Row, Table, model_rows, notes, ratio
from kvd.plan.prices import Cost, Prices, cost_of

# LLaMA-65B's sessions are too large for the SSD: it is also replayed with one twice as fast.
FAST_SSD = Run(model=LLAMA_65B, ssd_bytes_per_s=2 * SSD_BYTES_PER_S)
GUARDED = Run(model=LLAMA_65B, is_guarded=True)
_BY_MODEL = "by model, 128 GB of DRAM and 10 TB of SSD"


def runs() -> Iterator[Run]:
    """Yield the replays that these figures need."""
    for model in PAPER_MODELS:
        yield Run(model=model)
        yield Run(model=model, policy=RECOMPUTE)
        yield Run(model=model, policy=LETTER_POLICY)
    yield FAST_SSD
    yield GUARDED


def tables(of: OutcomeOf) -> Iterator[Table]:
    """Yield the abstract's numbers, and the figures."""
    ttfts, throughput, costs = _ttfts(of), _prefill_throughput(of), _costs(of)
    yield _summary(ttfts, throughput, costs)
    yield _hit_rates(of)
    yield ttfts
    yield throughput
    yield _gpu_time(of)
    yield costs


def _summary(ttfts: Table, throughput: Table, costs: Table) -> Table:
    def most(label: str, figure: Table, stated: Mapping[str, Stated]) -> Row:
        rows = figure.rows[: len(PAPER_MODELS)]  # further rows are variants of a model
        planned = max(row.planned for row in rows)
        return Row(label, rows[0].unit, planned, stated[PAPER], stated[PREPRINT])

    return Table(
        "Summary",
        "CA against RE",
        (
            most("TTFT, less", ttfts, numbers.MOST_TTFT_REDUCTION),
            most("prefill throughput", throughput, numbers.MOST_PREFILL_SPEEDUP),
            most("cost, less", costs, numbers.MOST_COST_SAVING),
        ),
        notes(reasons.SUMMARY),
    )


def _hit_rates(of: OutcomeOf) -> Table:
    def hits(model: str, policy: str = CA_POLICY) -> float:
        return 100 * of(Run(model=model, policy=policy)).hits_all

    rows = model_rows("%", hits, numbers.HIT_RATE)
    label = "{}, L_ew to the letter"
    rows += model_rows("%", lambda model: hits(model, LETTER_POLICY), numbers.HIT_RATE, label)
    ceiling = max(
        100 * outcome.hits_all / outcome.hits_fu
        for outcome in (of(Run(model=model)) for model in PAPER_MODELS)
        if outcome.hits_fu
    )
    return Table(
        "Figure 13",
        f"hit rate of all turns {_BY_MODEL}",
        tuple(rows),
        notes(reasons.HIT_RATES, ceiling=ceiling),
    )


def _ttfts(of: OutcomeOf) -> Table:
    def reduction(cached: Run) -> float:
        recomputed = of(Run(model=cached.model, policy=RECOMPUTE))
        return 100 * (1 - ratio(of(cached).start_ttft_mean_s, recomputed.start_ttft_mean_s))

    rows = model_rows("%", lambda model: reduction(Run(model=model)), numbers.TTFT_REDUCTION)
    stated = numbers.TTFT_REDUCTION[PAPER][LLAMA_65B]
    rows.append(Row(f"{LLAMA_65B}, SSD of 10 GB/s", "%", reduction(FAST_SSD), stated))
    rows.append(Row(f"{LLAMA_65B}, recomputing if faster", "%", reduction(GUARDED), stated))
    needed_gb = ratio(of(FAST_SSD).ssd_bytes_read, of(FAST_SSD).span_s) / 1e9
    waiting = 100 * (1 - of(Run(model=LLAMA_65B)).dram_share)
    return Table(
        "Figure 14",
        f"TTFT below RE's, without the wait in the queue, {_BY_MODEL}",
        tuple(rows),
        notes(reasons.TTFTS, needed_gb=needed_gb, waiting=waiting),
    )


def _prefill_throughput(of: OutcomeOf) -> Table:
    def speedup(model: str) -> float:
        recomputed = of(Run(model=model, policy=RECOMPUTE))
        cached = of(Run(model=model))
        return ratio(cached.prefill_tokens_per_s, recomputed.prefill_tokens_per_s)

    return Table(
        "Figure 15",
        f"prompt tokens per second of prefill, CA by RE, {_BY_MODEL}",
        tuple(model_rows("x", speedup, numbers.PREFILL_SPEEDUP)),
        notes(reasons.PREFILL_THROUGHPUT),
    )


def _gpu_time(of: OutcomeOf) -> Table:
    stated, label = numbers.GPU_SPEEDUP, "{}, stalled decodes counted too"
    rows = model_rows("x", lambda model: _gpu_speedup(of, model, stalls=0), stated)
    rows += model_rows("x", lambda model: _gpu_speedup(of, model, stalls=1), stated, label)
    return Table(
        "Figure 16",
        f"GPU time, RE by CA, {_BY_MODEL}",
        tuple(rows),
        notes(reasons.GPU_TIME),
    )


def _costs(of: OutcomeOf) -> Table:
    def storage(model: str) -> float:
        cost = _cost(of(Run(model=model)), model, stalls=0, with_storage=True)
        return 100 * cost.storage_share

    saved = numbers.COST_SAVING
    rows = model_rows("%", lambda model: _saving(of, model, stalls=0), saved, "{}, saved")
    rows += [
        Row(f"{model}, saved, stalls counted", "%", _saving(of, model, stalls=1), stated)
        for model, stated in saved[PAPER].items()
    ]
    rows += model_rows("%", storage, numbers.STORAGE_SHARE, "{}, storage of CA's")
    return Table(
        "Figure 17",
        f"cost below RE's, and what storage is of it, {_BY_MODEL}",
        tuple(rows),
        notes(reasons.COSTS),
    )


def _gpu_speedup(of: OutcomeOf, model: str, *, stalls: int) -> float:
    recomputed = of(Run(model=model, policy=RECOMPUTE))
    return ratio(_hours(recomputed, stalls), _hours(of(Run(model=model)), stalls))


def _saving(of: OutcomeOf, model: str, *, stalls: int) -> float:
    cached = _cost(of(Run(model=model)), model, stalls=stalls, with_storage=True)
    recomputed = of(Run(model=model, policy=RECOMPUTE))
    without = _cost(recomputed, model, stalls=stalls, with_storage=False)
    return 100 * (1 - ratio(cached.total, without.total))


def _cost(outcome: Outcome, model: str, *, stalls: int, with_storage: bool) -> Cost:
    hours = _hours(outcome, stalls)
    return cost_of(
        Prices(),
        num_gpus=NUM_GPUS[model],
        gpu_hours=hours,
        storage_hours=hours,
        dram_bytes=numbers.BILLED_DRAM_BYTES if with_storage else 0,
        ssd_bytes=numbers.BILLED_SSD_BYTES if with_storage else 0,
    )


def _hours(outcome: Outcome, stalls: int) -> float:
    """Return GPU hours; with stalls, prefills count twice, as decodes wait for them."""
    return outcome.gpu_hours + stalls * outcome.prefill_hours
