"""A plan as a JSON document, and as tables for people. Pure.

Hit rates never stand alone: the recompute load and the length of the queue are beside them, and
what a token's KV takes to load and to compute. Loading need not be sooner: `--load` changes how
fast the engine computes, and leaves SSD and PCIe as they are. Then caching loses, however much is
found, unless loading has to pay (`--load-policy auto`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from kvd.plan.figures import LEAST_POINTS, SCHEMA, Capacity, Curve, PlanReport, Result, curves_of
from kvd.plan.fleet import FleetOptions
from kvd.plan.outcome import BUSY_QUEUE
from kvd.plan.sizes import format_size
from shared.types.units import format_duration

_S_PER_H = 3600.0


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        heading: heading in lines, so that a table fits on a terminal.
        cell: what a result has in it.
    """

    heading: str
    cell: Callable[[Result], str]

    @property
    def name(self) -> str:
        """The heading in one line."""
        return self.heading.replace("\n", " ")


@dataclass(frozen=True, slots=True)
class Section:
    """One table.

    Attributes:
        legend: what the headings do not say; "" if they say everything.
    """

    title: str
    columns: tuple[Column, ...]
    legend: str = ""


def sections_of(report: PlanReport) -> Iterator[Section]:
    """Yield the sections that a report has: hits, where they were, states, times, costs."""
    yield Section("hits", _HITS, _HITS_LEGEND)
    columns, legends = list(_PLACES), [_PLACES_LEGEND]
    for name, column, legend in _PLACES_IF_ANY:
        if any(getattr(result.outcome, name) for result in report.results):
            columns.append(column)
            legends.append(legend)
    yield Section("where the history was", tuple(columns), " ".join(legends))
    if report.model.state_bytes:
        yield Section("states", _parts("state"), _PARTS_LEGEND.format(part="state"))
    if report.model.attention_window:
        yield Section("windows", _parts("window"), _PARTS_LEGEND.format(part="window"))
    if any(result.fleet.num_servers > 1 for result in report.results):
        yield Section("servers", _SERVERS, _SERVERS_LEGEND)
    yield Section("time", _TIMES, _TIMES_LEGEND)
    yield Section("cost", _COSTS, _COSTS_LEGEND)


def load_text(load: float) -> str:
    """Write a recompute load; 0 is that of sessions that all begin at once."""
    return f"{load:.2f}" if load else "-"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


_HITS = (
    Column("load", lambda found: load_text(found.outcome.recompute_load)),
    Column("queue\nmean", lambda found: f"{found.outcome.queue_mean:,.0f}"),
    Column("queue\np99", lambda found: f"{found.outcome.queue_p99:,}"),
    Column("hits\nof all\nturns", lambda found: _percent(found.outcome.hits_all)),
    Column("hits of\nlater\nturns", lambda found: _percent(found.outcome.hits_fu)),
    Column("history\ntokens\nloaded", lambda found: _percent(found.outcome.hits_tok)),
    Column("recom-\nputed\na turn", lambda found: f"{found.outcome.recomputed_per_turn:,.0f}"),
)
_PLACES = (
    Column(
        "of hits\nin DRAM",
        lambda found: _percent(found.outcome.dram_share) if found.outcome.num_hits else "-",
    ),
    Column(
        f"with {BUSY_QUEUE}\nahead",
        lambda found: (
            _percent(found.outcome.dram_share_4_ahead) if found.outcome.num_hits_4_ahead else "-"
        ),
    ),
    Column("in DRAM\nwhen it\ncame", lambda found: _percent(found.outcome.resident_fu)),
)
_HITS_LEGEND = (
    "RE: everything is recomputed. load: recompute load. queue: turns that waited when another"
    " came. later turns: those with history. recomputed a turn: history tokens that were not"
    " loaded."
)
_PLACES_LEGEND = (
    "of hits in DRAM: the others were on SSD when their turn started. with"
    f" {BUSY_QUEUE} ahead: the same, of hits with {BUSY_QUEUE} or more turns before them. in DRAM"
    " when it came: of later turns, those whose session was."
)
_PLACES_IF_ANY = (  # what there has to be for it to be shown
    (
        "num_tool_returns",
        Column("with\ntools", lambda found: _percent(found.outcome.resident_tools)),
        "with tools: the same, of turns that come with the results of tools.",
    ),
    (
        "num_guarded",
        Column("held,\nnot\nloaded", lambda found: _percent(found.outcome.guarded_fu)),
        "held, not loaded: of later turns, those whose history was computed: loading did not pay.",
    ),
)


def _parts(part: str) -> tuple[Column, ...]:
    """Return the columns about states, or about windows."""
    return (
        Column("of what\na turn\nstores", lambda found: _percent(found.outcome.parts_of_stored)),
        Column("of what\nis in\nDRAM", lambda found: _percent(found.outcome.parts_of_dram)),
        Column("of what\nis on\nSSD", lambda found: _percent(found.outcome.parts_of_ssd)),
        Column(f"held,\nbut no\n{part}", lambda found: _percent(found.outcome.partless_fu)),
    )


_PARTS_LEGEND = (
    "the share of {part}s in bytes. held, but no {part}: of later turns, those whose history was"
    " held, but no {part} inside of it, so that all of it was computed."
)
_TIMES = (
    Column("TTFT", lambda found: format_duration(found.outcome.ttft_mean_s)),
    Column("TTFT\np99", lambda found: format_duration(found.outcome.ttft_p99_s)),
    Column("TTFT\nfrom\nstart", lambda found: format_duration(found.outcome.start_ttft_mean_s)),
    Column("prefill\ntokens\na second", lambda found: f"{found.outcome.prefill_tokens_per_s:,.0f}"),
    Column("GPU\ntime", lambda found: format_duration(found.outcome.gpu_hours * _S_PER_H)),
)
_TIMES_LEGEND = (
    "TTFT: time to first token, from a turn's arrival; from start: without its wait in the queue."
)
_COSTS = (
    Column("stored\na turn", lambda found: format_size(found.outcome.stored_bytes_per_turn)),
    Column("SSD\nwritten", lambda found: format_size(found.outcome.ssd_bytes_written)),
    Column("cost", lambda found: f"{found.cost.total:,.2f}"),
    Column(
        "share of\nRE's cost",
        lambda found: _percent(found.cost_ratio) if found.cost_ratio else "-",
    ),
    Column("of 1M\nprompt\ntokens", lambda found: f"{found.cost_of_million:,.3g}"),
)
_SERVERS = (
    Column("moved", lambda found: _percent(found.outcome.moved_fu)),
    Column("history\ntokens\nfetched", lambda found: _percent(found.outcome.fetched_tok)),
    Column("turns\nbegun\nanew", lambda found: f"{found.outcome.num_retried:,}"),
    Column("busiest", lambda found: f"{found.outcome.busiest:.2f}"),
    Column("pushed", lambda found: format_size(found.of_all(found.outcome.bytes_pushed))),
    Column("store's\nrequests\na second", lambda found: f"{found.store_requests_per_s:,.1f}"),
)
_SERVERS_LEGEND = (
    "moved: of later turns, those that came to another server than the one before them. fetched:"
    " from the remote store. begun anew: their server was lost. busiest: the time for which the"
    " busiest server computed, by the mean. Bytes and requests are those of all servers."
)
_COSTS_LEGEND = "stored a turn: bytes of tokens, states and windows that were not stored before it."


CURVE_COLUMNS = ("policy", "knee of the tokens: more brings less", "cheapest")


def as_document(report: PlanReport) -> dict[str, Any]:
    """Return plain values for json.dumps."""
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
    """Yield what was replayed on what; hits, times and costs; where it bends."""
    yield facts_table(report)
    for section in sections_of(report):
        yield _section_table(report, section)
    if any(len(curve.results) > 1 for curve in curves_of(report.results)):
        yield _curves_table(report)


def facts_table(report: PlanReport) -> Table:
    """Return what was replayed on what."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in facts(report):
        table.add_row(name, value)
    return table


def facts(report: PlanReport) -> Iterator[tuple[str, str]]:
    """Say what was replayed on what, by name."""
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
    """Yield capacity, policy and what was found; the baselines come first."""
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
    """Write how many servers there are, before what each has."""
    number = result.fleet.num_servers
    return f"{number:,} x " if number > 1 else ""


def capacity_text(capacity: Capacity, *, has_hbm: bool = False) -> str:
    """Write a capacity as DRAM + SSD."""
    text = f"{format_size(capacity.dram_bytes)} + {format_size(capacity.ssd_bytes)}"
    return f"{format_size(capacity.hbm_bytes)} + {text}" if has_hbm else text


def curve_texts(curve: Curve) -> tuple[str, ...]:
    """Name, knee with its share of tokens, cheapest with its cost and share of tokens."""
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
    """Return a table section for each capacity, which is said once."""
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
    """Yield what kvd does, in words; values as in PlanReport.options."""
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
    """Say how servers are replayed, and what becomes of them."""
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
    """Say what a token of history takes, computed and loaded, and what a slower load means."""
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
