"""Keyboard: read a terminal key by key, without echo and without waiting for Enter."""

import os
import select
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

_WORDS = {
    "\r": "enter",
    "\n": "enter",
    " ": "space",
    "\x1b": "escape",
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page_up",
    "\x1b[6~": "page_down",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1bOH": "home",
    "\x1bOF": "end",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
}
_MOST_BYTES = 64  # read at a time: more than a hand types, and some of a paste


class Keyboard:
    """Reads keys from a terminal in cbreak mode."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def keys(self, timeout_s: float) -> list[str]:
        """Wait for keys; returns [] if none is pressed in time, or the window is resized."""
        try:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, timeout_s))
        except InterruptedError:
            return []
        if not ready:
            return []
        data = os.read(self._fd, _MOST_BYTES)
        if not data:  # the terminal is gone
            return ["q"]
        return split_keys(data.decode(errors="ignore"))


def split_keys(text: str) -> list[str]:
    """Split a terminal's input into keys: characters, and names for other keys."""
    keys = []
    while text:
        sequence = _first(text)
        text = text[len(sequence) :]
        keys.append(_WORDS.get(sequence, sequence if len(sequence) == 1 else "unknown"))
    return keys


def _first(text: str) -> str:
    """Return the characters of the first key: a single one, or an escape sequence."""
    if not text.startswith(("\x1b[", "\x1bO")):
        return text[0]
    for end in range(2, len(text)):
        if text[end].isalpha() or text[end] == "~":
            return text[: end + 1]
    return text


@contextmanager
def keyboard(fd: int) -> Iterator[Keyboard]:
    """Put the terminal into cbreak mode inside the block, and restore it at the end."""
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield Keyboard(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
