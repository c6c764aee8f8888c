"""Asks for known vulnerabilities of the pinned dependencies: fails if there are any.

The database of advisories is a service on the network. Where it cannot be reached the check is
skipped, which the line says that begins with SKIPPED: a build must not depend on a stranger's
server, and nobody is to take that for an audit. A pin that the database does not know is named.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def main() -> int:
    """Run pip-audit over constraints.txt; return the exit code."""
    pip_audit = Path(sys.executable).with_name("pip-audit")
    options = ("--requirement", "constraints.txt", "--no-deps", "--disable-pip", "--format", "json")
    asked = subprocess.run(
        (pip_audit, *options, "--progress-spinner", "off"),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found = json.loads(asked.stdout)["dependencies"]
    except (ValueError, KeyError):
        cause = asked.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        print(f"audit: SKIPPED, nothing was audited: no advisories could be had ({cause[0]})")
        return 0
    lines, code = outcome(found)
    print("\n".join(lines))
    return code


def outcome(found: Sequence[Mapping[str, Any]]) -> tuple[list[str], int]:
    """What to say of pip-audit's list of dependencies, and the exit code."""
    skipped = [one for one in found if "skip_reason" in one]
    known = [one for one in found if "skip_reason" not in one]
    if not known:
        why = skipped[0]["skip_reason"] if skipped else "constraints.txt has no pins"
        return [f"audit: SKIPPED, none of {len(found)} pins was audited ({why})"], int(not found)
    bad = [one for one in known if one["vulns"]]
    lines = [
        f"audit: {one['name']} {one['version']}: "
        + ", ".join(found["id"] for found in one["vulns"])
        for one in bad
    ]
    if skipped:
        names = ", ".join(one["name"] for one in skipped)
        lines.append(f"audit: SKIPPED, not known to the database: {names}")
    lines.append(
        f"audit: {len(known)} of {len(found)} pins were audited, {len(bad)} have advisories"
    )
    return lines, int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
