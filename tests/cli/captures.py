"""What every command prints, at 80 and 120 columns and in a pipe: python -m tests.cli.captures.

Run it after any change of what a command shows, and look at the difference; a test compares. The
help of each command is there by itself; what one shows is added here, or to fixed_views.py if it
takes long or looks at the machine.
"""

import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer

from inference_svc.cli.main import app
from inference_svc.cli.main import main as inference_svc
from kvd.cli.main import main as kvd
from kvd.cli.main import root_command
from shared.process.runtime_dir import OPERATOR_SOCKET
from tests.cli.fixed_kvd import answering
from tests.cli.fixed_views import ONLY_ON_TERMINALS, VIEWS

GOLDEN = Path(__file__).parent / "golden"
KINDS = {"80": 80, "120": 120, "pipe": None}
CONFIG = """\
[server]
listen = ["unix:/run/inference-svc/inference.sock", "unix:/srv/chat/inference.sock"]
state_dir = "/var/lib/inference-svc"
[cache]
kvd_runtime_dir = "/run/kvd"
"""
HOME = "/home/ada"  # stands in captures where there was a directory of the capture's own


def helps() -> Iterator[str]:
    """The help of every command of both programs."""
    yield from _helps(root_command(), ("kvd",))
    yield from _helps(typer.main.get_command(app), ("inference-svc",))


def _helps(command: Any, words: tuple[str, ...]) -> Iterator[str]:
    yield " ".join((*words, "--help"))
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _helps(inner, (*words, name))


COMMANDS: dict[str, str | Callable[[], None]] = {
    **{line.replace(" --help", " help").replace(" ", "-"): line for line in helps()},
    "kvd-ls": "kvd ls",
    "kvd-ls-json": "kvd ls --json",
    "kvd-show": "kvd show conversation-17",
    "kvd-flush": "kvd flush --tenant acme-industries --dry-run",
    "kvd-stats": "kvd stats",
    "kvd-events": "kvd events",
    "kvd-events-json": "kvd events --json",
    "kvd-leases": "kvd leases",
    "kvd-verify": "kvd verify",
    "kvd-config-show": "kvd config show --running",
    "kvd-install-units": "kvd install-units --user --dry-run",
    "inference-svc-config-show": "inference-svc config show --config {directory}/settings.toml",
    "inference-svc-config-show-json": (
        "inference-svc config show --json --config {directory}/settings.toml"
    ),
    "inference-svc-status": "inference-svc status",
    "inference-svc-status-all": "inference-svc status --all",
    "inference-svc-status-json": "inference-svc status --json",
    **VIEWS,
}
CAPTURES = [
    (name, kind)
    for name in COMMANDS
    for kind in KINDS
    if kind != "pipe" or name not in ONLY_ON_TERMINALS
]
_SEEK_NOBODY = ("--help", "install-units", "{directory}")  # no daemon is asked
_STYLES = re.compile(r"\x1b\[[0-9;]*m")


class _Terminal(io.TextIOWrapper):
    """Where a command believes that a person looks."""

    def isatty(self) -> bool:
        return True


def capture(name: str, kind: str, directory: Path) -> str:
    """What a command shows.

    Args:
        name: one of COMMANDS.
        kind: of KINDS: the terminal's width, or a pipe.
        directory: of the daemon that answers, see `prepared`.
    """
    command, width = COMMANDS[name], KINDS[kind]
    kept = io.BytesIO()
    out = (io.TextIOWrapper if width is None else _Terminal)(kept, encoding="utf-8")
    program = "kvd" if name.startswith("kvd") else "inference-svc"
    with _surroundings(program, width, directory), redirect_stdout(out):
        if isinstance(command, str):
            _run(command, directory)
        else:
            command()
    out.flush()
    shown = _STYLES.sub("", kept.getvalue().decode()).replace(str(directory), HOME)
    return "".join(f"{line.rstrip()}\n" for line in shown.splitlines())


def _run(line: str, directory: Path) -> None:
    program, *words = line.format(directory=directory).split()
    main: Callable[[Sequence[str]], None] = {"kvd": kvd, "inference-svc": inference_svc}[program]
    if not any(word in line for word in _SEEK_NOBODY):
        at = {"kvd": str(directory), "inference-svc": f"unix:{directory / OPERATOR_SOCKET}"}
        words += [{"kvd": "--runtime-dir", "inference-svc": "--address"}[program], at[program]]
    try:
        main(words)
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{line}: exit code {ended.code}") from ended


@contextmanager
def prepared(directory: Path) -> Iterator[Path]:
    """A directory with what captures need, while daemons answer in it."""
    (directory / "settings.toml").write_text(CONFIG, encoding="utf-8")
    with answering(directory):
        yield directory


@contextmanager
def _surroundings(program: str, width: int | None, home: Path) -> Iterator[None]:
    """Environment, name and time zone of a command, wherever the tests run."""
    environ = {"TERM": "xterm", "TZ": "CET-1CEST,M3.5.0,M10.5.0/3", "COLUMNS": str(width or 80)}
    environ["HOME"] = str(home)
    foreign = ("KVD_", "INFERENCE_", "XDG_")
    with patch.dict(os.environ, environ), patch.object(sys, "argv", [program]):
        for name in [name for name in os.environ if name.startswith(foreign)]:
            del os.environ[name]
        time.tzset()
        yield
    time.tzset()


def golden_path(name: str, kind: str) -> Path:
    """Where a capture is kept."""
    return GOLDEN / f"{name}.{kind}.txt"


def main() -> None:
    """Write every capture; those of commands that are gone go."""
    with tempfile.TemporaryDirectory() as made, prepared(Path(made)) as directory:
        texts = {golden_path(name, kind): capture(name, kind, directory) for name, kind in CAPTURES}
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
