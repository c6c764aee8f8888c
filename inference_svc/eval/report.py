"""A report as tables for people. Pure.

A report of part `compression` as a picture; needs matplotlib.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from inference_svc.eval.figures import (
    CompressedQuality,
    CompressionReport,
    EvalReport,
    PerplexityReport,
    RetrievalReport,
    RotationReport,
    Subject,
)
from inference_svc.eval.options import Truncation
from shared.measuring.plots import picture
from shared.measuring.statistics import Interval
from shared.terminal.printing import counted
from shared.terminal.tables import Column, facts, fitted
from shared.types.units import format_bytes, format_duration


def _number(heading: str, rank: int = 0) -> Column:
    return Column(heading, is_number=True, rank=rank)


_PERPLEXITY = (
    Column("method"),
    _number("nats/token", 2),
    _number("ppl/token"),
    _number("ppl/word"),
    _number("to TT"),
    _number("95 %"),
    _number("tokens computed", 1),
    _number("took", 3),
)
_AFTER = (
    Column("method"),
    _number("ppl/token"),
    _number("ppl/word"),
    _number("to TT"),
    _number("95 %"),
)
_RETRIEVAL = (
    Column("method"),
    _number("kept records"),
    _number("95 %", 2),
    _number("n", 3),
    _number("all records"),
    _number("95 %", 2),
    _number("n", 3),
    _number("tokens computed", 1),
)
_COMPRESSION = (
    Column("policy"),
    _number("keep ratio"),
    _number("KV kept"),
    _number("prefill", 2),
    _number("ppl/token", 1),
    _number("to whole"),
    _number("95 %", 3),
    _number("asked before"),
    _number("95 %", 3),
    _number("asked after"),
    _number("95 %", 3),
)
_ROTATION = (
    Column("dtype"),
    _number("truncations"),
    Column("way"),
    _number("to float64"),
    _number("worst key"),
    _number("to the model's own", 1),
)


def tables(report: EvalReport, width: int) -> Iterator[Table]:
    """What was measured on what, then the figures, for a terminal of so many columns."""
    found = report.found
    if isinstance(found, PerplexityReport):
        about, figures = _perplexity_facts(found), _perplexity_tables(found, width)
    elif isinstance(found, RetrievalReport):
        about, figures = _retrieval_facts(found), _retrieval_tables(found, width)
    elif isinstance(found, CompressionReport):
        about, figures = _compression_facts(found), _compression_tables(found, width)
    else:
        about, figures = _rotation_facts(found), _rotation_tables(found, width)
    took = {"took": format_duration(report.elapsed_s)}
    yield facts({**_subject_facts(report.subject), **about, **took}.items(), width)
    yield from figures


def _subject_facts(subject: Subject) -> dict[str, str]:
    size = f"{subject.num_weights / 1e6:.1f} million weights"
    libraries = ", ".join(f"{name} {version}" for name, version in subject.libraries.items())
    return {
        "model": f"{subject.model}, {subject.architecture}, {size}, {subject.attention_mode}, "
        f"leans on {counted(subject.sink_tokens, 'first token')}",
        "computed": f"{subject.dtype} on {subject.device}, {counted(subject.threads, 'thread')}",
        "machine": subject.cpu,
        "software": libraries,
        "date": subject.date,
    }


def _window(window_tokens: int, truncation: Truncation) -> str:
    num_sinks = truncation.sink_tokens or 0
    stay = "the first stays" if num_sinks == 1 else f"the first {num_sinks} stay"
    sinks = f", {stay}" if num_sinks else ""
    return f"{window_tokens:,} tokens, {truncation.ratio:.3g} of it dropped when it is full{sinks}"


def _perplexity_facts(found: PerplexityReport) -> dict[str, str]:
    window = _window(found.window_tokens, found.truncation)
    if found.reference_ratio != found.truncation.ratio:
        window += f"; by TT {found.reference_ratio:.3g} of it"
    return {
        "text": f"{found.text}: {found.num_tokens:,} tokens, {found.num_words:,} words",
        "window": window,
    }


def _perplexity_tables(found: PerplexityReport, width: int) -> Iterator[Table]:
    rows = [
        (
            each.method.upper(),
            f"{each.all_tokens.nats_per_token:.4f}",
            f"{each.all_tokens.per_token:.2f}",
            f"{each.all_tokens.per_word:.1f}",
            *_ratio(each.to_reference),
            f"{each.num_computed:,}",
            format_duration(each.elapsed_s),
        )
        for each in found.methods
    ]
    yield fitted(_PERPLEXITY, rows, width, "perplexity")
    after = [
        (
            each.method.upper(),
            f"{each.after_overflow.per_token:.2f}",
            f"{each.after_overflow.per_word:.1f}",
            *_ratio(each.after_to_reference),
        )
        for each in found.methods
    ]
    title = "perplexity of the tokens after the first overflow"
    yield fitted(_AFTER, after, width, title, "to TT: of the perplexity a word")


def _retrieval_facts(found: RetrievalReport) -> dict[str, str]:
    return {
        "contexts": f"{found.num_contexts} of {found.context_tokens:.0f} tokens in the mean, "
        f"{found.num_overflows} overflows, {found.num_questions} questions each, "
        f"seed {found.seed}",
        "window": _window(found.window_tokens, found.truncation),
    }


def _retrieval_tables(found: RetrievalReport, width: int) -> Iterator[Table]:
    rows = [
        (
            each.method.upper(),
            f"{each.kept.value:.1%}",
            _between(each.kept, ".1%"),
            f"{each.num_kept:,}",
            f"{each.overall.value:.1%}",
            _between(each.overall, ".1%"),
            f"{each.num_asked:,}",
            f"{each.num_computed:,}",
        )
        for each in found.methods
    ]
    yield fitted(_RETRIEVAL, rows, width, "right answers")


def _compression_facts(found: CompressionReport) -> dict[str, str]:
    return {
        "text": f"{found.text}: {found.num_contexts} pieces of {found.context_tokens} tokens, "
        f"{found.num_tokens:,} tokens judged behind them",
        "records": f"{found.num_contexts} contexts of up to {found.context_tokens} tokens, "
        f"{found.num_asked} questions, seed {found.seed}",
        "KV": f"{format_bytes(found.token_bytes)} a token",
    }


def _compression_tables(found: CompressionReport, width: int) -> Iterator[Table]:
    rows = [
        (
            each.policy,
            f"{each.keep_ratio:g}",
            f"{each.kept:.1%}",
            f"x {each.prefill:.2f}",
            f"{each.next_tokens.per_token:.2f}",
            f"{each.to_whole.value:.4f}",
            _between(each.to_whole, ".4f"),
            f"{each.asked_before.value:.1%}",
            _between(each.asked_before, ".1%"),
            f"{each.asked_after.value:.1%}",
            _between(each.asked_after, ".1%"),
        )
        for each in found.rows
    ]
    caption = (
        "prefill: time to compute the context, for scores to compress it by, to that without; "
        "asked before: the question is part of what is compressed; after: it comes behind it"
    )
    yield fitted(_COMPRESSION, rows, width, "compression", caption)


def _rotation_facts(found: RotationReport) -> dict[str, str]:
    return {
        "keys": f"{found.num_keys:,} of {found.text}",
        "window": f"{found.window_tokens} tokens, {found.dropped_tokens} dropped each time",
    }


def _rotation_tables(found: RotationReport, width: int) -> Iterator[Table]:
    rows = [
        (
            each.dtype,
            str(each.num_moves),
            each.way,
            f"{each.root_mean_square:.1e}",
            f"{each.largest:.1e}",
            f"{each.to_own:.1e}",
        )
        for each in found.errors
    ]
    yield fitted(_ROTATION, rows, width, "relative error of keys at their new positions")


def _ratio(interval: Interval | None) -> tuple[str, str]:
    """A ratio, and its ends."""
    if interval is None:
        return "", ""
    return f"{interval.value:.4f}", _between(interval, ".4f")


def _between(interval: Interval, form: str) -> str:
    return f"{format(interval.low, form)} - {format(interval.high, form)}"


def plot(report: CompressionReport, model: str, path: Path) -> None:
    """Write the picture; its format follows from the file's name.

    Raises:
        NoPlotError: matplotlib is missing, or the file cannot be written.
    """
    with picture(path, 1, 3, figsize=(12, 4)) as (figure, axes):
        figure.suptitle(
            f"inference-svc eval compression: {model}, contexts of {report.context_tokens} tokens"
        )
        whole, *others = report.rows
        for policy in dict.fromkeys(row.policy for row in others):
            rows = [whole, *(row for row in others if row.policy == policy)]
            _draw(axes[0], rows, policy, [row.to_whole for row in rows])
            _draw(axes[1], rows, policy, [row.asked_before for row in rows])
            _draw(axes[2], rows, policy, [row.asked_after for row in rows])
        axes[0].set_ylabel("perplexity behind it, to the whole's")
        axes[1].set_ylabel("right answers, asked before")
        axes[2].set_ylabel("right answers, asked after")
        for each in axes:
            each.set_xlabel("KV kept")
            each.grid(alpha=0.3)
        axes[0].legend(fontsize="small")


def _draw(axes: Any, rows: list[CompressedQuality], policy: str, figures: list[Interval]) -> None:
    """One policy's line, with its intervals."""
    axes.errorbar(
        [row.kept for row in rows],
        [figure.value for figure in figures],
        yerr=[
            [figure.value - figure.low for figure in figures],
            [figure.high - figure.value for figure in figures],
        ],
        label=policy,
        marker="o",
        capsize=2,
    )
