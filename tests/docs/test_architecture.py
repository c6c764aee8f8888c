"""The documents' statements about packages, files and names are true."""

import re
from pathlib import Path

import pytest

from tests.docs.package_diagram import DOCUMENT, document

ROOT = Path(__file__).parents[2]
PACKAGES = ("inference_svc", "kvd", "shared")
# Documents, and the package whose files they may name by the end of their path.
DOCUMENTS = {
    "README.md": "",
    "CONTRIBUTING.md": "",
    "docs/architecture.md": "*",
    "docs/glossary.md": "*",
    "kvd/README.md": "kvd",
    "kvd/FORMATS.md": "kvd",
    "kvd/PLAN.md": "kvd",
    "inference_svc/README.md": "inference_svc",
}
NAMED_FILE = re.compile(r"`([\w./-]+\.(?:py|md|proto|toml|yaml))`")
OF_OPERATORS = {"conversations.jsonl", "kvd.toml"}  # files of users, in examples


def test_the_diagram_matches_the_imports():
    """`python -m tests.docs.package_diagram` writes it."""
    assert DOCUMENT.read_text(encoding="utf-8") == document()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_named_files_exist(name):
    """With their whole path, or, in the document's own package, with the end of it."""
    text = (ROOT / name).read_text(encoding="utf-8")
    missing = [
        path
        for path in NAMED_FILE.findall(text)
        if path not in OF_OPERATORS
        and not (ROOT / path).exists()
        and not any(ROOT.glob(f"{DOCUMENTS[name] or 'nowhere'}/**/{path}"))
    ]
    assert missing == []


def test_the_glossary_names_existing_code():
    """Every class, function and module in its column "code" is in the product."""
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    )
    rows = [
        line.split(" | ")
        for line in (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and not line.startswith(("| term", "|---"))
    ]
    assert 60 <= len(rows) <= 110
    names = [name for row in rows for name in re.findall(r"`([A-Za-z_]\w+)`", row[2])]
    words = set(re.findall(r"\w+", code))
    assert [name for name in names if name not in words] == []
