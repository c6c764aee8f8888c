"""Logging: JSON lines, levels, and the standard library's loggers in the same form."""

import io
import json
import logging
import os
import re
import sys

import pytest
import structlog

from shared.process.log import REDACTED, configure_logging, get_logger


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


def test_lines_below_the_level_are_dropped(capsys):
    """What is below the level is not written."""
    configure_logging("warning", json=True)
    get_logger("a").info("quiet")
    get_logger("a").warning("loud")
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["loud"]


def test_standard_loggers_have_the_same_form(capsys):
    """A library that uses logging appears in the same form."""
    configure_logging("info", json=True)
    logging.getLogger("library").warning("said %s", "this")
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["logger"]) == ("said this", "library")


def test_exceptions_are_a_field(capsys):
    """A traceback is a field of its event."""
    configure_logging("info", json=True)
    try:
        int("broken")
    except ValueError:
        get_logger("a").exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: invalid literal" in json.loads(line)["exception"]


def test_text_lines_for_people(capsys):
    """Without JSON an event is a readable line: local time and zone, level, event, facts."""
    configure_logging("info", json=False)
    get_logger("kvd.a").info("started", port=1)
    logging.getLogger("library").warning("said")
    ours, theirs = capsys.readouterr().err.splitlines()
    begin = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d "
    assert re.fullmatch(begin + r"\[info +\] started +port=1", ours)
    assert re.fullmatch(begin + r"\[warning +\] said +\[library\] *", theirs)


@pytest.mark.parametrize(("environ", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_only_terminals_get_colours(monkeypatch, environ, is_coloured):
    """Files do not, nor terminals whose user wants none."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, expected in ((Terminal(), is_coloured), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        configure_logging("info", json=False, environ=environ)
        get_logger("a").info("started")
        assert ("\x1b[" in stream.getvalue()) is expected


@pytest.mark.parametrize("as_json", [True, False])
def test_secrets_are_redacted(capsys, as_json):
    """Neither the name nor the form of a secret gets its value into a line."""
    configure_logging("info", json=as_json)
    log = get_logger("a")
    secret = "tok-1"  # noqa: S105  # of nothing
    log.info("called", token=secret, headers={"Authorization": "tok-2"}, tokens=12, tier_tokens={})
    log.info("said", error="refused Bearer tok-3.abcdefgh", parts=["sk-tok-4-abcdefghijklmn"])
    logging.getLogger("library").warning("got %s", "Authorization: bearer tok-5abcdefgh")
    written = capsys.readouterr().err
    assert "tok-" not in written
    assert written.count(REDACTED) == 5
    assert "12" in written


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    "said",
    [
        "GET /v1/models?api_key=tok-6abc&model=fine",
        "https://fine.example/x?a=fine&access_token=tok-7abc#end",
        "cannot reach https://someone:tok-8abc@fine.example/",
        "'X-Api-Key: tok-9abcdefgh' in fine",
        "Invalid header: Authorization: tok-10abcdef, fine",
        "fine: Cookie: session=tok-11abc",
        {"url": "/x?fine=1&sig=tok-12abc"},
        b"fine Authorization: Bearer tok-13abcdefgh",
        ValueError("fine ?key=tok-14abc"),
        [{"query": ("fine?token=tok-15abc",)}],
        {b"fine?secret=tok-16abc"},
    ],
    ids=str,
)
def test_credentials_are_redacted_everywhere(capsys, as_json, said):
    """In URLs, headers, bytes and objects, of this project and of libraries; the rest is logged."""
    configure_logging("info", json=as_json)
    get_logger("a").info("happened", said=said)
    logging.getLogger("library").warning("happened %s", said)
    written = capsys.readouterr().err
    assert "tok-" not in written
    assert written.count("fine") >= 2
    if as_json:
        assert [json.loads(line)["level"] for line in written.splitlines()] == ["info", "warning"]


@pytest.mark.parametrize("as_json", [True, False])
def test_other_words_are_not_redacted(capsys, as_json):
    """What only sounds like one is logged."""
    configure_logging("info", json=as_json)
    said = (
        "num_tokens=12 key=[1, 2] layout_key: abcdefghijkl, http://127.0.0.1:4317/a?b=c basic idea"
    )
    get_logger("a").info("happened", said=said)
    written = capsys.readouterr().err
    assert said in written
    assert REDACTED not in written


def test_lines_of_libraries_are_limited(capsys):
    """Lines that outsiders can cause do not fill the disk; our own events are all written."""
    configure_logging("info", json=True)
    for number in range(200):
        logging.getLogger("asyncio").error("broke", exc_info=ValueError(number))
        get_logger("asyncio").info("ours")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert sum(line["event"] == "ours" for line in lines) == 200
    assert 1 <= sum(line["event"].startswith("broke") for line in lines) < 100


@pytest.mark.parametrize("as_json", [True, False])
def test_tracebacks_show_no_values(capsys, as_json):
    """It has lines of code and the error's redacted message, and no local variables."""
    configure_logging("info", json=as_json)

    def fail(mine: int) -> None:
        raise ValueError("sent Bearer tok-123456789" if mine else "")

    try:
        fail(40_000_000 + 2_424_242)
    except ValueError:
        get_logger("a").exception("failed")
    written = capsys.readouterr().err
    assert "ValueError" in written
    assert "tok-123456789" not in written
    assert "42424242" not in written


def test_journal_lines_have_priorities(tmp_path, monkeypatch):
    """Where stderr is the journal's stream, a line is JSON behind its priority."""
    with (tmp_path / "journal").open("w+", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        status = os.fstat(stream.fileno())
        for inode in (status.st_ino, status.st_ino + 1):
            environ = {"JOURNAL_STREAM": f"{status.st_dev}:{inode}"}
            configure_logging("debug", json=None, environ=environ)
            for level in ("debug", "info", "warning", "error"):
                getattr(get_logger("a"), level)("happened")
        stream.seek(0)
        lines = stream.read().splitlines()
    assert [line[:3] for line in lines[:4]] == ["<7>", "<6>", "<4>", "<3>"]
    assert {json.loads(line[3:])["event"] for line in lines[:4]} == {"happened"}
    assert all(line.startswith("{") for line in lines[4:])  # stderr was redirected since


def test_bound_values_are_in_every_line(capsys):
    """Values that a task has bound, such as its trace id."""
    configure_logging("info", json=True)
    with structlog.contextvars.bound_contextvars(trace_id="abc"):
        get_logger("a").info("within")
    get_logger("a").info("outside")
    within, outside = map(json.loads, capsys.readouterr().err.splitlines())
    assert within["trace_id"] == "abc"
    assert "trace_id" not in outside
