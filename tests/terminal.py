"""Runs a command of kvd on a real terminal: a pseudo-terminal with a size, keys, and its output."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_S = 60.0


class Terminal:
    """The screen and keyboard of a person.

    Attributes:
        shown: everything that was written, escape sequences and all.
    """

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self.shown = ""
        self._fd = fd

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._fd, text.encode())

    def until(self, *texts: str) -> None:
        """Wait until all of the texts have been shown since the last call.

        Raises:
            AssertionError: they never were.
        """
        seen = ""
        deadline_s = time.monotonic() + WAIT_S
        while not all(text in seen for text in texts):
            part = self._read(deadline_s - time.monotonic())
            assert part, f"never shown: {texts}; but:\n{seen}"
            seen += part

    def exit_code(self) -> int:
        """Read on until the command ends; return its exit code."""
        deadline_s = time.monotonic() + WAIT_S
        while self._read(deadline_s - time.monotonic()):
            pass
        return self.process.wait(timeout=WAIT_S)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def resize(self, width: int, height: int) -> None:
        """Change the size, and signal the command."""
        _set_size(self._fd, width, height)
        self.process.send_signal(signal.SIGWINCH)

    def echoes(self) -> bool:
        """Return whether the terminal shows typed keys, as it does for a shell."""
        return bool(termios.tcgetattr(self._fd)[3] & termios.ECHO)

    def _read(self, timeout_s: float) -> str:
        """Wait for output; return "" if there is none, or the command has ended."""
        ready, _, _ = select.select([self._fd], [], [], max(0.0, timeout_s))
        if not ready:
            return ""
        try:
            text = os.read(self._fd, 1 << 16).decode(errors="replace")
        except OSError:  # Linux reports this when the other side is closed
            return ""
        self.shown += text
        return text


@contextmanager
def on_terminal(
    *command: str, width: int = 80, height: int = 24, module: str = "kvd"
) -> Iterator[Terminal]:
    """Run `python -m MODULE` on its own terminal; kill it at the end if it still runs."""
    ours, theirs = pty.openpty()
    _set_size(theirs, width, height)
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**environment, "TERM": "xterm-256color", "PYTHONUTF8": "1"},
    )
    os.close(theirs)  # so that the end of the other side is seen at ours
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait(timeout=WAIT_S)
        os.close(ours)


def _set_size(fd: int, width: int, height: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
