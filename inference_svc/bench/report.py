"""A report as tables for the terminal, and as a plot: bars of every variant and of the ratios."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from inference_svc.bench.figures import Case, Measured, Report
from shared.measuring.plots import picture
from shared.measuring.report import number, quartiles, table_of, verdict
from shared.measuring.statistics import Spread
from shared.terminal.printing import counted
from shared.terminal.tables import Column, facts, fits, fitted
from shared.types.units import format_bytes, format_duration

_RATIOS = (  # columns; a row is the case's name, in its first row only, and a ratio
    (Column("case", may_be_cut=True, least=12), lambda each: each[0]),
    (Column("what"), lambda each: each[1].what),
    (Column("of", rank=3), lambda each: _heading(each[1].metric)),
    (number("pairs", 4), lambda each: str(each[1].num_pairs)),
    (number("median"), lambda each: f"{each[1].ratio.median:.3g}"),
    (number("quartiles", 2), lambda each: quartiles(each[1].ratio, ".3g")),
    (number("goal", 1), lambda each: each[1].goal),
    (number(""), lambda each: verdict(each[1].is_met) if each[1].goal else ""),
)


def tables(report: Report, width: int) -> Iterator[Table]:
    """Yield tables of the facts, the variants and their ratios, for a terminal `width` wide."""
    yield facts(_facts(report), width)
    columns, rows = _variants(report)
    if fits(columns, rows, width):
        yield fitted(columns, rows, width, f"{report.part}: medians")
    else:
        yield from (_metrics_table(report, case, width) for case in report.cases)
    if any(case.ratios for case in report.cases):
        ratios = (
            ("" if index else case.name, ratio)
            for case in report.cases
            for index, ratio in enumerate(case.ratios)
        )
        yield table_of(_RATIOS, ratios, width, f"{report.part}: ratios, pair by pair")


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    subject, machine = report.subject, report.machine
    weights = "random weights" if subject.random else "weights from disk"
    busy = f"load before {machine.load_average:.2f}"
    yield "model", f"{subject.name}, {subject.architecture}, {subject.layers} layers, {weights}"
    yield "computed", f"{subject.dtype} on {subject.device}, {counted(subject.threads, 'thread')}"
    yield "weights", f"{subject.num_weights / 1e6:,.1f} million"
    kv = f"{format_bytes(subject.kv_bytes_per_token)} a token"
    yield "KV", f"{kv}, blocks of {subject.block_tokens} tokens"
    yield "machine", f"{machine.cpu}, {machine.cpus} usable, {busy}"
    yield "memory", f"{format_bytes(machine.memory_bytes)}, huge pages {machine.huge_pages}"
    yield "software", ", ".join(f"{name} {is_}" for name, is_ in machine.libraries.items())
    yield "took", format_duration(report.elapsed_s)
    if machine.accelerator:
        yield "accelerator", machine.accelerator


def _metrics(cases: Iterable[Case]) -> list[str]:
    return list(
        dict.fromkeys(
            metric for case in cases for found in case.variants for metric in found.values
        )
    )


def _variants(report: Report) -> tuple[list[Column], list[list[str]]]:
    """Put all cases into one table, with a row for each variant."""
    metrics = _metrics(report.cases)
    headings = [number(_heading(metric)) for metric in metrics]
    columns = [Column("case"), Column("variant"), number("n"), *headings]
    rows = []
    for case in report.cases:
        for index, found in enumerate(case.variants):
            values = [_median(found, metric) for metric in metrics]
            rows.append(["" if index else case.name, found.variant, _number(found), *values])
    return columns, rows


def _metrics_table(report: Report, case: Case, width: int) -> Table:
    """Put one case into a table, with a row for each metric: for many metrics."""
    variants = [number(found.variant) for found in case.variants]
    columns = [Column("median", may_be_cut=True), *variants]
    rows = [["n", *map(_number, case.variants)]] + [
        [_heading(metric), *(_median(found, metric) for found in case.variants)]
        for metric in _metrics([case])
    ]
    return fitted(columns, rows, width, f"{report.part}: {case.name}")


def _number(found: Measured) -> str:
    return f"{found.num} (-{found.num_discarded})" if found.num_discarded else str(found.num)


def _median(found: Measured, metric: str) -> str:
    return _value(metric, found.values[metric].median) if metric in found.values else ""


def _heading(metric: str) -> str:
    """Turn a metric's name into a heading."""
    name = metric.removesuffix("_per_s").removesuffix("_s")
    unit = "/s" if metric.endswith("_per_s") else ""
    return name.replace("_", " ") + unit


def _value(metric: str, value: float) -> str:
    if metric.endswith("_per_s"):
        return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    if metric.endswith("_s"):
        return f"{value * 1e3:,.1f} ms" if value < 10 else f"{value:,.1f} s"
    if metric.endswith("_share"):
        return f"{value:.1%}"
    if metric.endswith("_bytes"):
        return format_bytes(round(value))
    return f"{value:g}"


BAR_SPACE = 0.8  # share of a case's room that its bars take
LOG_FROM = 20.0  # ratio of the largest to the least value from which the axis is logarithmic


def plot(report: Report, path: Path) -> None:
    """Write the plot; its format follows from the file's name.

    Raises:
        NoPlotError: matplotlib is missing, or the file cannot be written.
    """
    width = max(7.0, 1.2 * len(report.cases) + 3)
    subject = report.subject
    with picture(path, 2, 1, figsize=(width, 8)) as (figure, (above, below)):
        figure.suptitle(
            f"inference-svc bench {report.part}: {subject.name}, {subject.dtype} on"
            f" {subject.device}, {subject.threads} threads"
        )
        _draw(above, report.cases, [_values(case, report.metric) for case in report.cases])
        above.set_ylabel(report.metric)
        _draw(below, report.cases, [_ratios(case) for case in report.cases])
        below.set_ylabel("median ratio")
        below.axhline(1.0, color="grey", linewidth=0.8)


Bars = dict[str, Spread]  # by name


def _values(case: Case, metric: str) -> Bars:
    found: Bars = {}
    for variant in case.variants:
        # In a part whose cases have different metrics (overlap), each shows its first one.
        spread = variant.values.get(metric) or next(iter(variant.values.values()), None)
        if spread is not None:
            found[variant.variant] = spread
    return found


def _ratios(case: Case) -> Bars:
    return {f"{ratio.what} ({ratio.metric})": ratio.ratio for ratio in case.ratios}


def _draw(axes: Any, cases: tuple[Case, ...], groups: list[Bars]) -> None:
    """Draw bars with quartiles, in one group for each case."""
    names = list(dict.fromkeys(name for bars in groups for name in bars))
    medians = [bar.median for bars in groups for bar in bars.values() if bar.median > 0]
    if not names or not medians:
        return
    width = BAR_SPACE / len(names)
    for place, name in enumerate(names):
        at = [index for index, bars in enumerate(groups) if name in bars]
        bars = [groups[index][name] for index in at]
        axes.bar(
            [index + (place + 0.5) * width - BAR_SPACE / 2 for index in at],
            [bar.median for bar in bars],
            width,
            yerr=[
                [bar.median - bar.low for bar in bars],
                [bar.high - bar.median for bar in bars],
            ],
            label=name,
            capsize=2,
        )
    if max(medians) > LOG_FROM * min(medians):
        axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), [case.name for case in cases], rotation=20)
    axes.legend(fontsize="small")
