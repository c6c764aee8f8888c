"""The result tables of a plan, as data: their columns and legends. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvd.plan.figures import PlanReport, Result
from kvd.plan.outcome import BUSY_QUEUE
from kvd.plan.sizes import format_size
from shared.types.units import format_duration

_S_PER_H = 3600.0


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        heading: the heading, in lines, so that tables fit on a terminal.
        cell: returns a result's text in this column.
    """

    heading: str
    cell: Callable[[Result], str]

    @property
    def name(self) -> str:
        """The heading in one line."""
        return self.heading.replace("\n", " ")


@dataclass(frozen=True, slots=True)
class Section:
    """A table.

    Attributes:
        title: its title.
        columns: its columns.
        legend: explains the headings; "": they need no explanation.
    """

    title: str
    columns: tuple[Column, ...]
    legend: str = ""


def sections_of(report: PlanReport) -> Iterator[Section]:
    """Yield the tables of a report: hits, tiers, states, windows, servers, times, costs."""
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
    """Return a recompute load for people; 0: all sessions begin at once."""
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
_PLACES_IF_ANY = (  # columns that are shown only if an outcome has this count
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
