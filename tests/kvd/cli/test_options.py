"""Options that commands share: naming a session, confirmation, documents for programs."""

import io
import json
import sys

import pytest

from kvd.cli.options import (
    confirm,
    key_of,
    print_json,
    print_json_line,
    require_terminal,
    warn_of_unavailable,
)
from kvd.errors import NotConfirmedError


class Terminal(io.StringIO):
    """A person who answers."""

    def isatty(self):
        return True


def test_a_session_is_named_as_given():
    """kvd finds out what is left out."""
    key = key_of("s", "", "")
    assert (key.tenant, key.model, key.session_id) == ("", "", "s")
    key = key_of("s", "acme", "ab")
    assert (key.tenant, key.model, key.session_id) == ("acme", "ab", "s")


@pytest.mark.parametrize("answer", ["n\n", "\n"])
def test_only_yes_confirms(monkeypatch, answer):
    """An empty answer means no."""
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    with pytest.raises(NotConfirmedError, match="nothing was changed"):
        confirm("Drop everything?")


def test_yes_confirms(monkeypatch, capsys):
    """The question was shown."""
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    confirm("Drop everything?")
    assert "Drop everything?" in capsys.readouterr().out


def test_without_a_terminal_nothing_is_asked(monkeypatch):
    """A script has to pass --yes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(NotConfirmedError, match="confirmation") as caught:
        confirm("Drop everything?")
    assert "--yes" in caught.value.remedy
    with pytest.raises(NotConfirmedError):
        require_terminal()


def test_documents_are_one_or_one_per_line(capsys):
    """A stream of them can be read while it is written."""
    print_json({"a": [1, 2]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, 2]}
    for number in range(2):
        print_json_line({"number": number})
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [{"number": 0}, {"number": 1}]


def test_hidden_sessions_are_mentioned(capsys):
    """On stderr, and only if there are any."""
    warn_of_unavailable(0, "listed")
    assert not capsys.readouterr().err
    warn_of_unavailable(2, "listed")
    assert "2 layouts are unavailable, so their sessions were not listed" in capsys.readouterr().err
