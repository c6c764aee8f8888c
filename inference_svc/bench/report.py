"""A report as tables for people. Pure."""

from collections.abc import Iterable, Iterator

from rich.table import Table

from inference_svc.bench.figures import Case, Measured, Report
from shared.statistics import Spread
from shared.units import format_bytes, format_duration

MOST_COLUMNS = 6  # of metrics, that a terminal has room for


def tables(report: Report) -> Iterator[Table]:
    """What was measured on what, then the variants, then their ratios."""
    yield _facts_table(report)
    metrics = _metrics(report.cases)
    if len(metrics) <= MOST_COLUMNS:
        yield _variants_table(report, metrics)
    else:
        yield from (_metrics_table(report, case) for case in report.cases)
    if any(case.ratios for case in report.cases):
        yield _ratios_table(report)


def _facts_table(report: Report) -> Table:
    subject, machine = report.subject, report.machine
    table = Table(box=None, show_header=False)
    weights = "random weights" if subject.random else "weights from disk"
    kv = f"{format_bytes(subject.kv_bytes_per_token)} a token, blocks of {subject.block_tokens}"
    busy = f"load before {machine.load_average:.2f}"
    for name, value in (
        ("model", f"{subject.name}, {subject.architecture}, {subject.layers} layers, {weights}"),
        ("computed", f"{subject.dtype} on {subject.device}, {subject.threads} threads"),
        ("weights", f"{subject.num_weights / 1e6:.1f} million"),
        ("KV", kv),
        ("machine", f"{machine.cpu}, {machine.cpus} usable, {busy}"),
        ("memory", f"{format_bytes(machine.memory_bytes)}, huge pages {machine.huge_pages}"),
        ("software", ", ".join(f"{name} {is_}" for name, is_ in machine.libraries.items())),
        ("took", format_duration(report.elapsed_s)),
    ):
        table.add_row(name, value)
    if machine.accelerator:
        table.add_row("accelerator", machine.accelerator)
    return table


def _metrics(cases: Iterable[Case]) -> list[str]:
    return list(
        dict.fromkeys(
            metric for case in cases for found in case.variants for metric in found.values
        )
    )


def _variants_table(report: Report, metrics: list[str]) -> Table:
    """All cases in one table, a row a variant."""
    headings = ["case", "variant", "n", *map(_heading, metrics)]
    table = _titled(f"{report.part}: medians", headings, num_texts=2)
    for case in report.cases:
        for index, found in enumerate(case.variants):
            values = [_median(found, metric) for metric in metrics]
            name = "" if index else case.name
            table.add_row(name, found.variant, _number(found), *values)
        table.add_section()
    return table


def _metrics_table(report: Report, case: Case) -> Table:
    """One case, a row a metric: there are many."""
    headings = [f"{report.part}: {case.name}", *(found.variant for found in case.variants)]
    table = _titled("medians", headings, num_texts=1)
    table.add_row("n", *map(_number, case.variants))
    for metric in _metrics([case]):
        table.add_row(_heading(metric), *(_median(found, metric) for found in case.variants))
    return table


def _number(found: Measured) -> str:
    return f"{found.num} (-{found.num_discarded})" if found.num_discarded else str(found.num)


def _median(found: Measured, metric: str) -> str:
    return _value(metric, found.values[metric].median) if metric in found.values else ""


def _ratios_table(report: Report) -> Table:
    headings = ["case", "what", "of", "pairs", "median", "quartiles", "goal", ""]
    table = _titled(f"{report.part}: ratios, pair by pair", headings, num_texts=3)
    for case in report.cases:
        _add_ratios(table, case)
    return table


def _add_ratios(table: Table, case: Case) -> None:
    for index, ratio in enumerate(case.ratios):
        verdict = ("met" if ratio.is_met else "MISSED") if ratio.goal else ""
        table.add_row(
            "" if index else case.name,
            ratio.what,
            _heading(ratio.metric),
            str(ratio.num_pairs),
            f"{ratio.ratio.median:.3g}",
            _quartiles(ratio.ratio),
            ratio.goal,
            verdict,
        )


def _titled(title: str, headings: list[str], *, num_texts: int) -> Table:
    table = Table(box=None, title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < num_texts else "right")
    return table


def _heading(metric: str) -> str:
    """Turn a metric's name into words."""
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


def _quartiles(found: Spread) -> str:
    return f"{found.low:.3g} - {found.high:.3g}"
