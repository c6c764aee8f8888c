"""What every command prints, at 80 and 120 columns and in a pipe: python -m tests.cli.captures.

Run it after any change of what a command shows, and look at the difference; a test compares.
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
from unittest.mock import patch

from inference_svc.cli import main as inference_svc
from kvd.cli.main import main as kvd
from shared.runtime_dir import OPERATOR_SOCKET
from tests.cli.fixed_kvd import answering

GOLDEN = Path(__file__).parent / "golden"
KINDS = {"80": 80, "120": 120, "pipe": None}
COMMANDS = {
    "kvd-help": "kvd --help",
    "kvd-config-help": "kvd config --help",
    "kvd-ls-help": "kvd ls --help",
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
    "inference-svc-help": "inference-svc --help",
    "inference-svc-status-help": "inference-svc status --help",
    "inference-svc-status": "inference-svc status",
    "inference-svc-status-all": "inference-svc status --all",
    "inference-svc-status-json": "inference-svc status --json",
}
_STYLES = re.compile(r"\x1b\[[0-9;]*m")


class _Terminal(io.TextIOWrapper):
    """Where a command believes that a person looks."""

    def isatty(self) -> bool:
        return True


def capture(command: str, width: int | None, directory: Path) -> str:
    """What a command shows on a terminal of so many columns; None: in a pipe.

    Args:
        command: without where the daemon is.
        width: of the terminal.
        directory: of the daemon that answers.
    """
    program, *words = command.split()
    main: Callable[[Sequence[str]], None] = {"kvd": kvd, "inference-svc": inference_svc}[program]
    if words[-1] != "--help":
        at = {"kvd": str(directory), "inference-svc": f"unix:{directory / OPERATOR_SOCKET}"}
        words += [{"kvd": "--runtime-dir", "inference-svc": "--address"}[program], at[program]]
    kept, code = io.BytesIO(), None
    out = (io.TextIOWrapper if width is None else _Terminal)(kept, encoding="utf-8")
    with _surroundings(program, width), redirect_stdout(out):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code
    out.flush()
    if code:
        raise RuntimeError(f"{command}: exit code {code}")
    shown = _STYLES.sub("", kept.getvalue().decode())
    return "".join(f"{line.rstrip()}\n" for line in shown.splitlines())


@contextmanager
def _surroundings(program: str, width: int | None) -> Iterator[None]:
    """Environment, name and time zone of a command, wherever the tests run."""
    environ = {"TERM": "xterm", "TZ": "CET-1CEST,M3.5.0,M10.5.0/3", "COLUMNS": str(width or 80)}
    with patch.dict(os.environ, environ), patch.object(sys, "argv", [program]):
        for name in [name for name in os.environ if name.startswith(("KVD_", "INFERENCE_"))]:
            del os.environ[name]
        time.tzset()
        yield
    time.tzset()


def golden_path(name: str, kind: str) -> Path:
    """Where a capture is kept."""
    return GOLDEN / f"{name}.{kind}.txt"


def main() -> None:
    """Write every capture; those of commands that are gone go."""
    with tempfile.TemporaryDirectory() as made, answering(Path(made)):
        texts = {
            golden_path(name, kind): capture(command, width, Path(made))
            for name, command in COMMANDS.items()
            for kind, width in KINDS.items()
        }
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
