"""Logging: JSON lines, levels, and the standard library's loggers in the same form."""

import json
import logging

import pytest

from shared.log import configure_logging, get_logger


@pytest.fixture(autouse=True)
def _restore():
    yield
    configure_logging("info", json=False)


def test_json_lines(capsys):
    """Each event is one JSON object with its name, level, logger, time and facts."""
    configure_logging("info", json=True)
    get_logger("kvd.example").info("engine_attached", engine_id=3)
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["level"], line["engine_id"]) == ("engine_attached", "info", 3)
    assert line["logger"] == "kvd.example"
    assert "timestamp" in line


def test_levels_are_kept(capsys):
    """What is below the level is not written."""
    configure_logging("warning", json=True)
    get_logger("a").info("quiet")
    get_logger("a").warning("loud")
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["loud"]


def test_standard_loggers_look_alike(capsys):
    """A library that uses logging appears in the same form."""
    configure_logging("info", json=True)
    logging.getLogger("library").warning("said %s", "this")
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["logger"]) == ("said this", "library")


def test_exceptions_are_one_line(capsys):
    """A traceback is a field of its event."""
    configure_logging("info", json=True)
    try:
        int("broken")
    except ValueError:
        get_logger("a").exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: invalid literal" in json.loads(line)["exception"]


def test_text_for_people(capsys):
    """Without JSON an event is a readable line."""
    configure_logging("info", json=False)
    get_logger("a").info("started", port=1)
    assert "started" in capsys.readouterr().err
