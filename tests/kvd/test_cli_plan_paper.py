"""kvd plan --paper as a command."""

import json
from pathlib import Path

import pytest

from tests.processes import run_cli


@pytest.mark.long
async def test_the_papers_figures_in_one_command(tmp_path: Path) -> None:
    """A quick sample: tables with both numbers, and the same in the document."""
    document = tmp_path / "paper.json"
    code, stdout, stderr = await run_cli(
        *("plan", "--paper", "--quick", "--seed", "3", "--jobs", "1", "--json", str(document))
    )
    assert code == 0, stderr
    report = json.loads(document.read_text())
    assert (report["seed"], report["scale"]) == (3, 0.05)
    assert len(report["tables"]) == 13
    (hit_rates,) = (table for table in report["tables"] if table["figure"] == "Figure 13")
    row = hit_rates["rows"][0]
    assert (row["label"], row["paper"]["value"]) == ("llama-13b", 86)
    assert row["difference"] == row["planned"] - 86
    assert f"{row['planned']:.1f}" in stdout
    assert "for a first look" in stdout


async def test_an_unwritable_document_is_reported(tmp_path: Path) -> None:
    """Before any replay, in one line."""
    where = str(tmp_path / "nowhere" / "paper.json")
    code, _, stderr = await run_cli("plan", "--paper", "--json", where)
    assert code == 78
    assert len(stderr.strip().splitlines()) == 1
    assert where in stderr
