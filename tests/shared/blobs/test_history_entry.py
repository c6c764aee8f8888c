"""Entries of histories: read as they were written, and nothing else is one."""

import pytest

from shared.blobs.history_entry import HistoryEntry, decode_entry, encode_entry
from shared.blobs.release import TRANSCRIPTS

ENTRY = HistoryEntry("s-1", f"{TRANSCRIPTS}/tenant/digest")


def test_an_entry_is_read_as_it_was_written() -> None:
    assert decode_entry(encode_entry(ENTRY)) == ENTRY


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b'{"session": "s"}', b"\xff", b"{"])
def test_what_is_none_is_none(data: bytes) -> None:
    assert decode_entry(data) is None


@pytest.mark.parametrize(
    "place",
    [
        "",
        TRANSCRIPTS,
        f"{TRANSCRIPTS}/t",
        f"{TRANSCRIPTS}/t/",
        f"{TRANSCRIPTS}/t/d/1",
        "v1/chunks/t/d",
    ],
)
def test_one_that_leads_elsewhere_is_none(place: str) -> None:
    """A sweep removes what entries lead to."""
    assert decode_entry(encode_entry(HistoryEntry("s", place))) is None
