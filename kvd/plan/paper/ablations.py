"""Figures 21 to 25: policies, overflow, capacity, media, arrival rates; and long documents. Pure.

The long documents are Figures 23 and 24 of the preprint.
"""

from collections.abc import Iterator

from kvd.plan.hardware import MODELS
from kvd.plan.outcome import Outcome
from kvd.plan.paper import numbers, reasons
from kvd.plan.paper.numbers import (
    CA,
    FIFO,
    HBM_DRAM,
    HBM_ONLY,
    LARGE,
    LLAMA_13B,
    LLAMA_65B,
    LONG_ANSWER_TOKENS,
    LONG_DOCUMENT_TOKENS,
    LRU,
    PAPER,
    PAPER_MODELS,
    PREPRINT,
    SMALL,
)
from kvd.plan.paper.runs import (
    CA_POLICY,
    DRAM_BYTES,
    HBM_CACHE_BYTES,
    LARGE_SSD_BYTES,
    LETTER_POLICY,
    LONG_MODEL,
    RECOMPUTE,
    SMALL_SSD_BYTES,
    TTL_S,
    Charge,
    Overflow,
    Run,
    long_engine,
    window_bytes,
)
from kvd.plan.paper.tables import OutcomeOf, Row, Table, model_rows, notes, ratio, stated_row

POLICY_OF = {LRU: "lru", FIFO: "fifo", CA: CA_POLICY}
SSD_OF = {SMALL: SMALL_SSD_BYTES, LARGE: LARGE_SSD_BYTES}
MEDIA = {HBM_ONLY: HBM_CACHE_BYTES, HBM_DRAM: HBM_CACHE_BYTES + DRAM_BYTES}
RATES = (0.5, 1.0, 2.0)
RATIOS = tuple(numbers.CAPACITY_HIT_RATE)
KEEPING_UP = 3.0  # speed of an engine that keeps up with the arrivals
HOUR_SESSIONS = 3600  # sessions that begin in an hour at 1 a second: the paper's DSpUT


def runs() -> Iterator[Run]:
    """Yield the replays that these figures need."""
    for storage in (SMALL, LARGE):
        for policy in (LRU, FIFO, CA):
            yield _policy_run(policy, storage)
        yield _letter_run(storage)
        for policy in (LRU, CA):
            yield _policy_run(policy, storage, "packed")
    for model in PAPER_MODELS:
        yield Run(model=model, overflow="turn")
        for media in MEDIA:
            yield _media_run(model, media)
    for model in (LLAMA_13B, LLAMA_65B):
        yield Run(model=model, overflow="session")
    for share in RATIOS:
        yield from _capacity_runs(share).values()
    for rate in RATES:
        yield Run(rate=rate)
        yield Run(rate=rate, policy="lru")
    yield from _long_runs()


def tables(of: OutcomeOf) -> Iterator[Table]:
    """Yield the figures' tables."""
    yield _policies(of)
    yield _overflow(of)
    yield _capacity(of)
    yield _media(of)
    yield _rates(of)
    yield from _long_tables(of)


def _policy_run(policy: str, storage: str, charge: Charge = "window") -> Run:
    return Run(policy=POLICY_OF[policy], ssd_bytes=SSD_OF[storage], charge=charge)


def _letter_run(storage: str) -> Run:
    return Run(policy=LETTER_POLICY, ssd_bytes=SSD_OF[storage])


def _media_run(model: str, media: str) -> Run:
    return Run(model=model, dram_bytes=MEDIA[media], ssd_bytes=0)


def _capacity_runs(share: float) -> dict[str, Run]:
    """Return the replays of a capacity, by the assumptions about server and users."""
    capacity_bytes = int(share * HOUR_SESSIONS * window_bytes(LLAMA_13B))
    ssd_bytes = capacity_bytes - DRAM_BYTES
    fast = Run(ssd_bytes=ssd_bytes, ttl_s=TTL_S, speed=KEEPING_UP)
    return {
        "overloaded": Run(ssd_bytes=ssd_bytes, ttl_s=TTL_S),
        "overloaded, packed": Run(ssd_bytes=ssd_bytes, ttl_s=TTL_S, charge="packed"),
        "3 x faster engine": fast,
        "3 x faster engine, users think": Run(
            ssd_bytes=ssd_bytes, ttl_s=TTL_S, speed=KEEPING_UP, is_thinking=True
        ),
    }


def _policies(of: OutcomeOf) -> Table:
    rows = []
    for storage in (SMALL, LARGE):
        for policy in (LRU, FIFO, CA):
            found, key, label = (
                of(_policy_run(policy, storage)),
                (policy, storage),
                f"{storage} {policy}",
            )
            hits, in_dram = 100 * found.hits_all, 100 * found.hits_all * found.dram_share
            rows.append(stated_row(label, "%", hits, numbers.POLICY_HIT_RATE, key))
            label += ", in DRAM"
            rows.append(stated_row(label, "%", in_dram, numbers.POLICY_DRAM_RATE, key))
        letter = of(_letter_run(storage))
        stated = numbers.POLICY_HIT_RATE[PAPER][CA, storage]
        rows.append(Row(f"{storage} L_ew to the letter", "%", 100 * letter.hits_all, stated))
        for policy in (LRU, CA):
            packed = of(_policy_run(policy, storage, "packed"))
            stated = numbers.POLICY_HIT_RATE[PAPER][policy, storage]
            rows.append(Row(f"{storage} {policy}, packed", "%", 100 * packed.hits_all, stated))
    rows.append(_largest_speedup(of))
    return Table(
        "Figure 21",
        "hit rate of all turns by policy and storage, LLaMA-13B",
        tuple(rows),
        notes(reasons.POLICIES),
    )


def _largest_speedup(of: OutcomeOf) -> Row:
    speedups = []
    for storage in (SMALL, LARGE):
        ca_hours = of(_policy_run(CA, storage)).gpu_hours
        speedups += [
            ratio(of(_policy_run(policy, storage)).gpu_hours, ca_hours) for policy in (LRU, FIFO)
        ]
    return Row(
        "GPU time, largest factor",
        "x",
        max(speedups),
        numbers.POLICY_GPU_SPEEDUP[PAPER],
        numbers.POLICY_GPU_SPEEDUP[PREPRINT],
    )


def _overflow(of: OutcomeOf) -> Table:
    def loss(model: str, overflow: Overflow) -> float:
        lossy = of(Run(model=model, overflow=overflow))
        return 100 * (of(Run(model=model)).hits_all - lossy.hits_all)

    stated = numbers.OVERFLOW_LOSS
    rows = model_rows("points", lambda model: loss(model, "turn"), stated)
    rows += [
        stated_row(f"{model}, never hits again", "points", loss(model, "session"), stated, model)
        for model in (LLAMA_13B, LLAMA_65B)
    ]
    return Table(
        "Figure 22",
        "hit rate lost if positions are stored with the keys (OF), 128G/10T",
        tuple(rows),
        notes(reasons.OVERFLOW),
    )


def _capacity(of: OutcomeOf) -> Table:
    rows = [
        Row(
            f"RCC/CCpUT {share}, {assumed}",
            "%",
            100 * of(run).hits_fu,
            numbers.CAPACITY_HIT_RATE[share],
        )
        for share in RATIOS
        for assumed, run in _capacity_runs(share).items()
    ]
    return Table(
        "Figure 23 (preprint: 25)",
        "hit rate of turns with history by capacity, TTL of an hour, LLaMA-13B",
        tuple(rows),
        notes(reasons.CAPACITY),
    )


def _media(of: OutcomeOf) -> Table:
    rows: list[Row] = []
    for media in (*MEDIA, numbers.ALL_TIERS):
        stated = {by: numbers.MEDIA_HIT_RATE[by][media] for by in (PAPER, PREPRINT)}

        def hits(model: str, media: str = media) -> float:
            run = _media_run(model, media) if media in MEDIA else Run(model=model)
            return 100 * of(run).hits_all

        rows += model_rows("%", hits, stated, f"{{}} {media}")
    return Table(
        "Figure 24 (preprint: 26)",
        "hit rate of all turns by what KV is kept in",
        tuple(rows),
        notes(reasons.MEDIA),
    )


def _rates(of: OutcomeOf) -> Table:
    rows = []
    for rate in RATES:
        outcome, at = of(Run(rate=rate)), f"{rate:g} a second"
        lru = of(Run(rate=rate, policy="lru"))
        rows += [
            Row(f"{at}: hit rate", "%", 100 * outcome.hits_all, numbers.RATE_HIT_RATE.get(rate)),
            Row(f"{at}: hit rate, lru", "%", 100 * lru.hits_all),
            Row(f"{at}: TTFT", "s", outcome.start_ttft_mean_s, numbers.RATE_TTFT_S.get(rate)),
            Row(
                f"{at}: prefill throughput",
                "tokens/s",
                outcome.prefill_tokens_per_s,
                numbers.RATE_PREFILL_TOKENS_PER_S.get(rate),
            ),
            Row(f"{at}: GPU time", "h", outcome.gpu_hours, numbers.RATE_GPU_HOURS.get(rate)),
        ]
    return Table(
        "Figure 25",
        "by sessions that begin a second, LLaMA-13B, 128G/10T",
        tuple(rows),
        notes(reasons.RATES),
    )


_CACHED = Run(model=LONG_MODEL, charge="packed")
_RECOMPUTED = Run(model=LONG_MODEL, charge="packed", policy=RECOMPUTE)
_PAPER_PCIE = 26e9  # "about 26 GB/s of effective data transmission bandwidth" (§2.4)


def _long_runs() -> Iterator[Run]:
    """Yield the replays that the preprint's long documents need."""
    yield _CACHED
    yield _RECOMPUTED


def _long_tables(of: OutcomeOf) -> Iterator[Table]:
    """Yield figures 23 and 24 of the preprint."""
    yield _long_prefills(of(_CACHED), of(_RECOMPUTED))
    yield _long_overall(of(_CACHED), of(_RECOMPUTED))


def _long_prefills(cached: Outcome, recomputed: Outcome) -> Table:
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


def _long_overall(cached: Outcome, recomputed: Outcome) -> Table:
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
    """Return the seconds of a turn's prefill: turns run one at a time, so none waits."""
    return outcome.start_ttft_mean_s
