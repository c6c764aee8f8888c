"""The output of every command, at 80 and 120 columns and in a pipe: python -m tests.cli.captures.

Run it after any change of a command's output, and check the difference; a test compares. The
help of each command is captured automatically; other output is added here, or to fixed_views.py if
it takes long or depends on the machine.
"""

import io
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import inference_svc.cli.main
import kvd.cli.main
from kvd.caches.layout_opening import VOLUMES
from kvd.tiers.faults import NoFaults
from kvd.tiers.index_database import MANIFEST_NAME, open_database
from shared.encryption.key_file import KEY_BYTES, SecretKey, write_key
from shared.process.runtime_dir import OPERATOR_SOCKET
from tests.cli.fixed_kvd import SESSION_FILE, answering
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
KVD_CONFIG = """\
[sessions]
default_ttl = "7d"
"""
HOME = "/home/ada"  # replaces the capture's own directory in its output


PROGRAMS = {"kvd": kvd.cli.main, "inference-svc": inference_svc.cli.main}
# How a program gets the address of the captures' daemons.
PLACES = {"kvd": ("--runtime-dir", "{directory}"), "inference-svc": ("--address", "{socket}")}
TYPED = b"What does a lighthouse keeper count?\n\n"  # by people at a terminal


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Return every visible command of both programs, groups too, by its words."""
    for name, program in PROGRAMS.items():
        yield from _inside(program.root_command(), (name,))


def _inside(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _inside(inner, (*words, name))


COMMANDS: dict[str, str | Callable[[], None]] = {
    **{f"{'-'.join(words)}-help": f"{' '.join(words)} --help" for words, _ in commands()},
    "kvd-ls": "kvd ls",
    "kvd-ls-json": "kvd ls --json",
    "kvd-show": "kvd show conversation-17",
    "kvd-why": "kvd why conversation-17",
    "kvd-flush": "kvd flush --tenant acme-industries --dry-run",
    "kvd-pin": "kvd pin conversation-17",
    "kvd-unpin": "kvd unpin conversation-17",
    "kvd-ttl": "kvd ttl conversation-17 2h",
    "kvd-export": "kvd export conversation-17 {new}/backup.kvd",
    "kvd-import": "kvd import {directory}/conversation-17.kvd",
    "kvd-push": "kvd push conversation-17 --to file://{new}/store",
    "kvd-pull": "kvd pull conversation-17 --from file://{directory}/store --copy --replace",
    "kvd-remote-ls": "kvd remote ls file://{directory}/store",
    "kvd-remote-rm": "kvd remote rm file://{new}/store --all --yes",
    "kvd-remote-sweep": "kvd remote sweep file://{new}/store",
    "kvd-stats": "kvd stats",
    "kvd-events": "kvd events",
    "kvd-events-json": "kvd events --json",
    "kvd-leases": "kvd leases",
    "kvd-verify": "kvd verify",
    "kvd-reopen": "kvd reopen ab12",
    "kvd-config-show": "kvd config show --running",
    "kvd-config-check": "kvd config check --config {directory}/kvd.toml",
    "kvd-config-reload": "kvd config reload",
    "kvd-key-new": "kvd key new {new}/kvd-key",
    "kvd-key-rotate": (
        "kvd key rotate {directory}/key.new --old {directory}/key --state-dir {directory}/state"
    ),
    "kvd-token": "kvd token monitoring",
    "kvd-completion": "kvd completion bash",
    "kvd-version": "kvd version",
    "kvd-install-units": "kvd install-units --user --dry-run",
    "inference-svc-config-show": "inference-svc config show --config {directory}/settings.toml",
    "inference-svc-config-show-json": (
        "inference-svc config show --json --config {directory}/settings.toml"
    ),
    "inference-svc-config-check": ("inference-svc config check --config {directory}/settings.toml"),
    "inference-svc-chat": "inference-svc chat",
    "inference-svc-why": "inference-svc why s-77ab10",
    "inference-svc-token": "inference-svc token shop",
    "inference-svc-completion": "inference-svc completion zsh",
    "inference-svc-version": "inference-svc version",
    "inference-svc-status": "inference-svc status",
    "inference-svc-status-all": "inference-svc status --all",
    "inference-svc-status-json": "inference-svc status --json",
    **VIEWS,
}
# Output that is pasted elsewhere or read by programs is not wrapped.
OF_ANY_WIDTH = ("-json", "-token", "-completion")
CAPTURES = [
    (name, kind)
    for name in COMMANDS
    for kind in KINDS
    if kind != "pipe" or name not in ONLY_ON_TERMINALS
]
# They run until they are ended, and their output is a log, or is captured elsewhere.
SHOW_A_LOG = frozenset(
    {"kvd-serve", "kvd-remote-follow", "inference-svc-serve", "inference-svc-up"}
)
_STYLES = re.compile(r"\x1b\[[0-9;]*m")


class _Terminal(io.TextIOWrapper):
    """A stream that a command takes for a terminal."""

    def isatty(self) -> bool:
        return True


class _Keyboard(_Terminal):
    """Typed input, which is echoed."""

    def readline(self, size: int = -1) -> str:
        line = super().readline(size)
        sys.stdout.write(line)
        return line


def capture(name: str, kind: str, directory: Path) -> str:
    """Return a command's output.

    Args:
        name: one of COMMANDS.
        kind: of KINDS: the terminal's width, or a pipe.
        directory: the answering daemon's, see `prepared`.
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
    program, *words = line.split()
    option, place = PLACES[program]
    if "--help" not in words and option in _options(program, words):
        words += [option, place]
    new = directory / "new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    places = {"directory": directory, "new": new, "socket": f"unix:{directory / OPERATOR_SOCKET}"}
    try:
        PROGRAMS[program].main([word.format(**places) for word in words])
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{line}: exit code {ended.code}") from ended


def _options(program: str, words: Sequence[str]) -> set[str]:
    """Return the options of the command that is called."""
    command: Any = PROGRAMS[program].root_command()
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    return {name for param in command.params for name in param.opts}


@contextmanager
def capture_directory(directory: Path) -> Iterator[Path]:
    """Prepare a directory for captures, and run its daemons inside the block."""
    (directory / "settings.toml").write_text(CONFIG, encoding="utf-8")
    (directory / "kvd.toml").write_text(KVD_CONFIG, encoding="utf-8")
    (directory / "conversation-17.kvd").write_bytes(SESSION_FILE)
    for number, name in enumerate(("key", "key.new")):
        write_key(directory / name, SecretKey(bytes([number]) * KEY_BYTES))
    (directory / "state").mkdir(mode=0o700)
    open_database(directory / "state" / MANIFEST_NAME, directory / VOLUMES, NoFaults()).close()
    with answering(directory):
        _push(directory, directory / "store")
        yield directory


def _push(directory: Path, store: Path) -> None:
    """Put a session into a store, pushed two days ago."""
    with redirect_stdout(io.StringIO()), suppress(SystemExit):
        words = ("push", "conversation-17", "--to", f"file://{store}", "--runtime-dir", directory)
        kvd.cli.main.main([str(word) for word in words])
    then = time.time() - 2 * 86400 - 600
    for path in store.rglob("*"):
        os.utime(path, (then, then))


@contextmanager
def _surroundings(program: str, width: int | None, home: Path) -> Iterator[None]:
    """Set environment, name and time zone of a command, wherever the tests run."""
    environ = {"TERM": "xterm", "TZ": "CET-1CEST,M3.5.0,M10.5.0/3", "COLUMNS": str(width or 80)}
    environ["HOME"] = str(home)
    foreign = ("KVD_", "INFERENCE_", "XDG_")
    typed = (io.TextIOWrapper if width is None else _Keyboard)(io.BytesIO(TYPED), encoding="utf-8")
    with (
        patch.dict(os.environ, environ),
        patch.multiple(sys, argv=[program], stdin=typed),
        patch("secrets.token_bytes", bytes),  # tokens and keys: none is drawn
    ):
        for name in [name for name in os.environ if name.startswith(foreign)]:
            del os.environ[name]
        time.tzset()
        yield
    time.tzset()


def golden_path(name: str, kind: str) -> Path:
    """Return the path of a capture."""
    return GOLDEN / f"{name}.{kind}.txt"


def main() -> None:
    """Write every capture, and remove those of removed commands."""
    with tempfile.TemporaryDirectory() as made, capture_directory(Path(made)) as directory:
        texts = {golden_path(name, kind): capture(name, kind, directory) for name, kind in CAPTURES}
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
