"""Completion of kvd's command lines."""

import shlex

import pytest

from kvd.cli.completion import CHOICES, EVENT_NAMES, values_with
from kvd.cli.filters import SortName, TierName
from kvd.cli.main import root_command
from kvd.core.records.actions import SESSION_CUT
from shared.config.completion import Shell, candidates

STORED = {"session": ["a:1", "b"], "tenant": ["acme"], "model": ["5e"]}


def words_after(line):
    """Return candidates for what is typed; a blank at the end begins a new word."""
    typed = shlex.split(line) + ([""] if line.endswith(" ") else [])
    found = candidates(root_command(), typed, values_with(lambda kind, _: STORED[kind]))
    return [candidate.word for candidate in found]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sh", ["show"]),
        ("config r", ["reload"]),
        ("show ", ["a:1", "b"]),
        ("show a", ["a:1"]),
        ("show a:1 ", []),
        ("ls ", ["a:1", "b"]),
        ("flush --dr", ["--dry-run"]),
        ("flush --tenant ", ["acme"]),
        ("flush --tenant acme b", ["b"]),
        ("flush --dry-run b", ["b"]),
        ("ls --sort b", ["bytes"]),
        ("ls --sort=i", ["--sort=idle"]),
        ("ls --tier ", ["dram", "ssd"]),
        ("ls --model ", ["5e"]),
        ("events --name session_cu", [SESSION_CUT]),
        ("token ", []),
        ("completion f", ["fish"]),
        ("nonsense ", None),
        ("ls --idle ", []),
    ],
)
def test_candidates_fit_their_place(line, expected):
    """Commands, options, choices, stored ids."""
    found = words_after(line)
    if expected is None:
        assert "serve" in found
    else:
        assert found == expected


def test_hidden_commands_are_not_offered():
    """The commands that shells call are hidden; all others are offered."""
    found = words_after("")
    assert "complete" not in found
    assert {"ls", "top", "config"} <= set(found)


def test_completed_choices_are_those_of_the_options():
    """The commands accept what completion offers."""
    assert CHOICES["sort"] == tuple(SortName)
    assert CHOICES["tier"] == tuple(TierName)
    assert CHOICES["shell"] == tuple(Shell)
    assert len(EVENT_NAMES) == len(set(EVENT_NAMES)) > 10
