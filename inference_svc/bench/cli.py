"""`inference-svc bench`: its parts as commands. See inference_svc/bench/README.md."""

import sys
from pathlib import Path

import typer

from inference_svc.bench.figures import as_document
from inference_svc.bench.options import (
    BuffersOptions,
    CopiesOptions,
    DecodeOptions,
    DraftsOptions,
    ModelChoice,
    OutputOptions,
    OverflowOptions,
    OverlapOptions,
    Part,
    PoliciesOptions,
    PositionsOptions,
    PrefillOptions,
    RunOptions,
    ServeOptions,
    SharingOptions,
    TurnsOptions,
)
from inference_svc.bench.report import plot, tables
from inference_svc.installation import require_engine
from inference_svc.runtime.model.model_directory import check_model
from shared.config.lazy_commands import WholeHelp
from shared.measuring.options import command
from shared.measuring.plots import check_plot
from shared.measuring.report import check_json, print_progress, print_report
from shared.process.log import configure_logging
from shared.types.errors import ConfigError, InvalidInputError

bench_app = typer.Typer(
    cls=WholeHelp,
    rich_markup_mode=None,
    help="Measure the engine in this process, with a kvd of the bench's own.",
    no_args_is_help=True,
)


class UnusableDirectoryError(ConfigError):
    """The directory cannot be written to."""

    reason = "unusable_directory"


@bench_app.command()
@command(ModelChoice, TurnsOptions, OutputOptions)
def turns(choice: ModelChoice, options: TurnsOptions, output: OutputOptions) -> None:
    """TTFT, prefill throughput and TPOT: recomputed, from kvd, and resident."""
    if not options.splits and not options.histories:
        raise InvalidInputError("there is nothing to measure", "give --splits or --histories")
    measure(options, choice, output)


@bench_app.command()
@command(ModelChoice, OverlapOptions, OutputOptions)
def overlap(choice: ModelChoice, options: OverlapOptions, output: OutputOptions) -> None:
    """Loading ahead by read buffer, and the price of saving."""
    measure(options, choice, output)


@bench_app.command()
@command(ModelChoice, BuffersOptions, OutputOptions)
def buffers(choice: ModelChoice, options: BuffersOptions, output: OutputOptions) -> None:
    """TTFT by read buffer, and with the start gate's choice, by how slow loading is."""
    if not options.ratios:
        raise InvalidInputError("there is nothing to measure", "give ratios with --ratios")
    measure(options, choice, output)


@bench_app.command()
@command(ModelChoice, ServeOptions, OutputOptions)
def serve(choice: ModelChoice, options: ServeOptions, output: OutputOptions) -> None:
    """Whole conversations, closed-loop: percentiles, throughput, busy time, hit tiers."""
    measure(options, choice, output)


@bench_app.command()
@command(ModelChoice, PoliciesOptions, OutputOptions)
def policies(choice: ModelChoice, options: PoliciesOptions, output: OutputOptions) -> None:
    """Eviction policies, over tiers that are too small: hits, DRAM share, TTFT, queue."""
    if not options.policies:
        raise InvalidInputError("there is nothing to measure", "give policies with --policies")
    measure(options, choice, output)


@bench_app.command()
@command(ModelChoice, OverflowOptions, OutputOptions)
def overflow(choice: ModelChoice, options: OverflowOptions, output: OutputOptions) -> None:
    """TTFT of a turn whose context overflows, against the same turn in a larger window."""
    measure(options, choice, output)


@bench_app.command()
@command(ModelChoice, SharingOptions, OutputOptions)
def sharing(choice: ModelChoice, options: SharingOptions, output: OutputOptions) -> None:
    """TTFT of the last of many sessions that begin with one prompt, and what they all hold."""
    measure(options, choice, output)


@bench_app.command()
@command(ModelChoice, PositionsOptions, OutputOptions)
def positions(choice: ModelChoice, options: PositionsOptions, output: OutputOptions) -> None:
    """Hits over context overflows, with positions apart from stored keys (CA) and in them (OF)."""
    measure(options, choice, output)


@bench_app.command()
@command(ModelChoice, PrefillOptions, OutputOptions)
def prefill(choice: ModelChoice, options: PrefillOptions, output: OutputOptions) -> None:
    """Prefill speed by length, against the stock model and the device's matrix rate."""
    measure(options, choice, output)


@bench_app.command()
@command(ModelChoice, CopiesOptions, OutputOptions)
def copies(choice: ModelChoice, options: CopiesOptions, output: OutputOptions) -> None:
    """Loads and saves between slots and pages, against plain copies of as many bytes."""
    measure(options, choice, output)


@bench_app.command()
@command(ModelChoice, DecodeOptions, OutputOptions)
def decode(choice: ModelChoice, options: DecodeOptions, output: OutputOptions) -> None:
    """Decode speed by batch, against plain generate and the memory's bandwidth."""
    measure(options, choice, output)


@bench_app.command()
@command(ModelChoice, DraftsOptions, OutputOptions)
def drafts(choice: ModelChoice, options: DraftsOptions, output: OutputOptions) -> None:
    """Decode speed with drafts and without, where a file is copied and in a chat, by batch."""
    measure(options, choice, output)


def measure(part: Part, choice: ModelChoice, output: OutputOptions) -> None:
    """Run a part and write down what it found.

    Raises:
        ReportedError: it cannot be measured, or written.
    """
    require_engine()
    if choice.path is not None:
        check_model(choice.path)  # torch is imported next, which takes seconds
    from inference_svc.bench.runner import run  # imports torch

    if output.plot is not None:
        check_plot(output.plot)
    check_json(output.json_to)
    configure_logging("warning", json=False)  # stdout is for the report
    directory = output.directory or Path.cwd()
    try:
        report = run(part, choice, RunOptions(directory, tuple(sys.argv), print_progress))
    except OSError as error:
        raise UnusableDirectoryError(
            f"cannot write in {directory} ({error.strerror})",
            "give another directory with --directory",
        ) from error
    notes = (note for case in report.cases for note in case.notes)
    print_report(as_document(report), lambda width: tables(report, width), output.json_to, notes)
    if output.plot is not None:
        plot(report, output.plot)
