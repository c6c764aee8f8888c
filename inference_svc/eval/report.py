"""A report as tables for the terminal; for part `compression` also as a plot."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from inference_svc.eval.figures import (
    CompressedQuality,
    CompressionReport,
    EditsReport,
    EvalReport,
    PerplexityReport,
    RetrievalReport,
    RotationReport,
    Subject,
)
from inference_svc.eval.options import Truncation
from shared.measuring.plots import picture
from shared.measuring.report import number, table_of
from shared.measuring.statistics import Interval
from shared.terminal.printing import counted
from shared.terminal.tables import Column, facts
from shared.types.units import format_bytes, format_duration

MOST_SHOWN = 1e6  # a wider interval is meaningless, and not shown


def _ratio(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.value:.4f}"


def _between(interval: Interval | None, form: str = ".4f") -> str:
    """Return the ends of an interval as text; "" if they are not known, as for one sample."""
    if interval is None or interval.high > MOST_SHOWN:
        return ""
    return f"{format(interval.low, form)} - {format(interval.high, form)}"


_PERPLEXITY = (
    (Column("method"), lambda each: each.method.upper()),
    (number("nats/token", 2), lambda each: f"{each.all_tokens.nats_per_token:.4f}"),
    (number("ppl/token"), lambda each: f"{each.all_tokens.per_token:.2f}"),
    (number("ppl/word"), lambda each: f"{each.all_tokens.per_word:.1f}"),
    (number("to TT"), lambda each: _ratio(each.to_reference)),
    (number("95 %"), lambda each: _between(each.to_reference)),
    (number("tokens computed", 1), lambda each: f"{each.num_computed:,}"),
    (number("took", 3), lambda each: format_duration(each.elapsed_s)),
)
_AFTER = (
    (Column("method"), lambda each: each.method.upper()),
    (number("ppl/token"), lambda each: f"{each.after_overflow.per_token:.2f}"),
    (number("ppl/word"), lambda each: f"{each.after_overflow.per_word:.1f}"),
    (number("to TT"), lambda each: _ratio(each.after_to_reference)),
    (number("95 %"), lambda each: _between(each.after_to_reference)),
)
_RETRIEVAL = (
    (Column("method"), lambda each: each.method.upper()),
    (number("kept records"), lambda each: f"{each.kept.value:.1%}"),
    (number("95 %", 2), lambda each: _between(each.kept, ".1%")),
    (number("n", 3), lambda each: f"{each.num_kept:,}"),
    (number("all records"), lambda each: f"{each.overall.value:.1%}"),
    (number("95 %", 2), lambda each: _between(each.overall, ".1%")),
    (number("n", 3), lambda each: f"{each.num_asked:,}"),
    (number("tokens computed", 1), lambda each: f"{each.num_computed:,}"),
)
_COMPRESSION = (
    (Column("policy"), lambda each: each.policy),
    (number("keep ratio"), lambda each: f"{each.keep_ratio:g}"),
    (number("KV kept"), lambda each: f"{each.kept:.1%}"),
    (number("prefill", 2), lambda each: f"x {each.prefill:.2f}"),
    (number("ppl/token", 1), lambda each: f"{each.next_tokens.per_token:.2f}"),
    (number("to whole"), lambda each: f"{each.to_whole.value:.4f}"),
    (number("95 %", 3), lambda each: _between(each.to_whole)),
    (number("asked before"), lambda each: f"{each.asked_before.value:.1%}"),
    (number("95 %", 3), lambda each: _between(each.asked_before, ".1%")),
    (number("asked after"), lambda each: f"{each.asked_after.value:.1%}"),
    (number("95 %", 3), lambda each: _between(each.asked_after, ".1%")),
)
_EDITED_TEXT = (
    (Column("edit"), lambda each: each.kind),
    (Column("mode"), lambda each: each.mode),
    (number("reused"), lambda each: f"{each.reused:.1%}"),
    (number("ppl/token", 2), lambda each: f"{each.next_tokens.per_token:.2f}"),
    (number("to exact"), lambda each: f"{each.to_exact.value:.4f}"),
    (number("95 %"), lambda each: _between(each.to_exact)),
    (number("divergence", 1), lambda each: f"{each.divergence.value:.4f}"),
    (number("95 %", 3), lambda each: _between(each.divergence)),
    (number("same choice", 1), lambda each: f"{each.agreement.value:.1%}"),
)
_EDITED_RECORDS = (
    (Column("edit"), lambda each: each.kind),
    (Column("mode"), lambda each: each.mode),
    (number("kept"), lambda each: f"{each.kept.value:.1%}"),
    (number("95 %", 2), lambda each: _between(each.kept, ".1%")),
    (number("brought"), lambda each: f"{each.brought.value:.1%}" if each.brought else ""),
    (number("95 %", 2), lambda each: _between(each.brought, ".1%")),
    (number("stale"), lambda each: f"{each.stale.value:.1%}"),
    (number("95 %", 2), lambda each: _between(each.stale, ".1%")),
    (number("old value", 1), lambda each: f"{each.old_value.value:+.2f}"),
    (number("95 %", 3), lambda each: _between(each.old_value, "+.2f")),
)
_ROTATION = (
    (Column("dtype"), lambda each: each.dtype),
    (number("truncations"), lambda each: str(each.num_moves)),
    (Column("way"), lambda each: each.way),
    (number("to float64"), lambda each: f"{each.root_mean_square:.1e}"),
    (number("worst key"), lambda each: f"{each.largest:.1e}"),
    (number("to the model's own", 1), lambda each: f"{each.to_own:.1e}"),
)


def tables(report: EvalReport, width: int) -> Iterator[Table]:
    """Yield tables of the facts and the results, for a terminal `width` wide."""
    found = report.found
    match found:
        case PerplexityReport():
            about, figures = _perplexity_facts(found), _perplexity_tables(found, width)
        case RetrievalReport():
            about = _retrieval_facts(found)
            figures = [table_of(_RETRIEVAL, found.methods, width, "right answers")]
        case CompressionReport():
            caption = (
                "prefill: time to compute the context, for scores to compress it by, to that"
                " without; asked before: the question is part of what is compressed; after: it"
                " comes behind it"
            )
            about = _compression_facts(found)
            figures = [table_of(_COMPRESSION, found.rows, width, "compression", caption)]
        case EditsReport():
            about, figures = _edits_facts(found), _edits_tables(found, width)
        case RotationReport():
            title = "relative error of keys at their new positions"
            about = _rotation_facts(found)
            figures = [table_of(_ROTATION, found.errors, width, title)]
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


def _perplexity_tables(found: PerplexityReport, width: int) -> list[Table]:
    title = "perplexity of the tokens after the first overflow"
    caption = "to TT: of the perplexity a word"
    return [
        table_of(_PERPLEXITY, found.methods, width, "perplexity"),
        table_of(_AFTER, found.methods, width, title, caption),
    ]


def _retrieval_facts(found: RetrievalReport) -> dict[str, str]:
    return {
        "contexts": f"{found.num_contexts} of {found.context_tokens:.0f} tokens in the mean, "
        f"{found.num_overflows} overflows, {found.num_questions} questions each, "
        f"seed {found.seed}",
        "window": _window(found.window_tokens, found.truncation),
    }


def _compression_facts(found: CompressionReport) -> dict[str, str]:
    return {
        "text": f"{found.text}: {found.num_contexts} pieces of {found.context_tokens} tokens, "
        f"{found.num_tokens:,} tokens judged behind them",
        "records": f"{found.num_contexts} contexts of up to {found.context_tokens} tokens, "
        f"{found.num_asked} questions, seed {found.seed}",
        "KV": f"{format_bytes(found.token_bytes)} a token",
    }


def _edits_facts(found: EditsReport) -> dict[str, str]:
    overlap = ", which overlap" if found.is_overlapping else ""
    return {
        "text": f"{found.text}: {found.num_contexts} pieces of {found.context_tokens} tokens"
        f"{overlap}, {found.num_tokens:,} tokens judged behind each kind of edit",
        "records": f"{found.num_contexts} conversations of up to {found.context_tokens} tokens, "
        f"seed {found.seed}",
        "KV": f"{format_bytes(found.token_bytes)} a token",
    }


def _edits_tables(found: EditsReport, width: int) -> list[Table]:
    text = (
        "reused: of the tokens behind the edit; divergence: from exact's predictions, in nats a"
        " token; same choice: next tokens of which exact has the same first choice"
    )
    records = (
        "kept: right answers about records behind the edit; brought: about those in it; stale: the"
        " old value is given for one that it took; old value: how much likelier than in exact, in"
        " nats"
    )
    return [
        table_of(_EDITED_TEXT, found.rows, width, "text behind an edit", text),
        table_of(_EDITED_RECORDS, found.rows, width, "records behind an edit", records),
    ]


def _rotation_facts(found: RotationReport) -> dict[str, str]:
    return {
        "keys": f"{found.num_keys:,} of {found.text}",
        "window": f"{found.window_tokens} tokens, {found.dropped_tokens} dropped each time",
    }


def plot(report: CompressionReport, model: str, path: Path) -> None:
    """Write the plot; its format follows from the file's name.

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
    """Draw one policy's line, with its intervals."""
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
