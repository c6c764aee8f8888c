"""Entries of histories: they round-trip, and damage is refused."""

import pytest

from shared.blobs.history_entry import HistoryEntry, decode_entry, encode_entry
from shared.blobs.release import TRANSCRIPTS

ENTRY = HistoryEntry("s-1", f"{TRANSCRIPTS}/tenant/digest")


def test_an_entry_round_trips() -> None:
    assert decode_entry(encode_entry(ENTRY)) == ENTRY


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b'{"session": "s"}', b"\xff", b"{"])
def test_invalid_entries_are_refused(data: bytes) -> None:
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
def test_an_entry_that_leads_elsewhere_is_refused(place: str) -> None:
    """A sweep removes the targets of entries."""
    assert decode_entry(encode_entry(HistoryEntry("s", place))) is None
