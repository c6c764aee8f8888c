"""Entries of responses: read as they were written, and nothing else is one."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.blobs.release import TRANSCRIPTS
from shared.blobs.response_entry import (
    DELETED,
    MAX_ENTRY_BYTES,
    VERSION,
    ResponseEntry,
    _digest,
    decode_response,
    encode_response,
)

ENTRY = ResponseEntry(
    transcript=f"{TRANSCRIPTS}/tenant/digest",
    session="s-1",
    turns=2,
    request="r-2",
    named=False,
    info={"created_s": 1.5, "model": "m", "metadata": {"a": "é\ud800"}, "tools": []},
    items='[{"type": "message"}]',
)
LONG = "é" * (MAX_ENTRY_BYTES // 6)


def written(body: Any) -> bytes:
    """What a store has of a body, whatever that is."""
    data = json.dumps(body).encode()
    return _digest(data) + data


def encoded(entry: ResponseEntry = ENTRY) -> bytes:
    data = encode_response(entry)
    assert data is not None
    return data


def test_an_entry_is_read_as_it_was_written() -> None:
    assert decode_response(encoded()) == ENTRY


def test_what_only_a_newer_release_says_is_left_out() -> None:
    body = {"version": VERSION, **asdict(ENTRY), "mood": "good"}
    assert decode_response(written(body)) == ENTRY


def test_an_entry_that_is_too_long_lacks_its_input_or_is_none() -> None:
    assert decode_response(encoded(replace(ENTRY, items=LONG))) == replace(ENTRY, items="")
    assert encode_response(replace(ENTRY, info={"text_format": LONG})) is None
    longest = {"version": VERSION, **asdict(replace(ENTRY, items=LONG))}
    assert decode_response(written(longest)) is None


@given(st.data())
def test_a_damaged_entry_is_none(data: st.DataObject) -> None:
    """Whichever of its bytes is another one, is missing, or was added."""
    whole = encoded()
    at = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(st.integers(1, 255))
    assert decode_response(whole[:at] + bytes([whole[at] ^ other]) + whole[at + 1 :]) is None
    assert decode_response(whole[:at]) is None
    assert decode_response(whole[:at] + bytes([other]) + whole[at:]) is None


@given(st.binary())
def test_other_bytes_are_none(data: bytes) -> None:
    """With a digest before them, too."""
    assert decode_response(data) is None
    assert decode_response(_digest(data) + data) is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": VERSION + 1},
        {"version": None},
        {"transcript": f"{TRANSCRIPTS}/tenant"},
        {"transcript": "v1/chunks/tenant/digest"},
        {"session": ""},
        {"session": 1},
        {"turns": 0},
        {"turns": True},
        {"turns": "2"},
        {"request": None},
        {"named": 0},
        {"info": []},
        {"items": []},
    ],
)
def test_what_cannot_be_is_none(change: dict[str, Any]) -> None:
    """Though it has the digest of an entry that was written so."""
    assert decode_response(written({"version": VERSION, **asdict(ENTRY), **change})) is None


def test_what_lacks_a_member_is_none() -> None:
    whole = {"version": VERSION, **asdict(ENTRY)}
    for name in whole:
        rest = {member: value for member, value in whole.items() if member != name}
        assert decode_response(written(rest)) is None
    assert decode_response(written([])) is None
    assert decode_response(_digest(b"[" * 100_000) + b"[" * 100_000) is None


def test_a_mark_is_no_entry() -> None:
    """And shorter than any."""
    assert decode_response(DELETED) is None
    assert len(DELETED) < len(encoded())
