"""The report of `make check` on the pinned dependencies, from the findings of pip-audit."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "audit.py"

# As pip-audit writes them.
FINE = {"name": "aiohttp", "version": "3.14.5", "vulns": []}
BAD = {"name": "old", "version": "1.0", "vulns": [{"id": "PYSEC-1"}, {"id": "GHSA-2"}]}
UNKNOWN = {"name": "ours", "skip_reason": "Dependency not found on PyPI: ours (1.0)"}


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ([FINE], 0, ["audit: 1 of 1 pins were audited, 0 have advisories"]),
        ([BAD, FINE], 1, ["audit: old 1.0: PYSEC-1, GHSA-2", "2 of 2 pins were audited, 1 have"]),
        ([FINE, UNKNOWN], 0, ["SKIPPED, not known to the database: ours", "1 of 2 pins"]),
        ([BAD, UNKNOWN], 1, ["PYSEC-1", "SKIPPED", "1 of 2"]),
        ([UNKNOWN, UNKNOWN], 0, ["audit: SKIPPED, none of 2 pins was audited (Dependency not"]),
        ([], 1, ["SKIPPED, none of 0 pins was audited (constraints.txt has no pins)"]),
    ],
    ids=["fine", "bad", "one-unknown", "bad-and-unknown", "nothing-known", "no-pins"],
)
def test_skipped_packages_are_named_and_advisories_fail_the_audit(audit, found, code, said):
    """Packages that pip-audit could not look at are listed as skipped, by name."""
    lines, exit_code = audit.outcome(found)
    assert exit_code == code
    for line, part in zip(lines, said, strict=True):
        assert part in line
