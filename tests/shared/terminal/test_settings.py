"""Settings on a terminal and as JSON, and their problems as lines."""

import json

import pytest
import typer

from shared.config.settings import InvalidSettingsError, invalid_settings
from shared.terminal.settings import listing_problems, print_settings

ROWS = [
    ("dram.bytes", "8 GB", "file", False),
    ("log.level", "info", "default", True),
]
VALUES = {"dram.bytes": 8_000_000_000, "log.level": "info"}


def test_programs_get_values_and_people_get_text(capsys):
    """Both have the source, and whether a reload changes it."""
    print_settings(ROWS, VALUES, as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "dram.bytes": {"value": 8_000_000_000, "source": "file", "live": False},
        "log.level": {"value": "info", "source": "default", "live": True},
    }
    print_settings(ROWS, VALUES, as_json=False)
    first, second = (
        line.split() for line in capsys.readouterr().out.splitlines() if "." in line.split()[0]
    )
    assert first == ["dram.bytes", "8", "GB", "file"]
    assert second == ["log.level", "info", "default", "live"]


def test_each_problem_is_a_line_on_stderr(capsys):
    """After the program's name; the exit code is that of unusable settings."""
    with pytest.raises(typer.Exit) as ended, listing_problems("kvd"):
        raise invalid_settings(["dram.bytes: no size", "ssd.bytes: no size"])
    assert ended.value.exit_code == InvalidSettingsError.exit_code == 78
    out, err = capsys.readouterr()
    assert err.splitlines() == ["kvd: dram.bytes: no size", "kvd: ssd.bytes: no size"]
    assert not out


def test_without_problems_a_message_is_printed(capsys):
    """On stdout: it is the requested output."""
    with listing_problems("kvd"):
        pass
    assert capsys.readouterr().out == "the settings are fine\n"
