"""Entries of conversations: they round-trip, damage is refused, and two can be merged."""

import json
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.blobs import conversation_entry
from shared.blobs.conversation_entry import (
    MAX_GONE,
    VERSION,
    ConversationEntry,
    EntryItem,
    _digest,
    decode_conversation,
    encode_conversation,
    merged,
)


def items(names: str, turn: int = 0) -> tuple[EntryItem, ...]:
    return tuple(EntryItem({"id": name, "text": f"é {name}"}, turn) for name in names)


def names(entry: ConversationEntry) -> str:
    return "".join(one.item_id for one in entry.items)


ENTRY = ConversationEntry(
    tenant="acme",
    conversation="conv_a",
    created_s=1.5,
    metadata={"for": "é\ud800"},
    instructions="Be brief.",
    session="conv_a-2",
    turns=2,
    request="r-2",
    items=(*items("ab", 1), *items("c", 2), *items("d")),
    gone=("x", "y"),
)


def members(entry: ConversationEntry = ENTRY) -> dict[str, Any]:
    return {"version": VERSION, **vars(entry)}


def write_body(body: Any) -> bytes:
    """Return the stored bytes of a body, valid or not."""
    data = zlib.compress(json.dumps(body).encode())
    return _digest(data) + data


def encode_entry(entry: ConversationEntry = ENTRY) -> bytes:
    data = encode_conversation(entry)
    assert data is not None
    return data


def test_an_entry_round_trips() -> None:
    assert decode_conversation(encode_entry()) == ENTRY
    empty = replace(ENTRY, items=(), turns=0, request="", metadata={})
    assert decode_conversation(encode_entry(empty)) == empty


def test_unknown_members_are_ignored() -> None:
    assert decode_conversation(write_body({**members(), "mood": "good"})) == ENTRY


def test_an_overlong_entry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As stored, or after decompression."""
    long = encode_entry(replace(ENTRY, instructions="é" * 100_000))
    monkeypatch.setattr(conversation_entry, "MAX_JSON_BYTES", 100_000)
    assert encode_conversation(replace(ENTRY, instructions="é" * 100_000)) is None
    assert decode_conversation(long) is None
    assert decode_conversation(encode_entry()) == ENTRY
    monkeypatch.setattr(conversation_entry, "MAX_ENTRY_BYTES", len(encode_entry()) - 1)
    assert encode_conversation(ENTRY) is None


@given(st.data())
def test_a_damaged_entry_is_refused(data: st.DataObject) -> None:
    """With any byte changed, missing, or added."""
    whole = encode_entry()
    at = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(st.integers(1, 255))
    assert decode_conversation(whole[:at] + bytes([whole[at] ^ other]) + whole[at + 1 :]) is None
    assert decode_conversation(whole[:at]) is None
    assert decode_conversation(whole[:at] + bytes([other]) + whole[at:]) is None


@given(st.binary())
def test_other_bytes_are_refused(data: bytes) -> None:
    """With a valid digest, and compressed, too."""
    assert decode_conversation(data) is None
    assert decode_conversation(_digest(data) + data) is None
    packed = zlib.compress(data)
    assert decode_conversation(_digest(packed) + packed) is None
    behind = zlib.compress(json.dumps(members()).encode()) + b"x" + data
    assert decode_conversation(_digest(behind) + behind) is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": VERSION + 1},
        {"version": None},
        {"tenant": 1},
        {"conversation": None},
        {"created_s": "now"},
        {"metadata": []},
        {"instructions": None},
        {"session": ""},
        {"turns": -1},
        {"turns": True},
        {"request": None},
        {"items": None},
        {"items": [[{"id": "a"}]]},
        {"items": [[{"id": "a"}, -1]]},
        {"items": [[{"id": "a"}, True]]},
        {"items": [[{"id": 1}, 0]]},
        {"items": [[{}, 0]]},
        {"items": [["a", 0]]},
        {"items": [[{"id": "a"}, 0], [{"id": "a"}, 1]]},
        {"gone": None},
        {"gone": [1]},
    ],
)
def test_an_invalid_entry_is_refused(change: dict[str, Any]) -> None:
    """Though its digest is right."""
    assert decode_conversation(write_body({**members(), **change})) is None


def test_an_entry_without_a_member_is_refused() -> None:
    for name in members():
        rest = {member: value for member, value in members().items() if member != name}
        assert decode_conversation(write_body(rest)) is None
    assert decode_conversation(write_body([])) is None


# ---------------------------------------------------------------------------------------- together


def together(here: str, there: str) -> tuple[str, bool]:
    """Merge two entries, given as items and, after a stroke, deleted ones; return the items."""
    (own, _, own_gone), (other, _, other_gone) = here.partition("/"), there.partition("/")
    both, has_diverged = merged(
        replace(ENTRY, items=items(own, 2), gone=tuple(own_gone), metadata={"of": "here"}),
        replace(ENTRY, items=items(other, 1), gone=tuple(other_gone), metadata={"of": "there"}),
    )
    assert both.metadata == {"of": "there" if has_diverged else "here"}
    assert set(both.gone) == {*own_gone, *other_gone}
    return names(both), has_diverged


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("ab", "ab"),
        ("abc", "ab"),
        ("a/b", "ab"),
        ("ac/b", "ab"),
        ("/a", "a"),
        ("a/b", "a/bc"),
    ],
)
def test_an_older_version_of_ours_is_continued(here: str, there: str) -> None:
    """Also one from a call whose result is unknown."""
    assert together(here, there) == (here.partition("/")[0], False)


@pytest.mark.parametrize(
    ("here", "there", "both"),
    [
        ("abx", "abc", "abcx"),
        ("ab", "abc", "abc"),
        ("ab", "a/b", "a"),
        ("abx", "a/b", "ax"),
        ("abxy", "ac/b", "acxy"),
        ("a/b", "abc", "ac"),
        ("ax/b", "abc", "acx"),
    ],
)
def test_local_additions_follow_those_of_others(here: str, there: str, both: str) -> None:
    """Nothing is lost or doubled; deletions on either side stay."""
    assert together(here, there) == (both, True)


def test_local_additions_have_to_be_read_again() -> None:
    """The session that has read them is not the conversation's."""
    here = replace(ENTRY, items=(*items("ab", 1), *items("x", 2)), session="conv_a-3", gone=())
    there = replace(ENTRY, items=items("abc", 1), gone=())
    both, _ = merged(here, there)
    assert both == replace(there, items=(*there.items, *items("x")))


def test_a_session_that_may_have_read_deleted_items_is_left() -> None:
    """All items are read anew."""
    here = replace(ENTRY, items=items("a", 1), gone=("b",))
    there = replace(ENTRY, items=items("abc", 1), gone=())
    both, _ = merged(here, there)
    assert (names(both), both.turns, both.request) == ("ac", 0, "")


def test_the_last_deletions_are_remembered() -> None:
    here = replace(ENTRY, gone=tuple(f"h{number}" for number in range(MAX_GONE)))
    there = replace(ENTRY, gone=("t", "h1"))
    gone = merged(here, there)[0].gone
    assert (len(gone), gone[-1]) == (MAX_GONE, here.gone[-1])


@given(
    st.sets(st.sampled_from("abcdef")),
    st.sets(st.sampled_from("abcdef")),
    st.sets(st.sampled_from("abcdef")),
    st.sets(st.sampled_from("xyz")),
    st.sets(st.sampled_from("uvw")),
)
def test_both_sides_changes_count(
    base: set[str], gone_here: set[str], gone_there: set[str], new: set[str], others: set[str]
) -> None:
    """Whatever both have done to their common items."""
    gone_here, gone_there = base & gone_here, base & gone_there
    here = ["".join(sorted((base - gone_here) | new)), "".join(gone_here)]
    there = ["".join(sorted((base - gone_there) | others)), "".join(gone_there)]
    found, _ = together("/".join(here), "/".join(there))
    assert set(found) == (base - gone_here - gone_there) | new | others
    assert len(set(found)) == len(found)
