"""The columns of a plan's tables: what each is called, and how its cells are written. Pure.

Hit rates never stand alone: the recompute load and the length of the queue are beside them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvd.plan.decimal_sizes import format_size
from kvd.plan.figures import PlanReport, Result
from kvd.plan.outcome import BUSY_QUEUE
from shared.types.units import format_duration

_S_PER_H = 3600.0


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        heading: in lines, so that a table fits on a terminal.
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
    """Hits, where they were, times, costs."""
    has_guarded = any(result.outcome.num_guarded for result in report.results)
    yield Section("hits", _HITS, _HITS_LEGEND)
    if has_guarded:
        legend = f"{_PLACES_LEGEND} {_GUARDED_LEGEND}"
        yield Section("where the history was", (*_PLACES, _GUARDED), legend)
    else:
        yield Section("where the history was", _PLACES, _PLACES_LEGEND)
    yield Section("time", _TIMES, _TIMES_LEGEND)
    yield Section("cost", _COSTS)


def load_text(load: float) -> str:
    """0 is of sessions that all begin at once."""
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
)
_GUARDED = Column("held,\nnot\nloaded", lambda found: _percent(found.outcome.guarded_fu))
_HITS_LEGEND = (
    "RE: everything is recomputed. load: recompute load. queue: turns that waited when another"
    " came. later turns: those with history."
)
_PLACES_LEGEND = (
    "of hits in DRAM: the others were on SSD when their turn started. with"
    f" {BUSY_QUEUE} ahead: the same, of hits with {BUSY_QUEUE} or more turns before them."
)
_GUARDED_LEGEND = "held, not loaded: of later turns, those whose history was computed sooner."
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
    Column("SSD\nwritten", lambda found: format_size(found.outcome.ssd_bytes_written)),
    Column("cost", lambda found: f"{found.cost.total:,.2f}"),
    Column(
        "share of\nRE's cost",
        lambda found: _percent(found.cost_ratio) if found.cost_ratio else "-",
    ),
)
