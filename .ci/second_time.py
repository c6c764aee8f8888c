"""Names the tests that failed beside others and passed alone: what pytest no longer has as failed.

Called with pytest's `lastfailed` files: that of the first run, and that of the second.
"""

import json
import sys
from pathlib import Path


def main(before: str, after: str) -> int:
    """Print them; return the exit code."""
    flakes = sorted(_failed(before) - _failed(after))
    for name in flakes:
        print(f"passed only the second time: {name}")
    if not flakes:
        print("passed only the second time: none")
    return 0


def _failed(path: str) -> set[str]:
    """Ids of the tests that pytest would run again; it keeps no file when there are none."""
    file = Path(path)
    return set(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else set()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
