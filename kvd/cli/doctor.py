"""kvd doctor: look at the machine, the settings and the running kvd, and say what to do."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvd.cli.connection import open_client
from kvd.cli.options import AsJson, Config, RuntimeDir, print_json
from kvd.doctor.finding import Finding, Level, worst
from kvd.doctor.machine import Machine, limits_of_this_process, may_read
from shared.errors import ReportedError

EXIT_PROBLEM = 1
SYSTEM_CONFIG = Path("/etc/kvd/kvd.toml")  # as kvd install-units puts it in place
_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
_SIGNS = {Level.OK: "ok", Level.WARNING: "warning", Level.PROBLEM: "PROBLEM"}

Quiet = Annotated[bool, typer.Option("--quiet", help="Only what is to be done.")]


def doctor(
    config_file: Config = None,
    runtime_dir: RuntimeDir = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Directory of index and volumes.", readable=False)
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Look for what stands in kvd's way on this machine, and say how to mend it."""
    # It looks at the daemon's own parts, which no other command needs.
    from kvd.doctor.examination import examine

    flags: dict[str, object] = {"runtime_dir": runtime_dir, "state_dir": state_dir}
    config_file = config_file or _file_in_use(runtime_dir)
    findings = list(examine(config_file, flags, Machine(), limits_of_this_process()))
    if quiet:
        findings = [finding for finding in findings if finding.level is not Level.OK]
    if as_json:
        print_json({"level": worst(findings).value, "findings": [_row(f) for f in findings]})
    else:
        _print(findings)
    if worst(findings) is Level.PROBLEM:
        raise typer.Exit(EXIT_PROBLEM)


def _file_in_use(runtime_dir: Path | None) -> Path | None:
    """The settings of the running kvd; else those that its unit reads, if there are any."""
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


def _print(findings: list[Finding]) -> None:
    console = Console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        style = _STYLES[finding.level]
        table.add_row(f"[{style}]{_SIGNS[finding.level]}[/]", finding.check, _text(finding))
    console.print(table)
    num_problems = sum(finding.level is Level.PROBLEM for finding in findings)
    num_warnings = sum(finding.level is Level.WARNING for finding in findings)
    console.print(f"{num_problems} problems, {num_warnings} warnings")


def _text(finding: Finding) -> str:
    from rich.markup import escape

    what = escape(finding.what)
    return f"{what}\n  [bold]→ {escape(finding.remedy)}[/]" if finding.remedy else what
