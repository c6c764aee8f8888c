"""The command `kvd doctor`: checks the machine, the settings and the running kvd."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvd.cli.options import AsJson, Config, RuntimeDir, print_json
from kvd.client.connection import open_client
from kvd.doctor.finding import Finding, Level, worst
from kvd.doctor.machine import Machine, limits_of_this_process, may_read
from shared.terminal import printing
from shared.terminal.printing import counted
from shared.types.errors import ReportedError

EXIT_PROBLEM = 1
SYSTEM_CONFIG = Path("/etc/kvd/kvd.toml")  # where kvd install-units puts it
_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
_SIGNS = {Level.OK: "ok", Level.WARNING: "warning", Level.PROBLEM: "PROBLEM"}

Quiet = Annotated[bool, typer.Option("--quiet", help="Only problems and remedies.")]


def doctor(
    config_file: Config = None,
    runtime_dir: RuntimeDir = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Directory of index and volumes.", readable=False)
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Examine this machine for problems, with a remedy for each."""
    # Imported here: it imports parts of the daemon, which no other command needs.
    from kvd.doctor.examination import examine

    flags: dict[str, object] = {"runtime_dir": runtime_dir, "state_dir": state_dir}
    config_file = config_file or _file_in_use(runtime_dir)
    findings = list(examine(config_file, flags, Machine(), limits_of_this_process()))
    if quiet:
        findings = [finding for finding in findings if finding.level is not Level.OK]
    if as_json:
        print_json({"level": worst(findings).value, "findings": [_row(f) for f in findings]})
    else:
        print_findings(findings)
    if worst(findings) is Level.PROBLEM:
        raise typer.Exit(EXIT_PROBLEM)


def _file_in_use(runtime_dir: Path | None) -> Path | None:
    """Return the settings file of the running kvd, or else of its installed unit; None: none."""
    try:
        with open_client(runtime_dir) as client:
            name = client.settings().file
    except ReportedError:
        is_there = os.access(SYSTEM_CONFIG, os.F_OK) or not may_read(SYSTEM_CONFIG)
        return SYSTEM_CONFIG if is_there else None
    return Path(name) if name else None


def _row(finding: Finding) -> dict[str, str]:
    return {
        "check": finding.check,
        "level": finding.level.value,
        "what": finding.what,
        "remedy": finding.remedy,
    }


def print_findings(findings: Sequence[Finding]) -> None:
    """Print each finding with its remedy, then the number of problems and warnings."""
    console = printing.console()
    for finding in findings:
        for line, style in finding_lines(finding, console.width):
            console.print(line, style=style, markup=False, soft_wrap=True)
    num_problems = sum(finding.level is Level.PROBLEM for finding in findings)
    num_warnings = sum(finding.level is Level.WARNING for finding in findings)
    numbers = (counted(num_problems, "problem"), counted(num_warnings, "warning"))
    console.print(", ".join(numbers))


def finding_lines(finding: Finding, width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of a finding and its remedy, wrapped, with their styles; paths stay whole."""
    label = f"{_SIGNS[finding.level]:<8} {finding.check:<15} "
    style = "" if finding.level is Level.OK else _STYLES[finding.level]
    yield printing.hanging(label, finding.what, width), style
    if finding.remedy:
        yield printing.hanging("", f"→ {finding.remedy}", width, len(label)), "bold"
