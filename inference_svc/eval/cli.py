"""`inference-svc eval`: what a truncation or an edit costs in quality. See docs/quality.md."""

from dataclasses import replace

import typer

from inference_svc.eval.options import (
    CompressionOptions,
    EditsOptions,
    EvalChoice,
    Options,
    OutputOptions,
    PerplexityOptions,
    RetrievalOptions,
    RotationOptions,
    Truncation,
)
from inference_svc.installation import require_engine
from inference_svc.runtime.model.model_directory import check_model
from shared.config.lazy_commands import WholeHelp
from shared.measuring.options import command
from shared.measuring.report import check_json, print_progress, print_report
from shared.process.log import configure_logging

eval_app = typer.Typer(
    cls=WholeHelp,
    rich_markup_mode=None,
    help="Measure what truncating, compressing or editing a context costs in quality.",
    no_args_is_help=True,
)


@eval_app.command()
@command(
    EvalChoice,
    PerplexityOptions,
    Truncation,
    OutputOptions,
    order="path text methods window_tokens ratio reference_ratio sink_tokens num_words dtype device"
    " threads json_to",
)
def perplexity(
    choice: EvalChoice, options: PerplexityOptions, truncation: Truncation, output: OutputOptions
) -> None:
    """Perplexity of a text streamed through a window that overflows (the paper's Table 1)."""
    _measure(replace(options, truncation=truncation), choice, output)


@eval_app.command()
@command(
    EvalChoice,
    RetrievalOptions,
    Truncation,
    OutputOptions,
    order="path methods window_tokens ratio sink_tokens num_contexts num_questions num_overflows"
    " seed dtype device threads json_to",
)
def retrieval(
    choice: EvalChoice, options: RetrievalOptions, truncation: Truncation, output: OutputOptions
) -> None:
    """Records found again after an overflow (the paper's Table 2, LongEval)."""
    _measure(replace(options, truncation=truncation), choice, output)


@eval_app.command()
@command(
    EvalChoice,
    RotationOptions,
    OutputOptions,
    order="path text window_tokens ratio num_moves device threads json_to",
)
def rotation(choice: EvalChoice, options: RotationOptions, output: OutputOptions) -> None:
    """How exact the model's keys are at new positions: from before RoPE, and turned again."""
    _measure(options, replace(choice, dtype="float32"), output)


@eval_app.command()
@command(
    EvalChoice,
    CompressionOptions,
    OutputOptions,
    order="path text policies ratios num_contexts context_tokens next_tokens num_questions seed"
    " window_tokens dtype device threads json_to plot",
)
def compression(choice: EvalChoice, options: CompressionOptions, output: OutputOptions) -> None:
    """What compression policies cost in quality, by the part of a context that they keep."""
    _measure(options, choice, output)


@eval_app.command()
@command(
    EvalChoice,
    EditsOptions,
    OutputOptions,
    order="path text conversations modes kinds num_contexts context_tokens next_tokens seed"
    " window_tokens dtype device threads json_to",
)
def edits(choice: EvalChoice, options: EditsOptions, output: OutputOptions) -> None:
    """What keeping KV across an edit of the context costs in quality, by how much is kept."""
    _measure(options, choice, output)


def _measure(options: Options, choice: EvalChoice, output: OutputOptions) -> None:
    """Run a part, and write down what it found.

    Raises:
        ReportedError: it cannot be measured, or written.
    """
    require_engine()
    check_model(choice.path)  # torch is imported next, which takes seconds
    from inference_svc.eval.figures import as_document
    from inference_svc.eval.report import tables
    from inference_svc.eval.runner import run  # imports torch

    check_json(output.json_to)
    configure_logging("warning", json=False)  # stdout is for the report
    report = run(options, replace(choice, on_progress=print_progress))
    print_report(as_document(report), lambda width: tables(report, width), output.json_to)
