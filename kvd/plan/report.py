"""A plan as a JSON document, and as tables for people. Pure.

Hit rates are shown with the recompute load, the length of the queue, and the times to load and to
compute a token's KV. Loading is not always faster: `--load` changes how fast the engine computes,
but not SSD and PCIe. If it is slower, caching costs time however many hits there are, unless the
engine loads only what pays (`--load-policy auto`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from kvd.plan.figures import LEAST_POINTS, SCHEMA, Capacity, Curve, PlanReport, Result, curves_of
from kvd.plan.fleet import FleetOptions
from kvd.plan.sections import Section, load_text, sections_of
from kvd.plan.sizes import format_size
from shared.types.units import format_duration

CURVE_COLUMNS = ("policy", "knee of the tokens: more brings less", "cheapest")


def as_document(report: PlanReport) -> dict[str, Any]:
    """Return the report as plain values for json.dumps."""
    return {
        "schema": SCHEMA,
        "command": list(report.command),
        "kvd": report.version,
        "elapsed_s": report.elapsed_s,
        "workload": asdict(report.workload),
        "model": asdict(report.model),
        "engine": asdict(report.engine),
        "num_gpus": report.num_gpus,
        "prices_per_hour": asdict(report.prices),
        "options": dict(report.options),
        "baselines": [result.as_dict() for result in report.baselines],
        "results": [result.as_dict() for result in report.results],
        "curves": [_curve_document(curve) for curve in curves_of(report.results)],
    }


def tables(report: PlanReport) -> Iterator[Table]:
    """Yield the tables: the setting, the results, and the curves' knees."""
    yield facts_table(report)
    for section in sections_of(report):
        yield _section_table(report, section)
    if any(len(curve.results) > 1 for curve in curves_of(report.results)):
        yield _curves_table(report)


def facts_table(report: PlanReport) -> Table:
    """Return the table of the setting."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in facts(report):
        table.add_row(name, value)
    return table


def facts(report: PlanReport) -> Iterator[tuple[str, str]]:
    """Yield the setting as names and values: sessions, model, engine, servers, kvd, prices."""
    work, model, engine, options = report.workload, report.model, report.engine, report.options
    size = format_size(model.kv_bytes_per_token)
    calling = f", {work.num_tool_turns} of which call tools" if work.num_tool_turns else ""
    turns = f"{work.num_turns} turns{calling}"
    yield "sessions", f"{work.origin}: {work.num_sessions} sessions, {turns}"
    arrivals = f"over {format_duration(work.span_s)}, think times x {options['think_scale']:g}"
    yield "begin", f"{arrivals}, recompute load {load_text(work.recompute_load)}"
    yield "measured", f"from turn {options['warmup_turns'] + 1} on"
    state = f", {format_size(model.state_bytes)} a state" if model.state_bytes else ""
    if model.attention_window:
        of_last = format_size(model.windowed_bytes_per_token)
        state += f" and {of_last} of the last {model.attention_window}"
    yield "model", f"{model.name}, KV {size} a token{state}, window {model.window_tokens}"
    footprint = format_size(work.footprint_bytes)
    yield "footprint", f"{footprint} for all sessions, longest context {work.longest_tokens}"
    prefill = f"{engine.prefill_s_per_token * 1e3:.3g} ms a token and {engine.fixed_s * 1e3:.3g} ms"
    step = f"decode step {engine.decode_step_s * 1e3:.3g} ms"
    yield "engine", f"{engine.slots} slots, prefill {prefill}, {step}"
    yield "history", history_text(report)
    if any(result.fleet.num_servers > 1 for result in report.results):
        yield "servers", servers_text([result.fleet for result in report.results])
    has_tools = work.num_tool_turns > 0
    yield "kvd", ", ".join(_option_texts(report.options, has_tools=has_tools))
    prices = report.prices
    storage = f"DRAM {prices.dram_gb:g} and SSD {prices.ssd_gb:g} a GB"
    yield "prices", f"of an hour: {report.num_gpus} GPUs at {prices.gpu:g}, {storage}"
    yield "took", format_duration(report.elapsed_s)


def rows(report: PlanReport) -> Iterator[tuple[str, str, Result]]:
    """Yield capacity, policy and result of each replay, baselines first."""
    has_hbm = len({result.capacity.hbm_bytes for result in report.results}) > 1
    for result in report.baselines:
        hbm = f"HBM {format_size(result.capacity.hbm_bytes)}" if has_hbm else ""
        yield f"{_servers(result)}{hbm}", "RE", result
    has_policies = len({result.policy for result in report.results}) > 1
    for result in report.results:
        capacity = capacity_text(result.capacity, has_hbm=has_hbm)
        name = result.policy
        if result.fleet.num_servers > 1:
            routing = result.fleet.routing
            name = f"{name}, {routing}" if has_policies else routing
        yield f"{_servers(result)}{capacity}", name, result


def _servers(result: Result) -> str:
    """Return the number of servers as a prefix of a capacity; "": one."""
    number = result.fleet.num_servers
    return f"{number:,} x " if number > 1 else ""


def capacity_text(capacity: Capacity, *, has_hbm: bool = False) -> str:
    """Return a capacity as "DRAM + SSD"."""
    text = f"{format_size(capacity.dram_bytes)} + {format_size(capacity.ssd_bytes)}"
    return f"{format_size(capacity.hbm_bytes)} + {text}" if has_hbm else text


def curve_texts(curve: Curve) -> tuple[str, ...]:
    """Return a curve's name, its knee with its hit rate, and its cheapest point."""
    knee = "none in this range"
    if len(curve.results) < LEAST_POINTS:
        knee = f"takes {LEAST_POINTS} capacities"
    elif curve.knee is not None:
        at = curve.results[curve.knee]
        knee = f"{capacity_text(at.capacity)} ({at.outcome.hits_tok:.1%} of tokens)"
    best = curve.results[curve.cheapest]
    cheapest = (
        f"{capacity_text(best.capacity)} ({best.cost.total:,.2f},"
        f" {best.outcome.hits_tok:.1%} of tokens)"
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


def _section_table(report: PlanReport, section: Section) -> Table:
    """Return the table of a section; a capacity is shown in its first row only."""
    table = Table(
        *("DRAM + SSD", "policy"),
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title=section.title,
        title_justify="left",
        caption=section.legend or None,
        caption_justify="left",
    )
    for column in section.columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    last = None
    for capacity, policy, result in rows(report):
        if last is not None and capacity != last:
            table.add_section()
        cells = (column.cell(result) for column in section.columns)
        table.add_row("" if capacity == last else capacity, policy, *cells)
        last = capacity
    return table


def _curves_table(report: PlanReport) -> Table:
    table = Table(
        *CURVE_COLUMNS,
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        title="how much",
        title_justify="left",
    )
    for curve in curves_of(report.results):
        table.add_row(*curve_texts(curve))
    return table


def _option_texts(options: Mapping[str, Any], *, has_tools: bool) -> Iterator[str]:
    """Yield the assumptions about kvd, in words; values as in PlanReport.options."""
    yield f"{options['tiers']} tiers, charged {options['charge']}"
    ttl_s = options["ttl_s"]
    yield "no TTL" if ttl_s is None else f"TTL {format_duration(ttl_s)}"
    yield f"watermark {options['watermark']:.3g}"
    yield f"loads {options['load_policy']}"
    yield "end hints" if options["end_hints"] else "no end hints"
    if has_tools:
        yield "tool hints" if options["tool_hints"] else "no tool hints"
    yield f"SSD {options['ssd_bytes_per_s'] / 1e9:.3g} GB/s"
    yield f"PCIe {options['pcie_bytes_per_s'] / 1e9:.3g} GB/s"


def servers_text(fleets: Sequence[FleetOptions]) -> str:
    """Return how servers are replayed, and how they move sessions and fail."""
    fleet = max(fleets, key=lambda each: each.num_servers)
    text = f"{fleet.num_replayed} of {fleet.num_servers:,} replayed"
    if fleet.remote_bytes_per_s:
        stored = f"{fleet.remote_write} stored"
        if fleet.remote_write == "all":
            stored += f" after {format_duration(fleet.quiet_s)}"
        if not fleet.remote_wait:
            stored += ", no turn waits for it"
        text += f", remote store {fleet.remote_bytes_per_s / 1e9:.3g} GB/s each, {stored}"
    for per_day, what in (
        (fleet.failures_per_day, "lost"),
        (fleet.drains_per_day, "taken out"),
    ):
        if per_day:
            text += f", each {what} {per_day:g} times a day for {format_duration(fleet.away_s)}"
    return text


US_PER_S = 1e6


def history_text(report: PlanReport) -> str:
    """Return the times to compute and to load a token, and whether loading pays."""
    compute_s = report.engine.prefill_s_per_token
    kv_bytes = report.model.kv_bytes_per_token
    dram_s = kv_bytes / report.options["pcie_bytes_per_s"]
    ssd_s = dram_s + kv_bytes / report.options["ssd_bytes_per_s"]
    text = (
        f"{_micros(compute_s)} a token to compute, {_micros(dram_s)} to load from DRAM,"
        f" {_micros(ssd_s)} from SSD"
    )
    model = report.model
    for part, num_bytes in (
        ("state", model.state_bytes),
        ("window", model.attention_window * model.windowed_bytes_per_token),
    ):
        if num_bytes:
            of_dram_s = num_bytes / report.options["pcie_bytes_per_s"]
            of_ssd_s = of_dram_s + num_bytes / report.options["ssd_bytes_per_s"]
            text += f"; a {part} {format_duration(of_dram_s)} and {format_duration(of_ssd_s)}"
    if ssd_s <= compute_s or report.options["load_policy"] == "never":
        return text
    where = "from both" if dram_s > compute_s else "from SSD"
    if report.options["load_policy"] == "auto":
        return f"{text}: what does not pay, {where}, is computed"
    return f"{text}: loading {where} loses time; --load-policy auto computes instead"


def _micros(seconds: float) -> str:
    return f"{seconds * US_PER_S:,.3g} µs"
