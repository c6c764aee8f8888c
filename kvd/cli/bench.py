"""The command `kvd bench`: measures with a kvd of its own; see kvd/bench/__init__.py."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvd.cli.options import AsJson
from kvd.errors import UnclearSelectionError, UnusableDirectoryError
from shared.measuring.report import ONLY, print_progress, print_report
from shared.process.log import configure_logging

PART_NAMES = "arena, ssd, encryption, control, queue or restart"


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute; says less.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PART", help=f"{PART_NAMES}; repeatable."),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where to write: the disk to measure. Default: here.")
    ] = None,
    sessions: Annotated[
        int | None,
        typer.Option(min=10, help="Most sessions, for control and restart. Default: 200000."),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of each of them. Default: 8.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure arena, SSD, encryption, control plane, queue and restart, against a floor each."""
    # Imported here, so that other commands start faster.
    from kvd.bench.options import FULL, PARTS, QUICK, BenchOptions, resized
    from kvd.bench.report import as_document, tables
    from kvd.bench.runner import run

    parts = tuple(part for part in PARTS if not only or part in only)
    unknown = sorted(set(only or ()) - set(PARTS))
    if unknown:
        raise UnclearSelectionError(
            f"there is no such part: {', '.join(unknown)}",
            f"give one or more of {', '.join(PARTS)}",
        )
    options = BenchOptions(
        directory=directory or Path.cwd(),
        parts=parts,
        scale=resized(QUICK if quick else FULL, sessions, blocks),
        io_threads=4,
        command=tuple(sys.argv),
        on_progress=print_progress,
    )
    configure_logging("warning", json=False)  # stdout is for the report
    try:
        report = run(options)
    except OSError as error:
        raise UnusableDirectoryError(
            f"cannot measure in {options.directory} ({error.strerror})",
            "give a directory on the disk to measure with --directory",
        ) from error
    print_report(as_document(report), lambda width: tables(report, width), ONLY if as_json else "")
