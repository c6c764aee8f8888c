"""Valid bodies of requests. Slots are tested over HTTP."""

import pytest

from inference_svc.http_api.errors import InvalidJsonError
from inference_svc.http_api.request_slots import parse_object


def test_an_object_is_accepted():
    """UTF-8 JSON, unchanged."""
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
def test_other_bodies_are_refused(body):
    """With one short line, however long the body is."""
    with pytest.raises(InvalidJsonError) as refused:
        parse_object(body)
    assert len(str(refused.value)) < 300
