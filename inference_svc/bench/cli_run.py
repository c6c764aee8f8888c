"""What the commands of `inference-svc bench` have in common: reading lists, running, reporting."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from inference_svc.bench.figures import Report, as_document
from inference_svc.bench.options import ModelChoice, RunOptions
from inference_svc.bench.report import tables
from inference_svc.installation import require_engine
from shared.process.log import configure_logging
from shared.terminal import printing
from shared.types.errors import ConfigError, InvalidInputError

if TYPE_CHECKING:
    from inference_svc.bench.runner import Part


class BadListError(InvalidInputError):
    """A list of numbers that is none."""

    reason = "bad_list"


class UnusableDirectoryError(ConfigError):
    """The directory cannot be written to, or a result cannot be written."""

    reason = "unusable_directory"


def numbers(text: str, least: int = 1) -> tuple[int, ...]:
    """Read "1,8,24"; "" is none.

    Raises:
        BadListError: something else is there, or a number below `least`.
    """
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise BadListError(f"{text!r} is no list of numbers", "write them as 1,8,24") from error
    if any(number < least for number in found):
        raise BadListError(f"{text!r} has a number below {least}", "give larger ones")
    return found


def splits_of(text: str) -> tuple[tuple[int, int], ...]:
    """Read "500/500,900/100".

    Raises:
        BadListError: something else is there, or a length is not above zero.
    """
    try:
        pairs = [part.split("/") for part in text.split(",") if part.strip()]
        found = tuple((int(history), int(new)) for history, new in pairs)
    except ValueError as error:
        raise BadListError(f"{text!r} is no list of splits", "write them as 900/100") from error
    if any(min(split) < 1 for split in found):
        raise BadListError(f"{text!r} has a length below one", "write them as 900/100")
    return found


def measure(
    part: "Part", choice: ModelChoice, options: RunOptions, json_to: str, plot_to: Path | None
) -> None:
    """Run a part and write down what it found.

    Raises:
        ReportedError: it cannot be measured, or written.
    """
    require_engine()
    from inference_svc.bench import plot
    from inference_svc.bench.runner import run  # imports torch

    if plot_to is not None:
        plot.check_plot(plot_to)
    configure_logging("warning", json=False)  # stdout is for the report
    try:
        report = run(part, choice, options)
        _write(report, json_to)
    except OSError as error:
        raise UnusableDirectoryError(
            f"cannot write in {options.directory} ({error.strerror})",
            "name another directory with --directory",
        ) from error
    if plot_to is not None:
        plot.plot(report, plot_to)


def _write(report: Report, json_to: str) -> None:
    document = json.dumps(as_document(report), indent=2)
    if json_to == "-":
        typer.echo(document)
        return
    if json_to:
        Path(json_to).write_text(document + "\n", encoding="utf-8")
    console = printing.console()
    for table in tables(report, console.width):
        console.print(table)
        console.print()
    for note in (note for case in report.cases for note in case.notes):
        typer.echo(note)  # not wrapped: it may be a command
