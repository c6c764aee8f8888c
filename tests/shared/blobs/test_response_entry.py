"""Entries of responses: they round-trip, and damage is refused."""

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


def write_body(body: Any) -> bytes:
    """Return the stored bytes of a body, valid or not."""
    data = json.dumps(body).encode()
    return _digest(data) + data


def encode_entry(entry: ResponseEntry = ENTRY) -> bytes:
    data = encode_response(entry)
    assert data is not None
    return data


def test_an_entry_round_trips() -> None:
    assert decode_response(encode_entry()) == ENTRY


def test_unknown_members_are_ignored() -> None:
    body = {"version": VERSION, **asdict(ENTRY), "mood": "good"}
    assert decode_response(write_body(body)) == ENTRY


def test_an_overlong_entry_is_stored_without_its_input_or_refused() -> None:
    assert decode_response(encode_entry(replace(ENTRY, items=LONG))) == replace(ENTRY, items="")
    assert encode_response(replace(ENTRY, info={"text_format": LONG})) is None
    longest = {"version": VERSION, **asdict(replace(ENTRY, items=LONG))}
    assert decode_response(write_body(longest)) is None


@given(st.data())
def test_a_damaged_entry_is_refused(data: st.DataObject) -> None:
    """With any byte changed, missing, or added."""
    whole = encode_entry()
    at = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(st.integers(1, 255))
    assert decode_response(whole[:at] + bytes([whole[at] ^ other]) + whole[at + 1 :]) is None
    assert decode_response(whole[:at]) is None
    assert decode_response(whole[:at] + bytes([other]) + whole[at:]) is None


@given(st.binary())
def test_other_bytes_are_refused(data: bytes) -> None:
    """With a valid digest, too."""
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
def test_an_invalid_entry_is_refused(change: dict[str, Any]) -> None:
    """Though its digest is right."""
    assert decode_response(write_body({"version": VERSION, **asdict(ENTRY), **change})) is None


def test_an_entry_without_a_member_is_refused() -> None:
    whole = {"version": VERSION, **asdict(ENTRY)}
    for name in whole:
        rest = {member: value for member, value in whole.items() if member != name}
        assert decode_response(write_body(rest)) is None
    assert decode_response(write_body([])) is None
    assert decode_response(_digest(b"[" * 100_000) + b"[" * 100_000) is None


def test_a_deletion_mark_is_no_entry() -> None:
    """And is shorter than any."""
    assert decode_response(DELETED) is None
    assert len(DELETED) < len(encode_entry())
