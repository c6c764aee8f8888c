"""The log of a fuzzed process: lines that no outsider must be able to cause."""

import json
from pathlib import Path


class JudgedLog:
    """A log of JSON lines; each of them is checked once.

    Args:
        path: its file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._errors: list[str] = []
        self._judged_bytes = 0

    def errors(self) -> list[str]:
        """Return lines with errors, and those that are not JSON."""
        if self._path.exists():
            with self._path.open("rb") as log:
                log.seek(self._judged_bytes)
                *lines, _ = log.read().split(b"\n")  # the last line is incomplete
            self._judged_bytes += sum(len(line) + 1 for line in lines)
            self._errors += [line for line in map(bytes.decode, lines) if _is_error(line)]
        return list(self._errors)


def _is_error(line: str) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return True  # a traceback, or a warning of the interpreter
    return entry.get("level") in ("error", "critical") or "exception" in entry
