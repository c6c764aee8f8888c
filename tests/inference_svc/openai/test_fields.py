"""What bodies may be, and how a member that is off is told."""

import pytest

from inference_svc.openai.errors import (
    InvalidJsonError,
    RequestError,
    UnknownParameterError,
    UnsupportedValueError,
)
from inference_svc.openai.fields import Fields, Refused, parse_object

FIELDS = {
    "word": "yes",
    "number": 0.5,
    "whole": 3,
    "flag": True,
    "list": [1],
    "object": {"inner": "text"},
    "nothing": None,
    "huge": 10**4000,
    "endless": 1e999,
}


def test_an_object_is_read():
    """UTF-8 JSON, as it is."""
    assert parse_object('{"a": "é\\u00e9\\ud83d\\ude00"}'.encode()) == {"a": "éé😀"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'"text"',
        b"\xff\xfe",
        b'{"a": "\xff"}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": "\\ud83d"}',
        '{"a": "\\ud83d"}'.encode("utf-16"),
        b'{"\\udc00": 1}',
        b"[" * 200_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
    ids=[
        "empty",
        "cut",
        "list",
        "number",
        "text",
        "no-utf8",
        "no-utf8-inside",
        "nan",
        "infinity",
        "half-character",
        "half-character-in-utf16",
        "half-character-name",
        "deep-list",
        "deep-object",
        "endless-number",
    ],
)
def test_what_is_no_object_is_refused(body):
    """With one short line, however long the body is."""
    with pytest.raises(InvalidJsonError) as refused:
        parse_object(body)
    assert len(str(refused.value)) < 300


def test_members_are_read_by_their_types():
    """One that is null is absent."""
    fields = Fields(FIELDS)
    assert fields.text("word") == "yes"
    assert fields.number("number", 0, 1) == 0.5
    assert fields.number("whole", 0, 3) == 3.0
    assert fields.integer("whole", 0, 3) == 3
    assert fields.flag("flag")
    assert fields.items("list") == [1]
    assert fields.inner("object").text("inner") == "text"
    assert fields.text("nothing", "default") == "default"
    assert fields.integer("absent", 0, 1) is None
    fields.finish({"huge", "endless"})


@pytest.mark.parametrize(
    "read",
    [
        lambda fields: fields.text("whole"),
        lambda fields: fields.flag("whole"),
        lambda fields: fields.flag("word"),
        lambda fields: fields.integer("flag", 0, 1),
        lambda fields: fields.integer("number", 0, 1),
        lambda fields: fields.integer("whole", 0, 2),
        lambda fields: fields.number("flag", 0, 1),
        lambda fields: fields.number("word", 0, 1),
        lambda fields: fields.number("whole", 0, 2),
        lambda fields: fields.number("huge", 0, 2),
        lambda fields: fields.number("endless", 0, 2),
        lambda fields: fields.items("object"),
        lambda fields: fields.inner("list"),
    ],
    ids=[
        "text",
        "flag-number",
        "flag-text",
        "integer-flag",
        "integer-fraction",
        "integer-bound",
        "number-flag",
        "number-text",
        "number-bound",
        "number-huge",
        "number-endless",
        "list",
        "object",
    ],
)
def test_a_wrong_type_or_bound_is_told_with_its_path(read):
    """The remedy says what is accepted."""
    with pytest.raises(RequestError) as refused:
        read(Fields(FIELDS, "at"))
    assert refused.value.param.startswith("at.")
    assert refused.value.remedy.startswith("send ")


def test_what_nobody_read_is_refused():
    """With the name that was probably meant; what may be ignored is."""
    fields = Fields({"temprature": 1, "user": "me"})
    fields.number("temperature", 0, 2)
    with pytest.raises(UnknownParameterError, match="did you mean 'temperature'"):
        fields.finish({"user"})


def test_a_feature_that_is_not_there_is_refused():
    """Unless its value asks for nothing; true is not 1."""
    rules = {"n": Refused((1,), "send it twice")}
    Fields({"n": 1}).refuse(rules)
    Fields({"n": None}).refuse(rules)
    for value in (2, True, "1", [1], {"a": 1}):
        with pytest.raises(UnsupportedValueError, match="send it twice"):
            Fields({"n": value}).refuse(rules)


def test_a_long_value_is_not_repeated_whole():
    """An error's message is short."""
    for value in ("x" * 100_000, 10**300, ["x"] * 10_000):
        with pytest.raises(RequestError) as refused:
            Fields({"a": value}).flag("a")
        assert len(str(refused.value)) < 200
