"""A report as tables for people. Pure."""

from collections.abc import Iterator

from rich.table import Table

from inference_svc.eval.figures import (
    CompressionReport,
    EvalReport,
    PerplexityReport,
    RetrievalReport,
    RotationReport,
    Subject,
)
from inference_svc.eval.intervals import Interval
from inference_svc.eval.options import Truncation
from shared.units import format_bytes, format_duration


def tables(report: EvalReport) -> Iterator[Table]:
    """What was measured on what, then the figures."""
    found = report.found
    if isinstance(found, PerplexityReport):
        facts = _perplexity_facts(found)
    elif isinstance(found, RetrievalReport):
        facts = _retrieval_facts(found)
    elif isinstance(found, CompressionReport):
        facts = _compression_facts(found)
    else:
        facts = _rotation_facts(found)
    yield _facts_table(report, facts)
    if isinstance(found, PerplexityReport):
        yield _perplexity_table(found)
    elif isinstance(found, RetrievalReport):
        yield _retrieval_table(found)
    elif isinstance(found, CompressionReport):
        yield _compression_table(found)
    else:
        yield _rotation_table(found)


def _facts_table(report: EvalReport, facts: dict[str, str]) -> Table:
    subject = report.subject
    table = Table(box=None, show_header=False)
    for name, value in {
        **_subject_facts(subject),
        **facts,
        "took": format_duration(report.elapsed_s),
    }.items():
        table.add_row(name, value)
    return table


def _subject_facts(subject: Subject) -> dict[str, str]:
    size = f"{subject.num_weights / 1e6:.1f} million weights"
    libraries = ", ".join(f"{name} {version}" for name, version in subject.libraries.items())
    return {
        "model": f"{subject.model}, {subject.architecture}, {size}, {subject.attention_mode}, "
        f"leans on {subject.sink_tokens} first tokens",
        "computed": f"{subject.dtype} on {subject.device}, {subject.threads} threads",
        "machine": subject.cpu,
        "software": libraries,
        "date": subject.date,
    }


def _window(window_tokens: int, truncation: Truncation) -> str:
    sinks = f", the first {truncation.sink_tokens} stay" if truncation.sink_tokens else ""
    return f"{window_tokens} tokens, {truncation.ratio:.3g} of it dropped when it is full{sinks}"


def _perplexity_facts(found: PerplexityReport) -> dict[str, str]:
    window = _window(found.window_tokens, found.truncation)
    if found.reference_ratio != found.truncation.ratio:
        window += f"; by TT {found.reference_ratio:.3g} of it"
    return {
        "text": f"{found.text}: {found.num_tokens} tokens, {found.num_words} words",
        "window": window,
    }


def _perplexity_table(found: PerplexityReport) -> Table:
    table = _titled(
        "perplexity",
        [
            "method",
            "nats/token",
            "ppl/token",
            "ppl/word",
            "to TT",
            "95 %",
            "after: ppl/token",
            "ppl/word",
            "to TT",
            "95 %",
            "tokens computed",
            "took",
        ],
    )
    for each in found.methods:
        table.add_row(
            each.method.upper(),
            f"{each.all_tokens.nats_per_token:.4f}",
            f"{each.all_tokens.per_token:.2f}",
            f"{each.all_tokens.per_word:.1f}",
            *_ratio(each.to_reference),
            f"{each.after_overflow.per_token:.2f}",
            f"{each.after_overflow.per_word:.1f}",
            *_ratio(each.after_to_reference),
            f"{each.num_computed:,}",
            format_duration(each.elapsed_s),
        )
    table.caption = "after: of the tokens after the first overflow; to TT: of the perplexity a word"
    return table


def _retrieval_facts(found: RetrievalReport) -> dict[str, str]:
    return {
        "contexts": f"{found.num_contexts} of {found.context_tokens:.0f} tokens in the mean, "
        f"{found.num_overflows} overflows, {found.num_questions} questions each, "
        f"seed {found.seed}",
        "window": _window(found.window_tokens, found.truncation),
    }


def _retrieval_table(found: RetrievalReport) -> Table:
    table = _titled(
        "right answers",
        ["method", "kept records", "95 %", "n", "all records", "95 %", "n", "tokens computed"],
    )
    for each in found.methods:
        table.add_row(
            each.method.upper(),
            f"{each.kept.value:.1%}",
            _between(each.kept, ".1%"),
            str(each.num_kept),
            f"{each.overall.value:.1%}",
            _between(each.overall, ".1%"),
            str(each.num_asked),
            f"{each.num_computed:,}",
        )
    return table


def _compression_facts(found: CompressionReport) -> dict[str, str]:
    return {
        "text": f"{found.text}: {found.num_contexts} pieces of {found.context_tokens} tokens, "
        f"{found.num_tokens} tokens judged behind them",
        "records": f"{found.num_contexts} contexts of up to {found.context_tokens} tokens, "
        f"{found.num_asked} questions, seed {found.seed}",
        "KV": f"{format_bytes(found.token_bytes)} a token",
    }


def _compression_table(found: CompressionReport) -> Table:
    table = _titled(
        "compression",
        [
            "policy",
            "keep ratio",
            "KV kept",
            "prefill",
            "ppl/token",
            "to whole",
            "95 %",
            "asked before",
            "95 %",
            "asked after",
            "95 %",
        ],
    )
    for each in found.rows:
        table.add_row(
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
    table.caption = (
        "prefill: time to compute the context, for scores to compress it by, to that without; "
        "asked before: the question is part of what is compressed; after: it comes behind it"
    )
    return table


def _rotation_facts(found: RotationReport) -> dict[str, str]:
    return {
        "keys": f"{found.num_keys:,} of {found.text}",
        "window": f"{found.window_tokens} tokens, {found.dropped_tokens} dropped each time",
    }


def _rotation_table(found: RotationReport) -> Table:
    table = _titled(
        "relative error of keys at their new positions",
        ["dtype", "truncations", "way", "to float64", "worst key", "to the model's own"],
    )
    for each in found.errors:
        table.add_row(
            each.dtype,
            str(each.num_moves),
            each.way,
            f"{each.root_mean_square:.1e}",
            f"{each.largest:.1e}",
            f"{each.to_own:.1e}",
        )
    return table


def _ratio(interval: Interval | None) -> tuple[str, str]:
    """A ratio, and its ends."""
    if interval is None:
        return "", ""
    return f"{interval.value:.4f}", _between(interval, ".4f")


def _between(interval: Interval, form: str) -> str:
    return f"{format(interval.low, form)} - {format(interval.high, form)}"


def _titled(title: str, headings: list[str]) -> Table:
    table = Table(box=None, title=title, title_justify="left", caption_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table
