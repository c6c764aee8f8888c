"""A plan as a JSON document, and as tables for people. Pure.

Hit rates never stand alone: the recompute load and the length of the queue are beside them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from kvd.plan.curves import LEAST_POINTS, Curve, curves_of
from kvd.plan.decimal_sizes import format_size
from kvd.plan.figures import SCHEMA, Capacity, PlanReport, Result
from shared.units import format_duration

_S_PER_H = 3600.0
HIT_COLUMNS = ("load", "queue", "p99", "all", "fu", "tok", "DRAM share", ">= 4 ahead")
COST_COLUMNS = (
    "TTFT", "p99", "from start", "prefill tok/s", "GPU time", "SSD written", "cost", "of RE's",
)  # fmt: skip


def as_document(report: PlanReport) -> dict[str, Any]:
    """Plain values for json.dumps."""
    return {
        "schema": SCHEMA,
        "command": list(report.command),
        "kvd": report.version,
        "elapsed_s": report.elapsed_s,
        "workload": asdict(report.workload),
        "model": asdict(report.model),
        "engine": asdict(report.engine),
        "num_gpus": report.num_gpus,
        "prices_per_hour": report.prices.as_dict(),
        "options": dict(report.options),
        "baselines": [result.as_dict() for result in report.baselines],
        "results": [result.as_dict() for result in report.results],
        "curves": [_curve_document(curve) for curve in curves_of(report.results)],
    }


def tables(report: PlanReport) -> Iterator[Table]:
    """What was replayed on what; hits; times and costs; where it bends."""
    yield facts_table(report)
    yield _hits_table(report)
    yield _costs_table(report)
    if any(len(curve.results) > 1 for curve in curves_of(report.results)):
        yield _curves_table(report)


def facts_table(report: PlanReport) -> Table:
    """What was replayed on what."""
    table = Table(box=None, show_header=False)
    for name, value in facts(report):
        table.add_row(name, value)
    return table


def facts(report: PlanReport) -> Iterator[tuple[str, str]]:
    """The same, by name."""
    work, model, engine, options = report.workload, report.model, report.engine, report.options
    size = format_size(model.kv_bytes_per_token)
    yield "sessions", f"{work.origin}: {work.num_sessions} sessions, {work.num_turns} turns"
    arrivals = f"over {format_duration(work.span_s)}, think times x {options['think_scale']:g}"
    yield "begin", f"{arrivals}, recompute load {load_text(work.recompute_load)}"
    yield "measured", f"from turn {options['warmup_turns'] + 1} on"
    yield "model", f"{model.name}, KV {size} a token, window {model.window_tokens}"
    footprint = format_size(work.footprint_bytes)
    yield "footprint", f"{footprint} for all sessions, longest context {work.longest_tokens}"
    prefill = f"{engine.prefill_s_per_token * 1e3:.3g} ms a token and {engine.fixed_s * 1e3:.3g} ms"
    step = f"decode step {engine.decode_step_s * 1e3:.3g} ms"
    yield "engine", f"{engine.slots} slots, prefill {prefill}, {step}"
    yield "kvd", ", ".join(_option_texts(report.options))
    prices = report.prices
    storage = f"DRAM {prices.dram_gb:g} and SSD {prices.ssd_gb:g} a GB"
    yield "prices", f"of an hour: {report.num_gpus} GPUs at {prices.gpu:g}, {storage}"
    yield "took", format_duration(report.elapsed_s)


def rows(report: PlanReport) -> Iterator[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    """Capacity, policy, cells of HIT_COLUMNS, cells of COST_COLUMNS; the baselines come first."""
    has_hbm = len({result.capacity.hbm_bytes for result in report.results}) > 1
    for result in report.baselines:
        hbm = f"HBM {format_size(result.capacity.hbm_bytes)}" if has_hbm else ""
        yield hbm, "RE", _hits(result), _costs(result)
    for result in report.results:
        capacity = capacity_text(result.capacity, has_hbm=has_hbm)
        yield capacity, result.policy, _hits(result), _costs(result)


def capacity_text(capacity: Capacity, *, has_hbm: bool = False) -> str:
    """DRAM + SSD."""
    text = f"{format_size(capacity.dram_bytes)} + {format_size(capacity.ssd_bytes)}"
    return f"{format_size(capacity.hbm_bytes)} + {text}" if has_hbm else text


def load_text(load: float) -> str:
    """0 is of sessions that all begin at once."""
    return f"{load:.2f}" if load else "-"


def curve_texts(curve: Curve) -> tuple[str, ...]:
    """Name, knee with its tok, cheapest with its cost and tok."""
    knee = "none in this range"
    if len(curve.results) < LEAST_POINTS:
        knee = f"takes {LEAST_POINTS} capacities"
    elif curve.knee is not None:
        at = curve.results[curve.knee]
        knee = f"{capacity_text(at.capacity)} (tok {at.outcome.hits_tok:.1%})"
    best = curve.results[curve.cheapest]
    cheapest = (
        f"{capacity_text(best.capacity)} ({best.cost.total:,.2f}, tok {best.outcome.hits_tok:.1%})"
    )
    return curve.name, knee, cheapest


def _curve_document(curve: Curve) -> dict[str, Any]:
    def point(index: int | None) -> dict[str, Any] | None:
        return None if index is None else asdict(curve.results[index].capacity)

    return {
        "name": curve.name,
        "policy": curve.policy,
        "knee": point(curve.knee),
        "cheapest": point(curve.cheapest),
    }


def _hits_table(report: PlanReport) -> Table:
    table = _titled("hits: share of turns and of history tokens", HIT_COLUMNS)
    _fill(table, ((capacity, policy, hits) for capacity, policy, hits, _ in rows(report)))
    return table


def _costs_table(report: PlanReport) -> Table:
    table = _titled("time and cost", COST_COLUMNS)
    _fill(table, ((capacity, policy, costs) for capacity, policy, _, costs in rows(report)))
    return table


def _curves_table(report: PlanReport) -> Table:
    columns = ("policy", "knee of tok: more brings less", "cheapest")
    table = Table(*columns, box=None, title="how much", title_justify="left")
    for curve in curves_of(report.results):
        table.add_row(*curve_texts(curve))
    return table


def _titled(title: str, columns: Sequence[str]) -> Table:
    table = Table("DRAM + SSD", "policy", box=None, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _fill(table: Table, found: Iterable[tuple[str, str, tuple[str, ...]]]) -> None:
    """A section for each capacity, which is said once."""
    last = None
    for capacity, policy, cells in found:
        if last is not None and capacity != last:
            table.add_section()
        table.add_row("" if capacity == last else capacity, policy, *cells)
        last = capacity


def _hits(result: Result) -> tuple[str, ...]:
    outcome = result.outcome
    return (
        load_text(outcome.recompute_load),
        f"{outcome.queue_mean:,.0f}",
        f"{outcome.queue_p99:,}",
        _percent(outcome.hits_all),
        _percent(outcome.hits_fu),
        _percent(outcome.hits_tok),
        _percent(outcome.dram_share) if outcome.num_hits else "-",
        _percent(outcome.dram_share_4_ahead) if outcome.num_hits_4_ahead else "-",
    )


def _costs(result: Result) -> tuple[str, ...]:
    outcome = result.outcome
    return (
        format_duration(outcome.ttft_mean_s),
        format_duration(outcome.ttft_p99_s),
        format_duration(outcome.start_ttft_mean_s),
        f"{outcome.prefill_tokens_per_s:,.0f}",
        format_duration(outcome.gpu_hours * _S_PER_H),
        format_size(outcome.ssd_bytes_written),
        f"{result.cost.total:,.2f}",
        _percent(result.cost_ratio) if result.cost_ratio else "-",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _option_texts(options: Mapping[str, Any]) -> Iterator[str]:
    """What kvd does, in words; values as in PlanReport.options."""
    yield f"{options['tiers']} tiers, charged {options['charge']}"
    ttl_s = options["ttl_s"]
    yield "no TTL" if ttl_s is None else f"TTL {format_duration(ttl_s)}"
    yield f"watermark {options['watermark']:.3g}"
    yield f"loads {options['load_policy']}"
    yield "end hints" if options["end_hints"] else "no end hints"
    yield f"SSD {options['ssd_bytes_per_s'] / 1e9:.3g} GB/s"
    yield f"PCIe {options['pcie_bytes_per_s'] / 1e9:.3g} GB/s"
