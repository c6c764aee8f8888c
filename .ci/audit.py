"""Asks for known vulnerabilities of the pinned dependencies: fails if there are any.

The database of advisories is a service on the network. Where it cannot be reached, that is said and
the check passes: a build must not depend on a stranger's server.
"""

import json
import subprocess
import sys
from pathlib import Path


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
        print(f"audit: no advisories could be had ({cause[0]}): nothing was audited")
        return 0
    known = [one for one in found if "skip_reason" not in one]
    bad = [one for one in known if one["vulns"]]
    for one in bad:
        ids = ", ".join(vulnerability["id"] for vulnerability in one["vulns"])
        print(f"audit: {one['name']} {one['version']}: {ids}")
    print(f"audit: {len(known)} of {len(found)} pins were audited, {len(bad)} have advisories")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
