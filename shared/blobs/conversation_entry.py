"""What a store has of a conversation, by which any server goes on with it. Pure.

    16 bytes    BLAKE2b-128 of what follows
    zlib        JSON: "version": 1; the members of `ConversationEntry`

Members that only a newer release knows are left out; of another version, damaged or too long an
entry is none. Whoever reads one looks whether it is of the conversation that he asked for.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

VERSION = 1
MAX_ENTRY_BYTES = 16 << 20
MAX_JSON_BYTES = 64 << 20  # that an entry may decompress to
MAX_GONE = 1000
_DIGEST_BYTES = 16


class EntryItem(NamedTuple):
    """An item of a conversation.

    Attributes:
        item: as clients read it, with its id.
        turn: that has read it, from 1; 0: none has.
    """

    item: Mapping[str, Any]
    turn: int = 0

    @property
    def item_id(self) -> str:
        """Its id, which no other item has."""
        return str(self.item["id"])


@dataclass(frozen=True)
class ConversationEntry:
    """A conversation, whole.

    Attributes:
        tenant: whose it is.
        conversation: its id.
        created_s: Unix time in seconds.
        metadata: the client's own notes.
        instructions: that lead it.
        session: of its turns.
        turns: number of the session's first turns that are the conversation's.
        request: request id of the last of these; "" if there are none.
        items: in their order.
        gone: ids of items that were deleted, the last MAX_GONE of them: none comes back.
    """

    tenant: str
    conversation: str
    created_s: float
    metadata: Mapping[str, str]
    instructions: str
    session: str
    turns: int
    request: str
    items: tuple[EntryItem, ...]
    gone: tuple[str, ...] = ()

    @property
    def item_ids(self) -> frozenset[str]:
        """The ids of its items."""
        return frozenset(one.item_id for one in self.items)


def encode_conversation(entry: ConversationEntry) -> bytes | None:
    """Encode an entry; None: it is too long."""
    members = {name: getattr(entry, name) for name in (*_KINDS, "items", "gone")}
    text = json.dumps({"version": VERSION, **members}).encode()
    body = zlib.compress(text)
    is_bounded = len(text) <= MAX_JSON_BYTES and _DIGEST_BYTES + len(body) <= MAX_ENTRY_BYTES
    return _digest(body) + body if is_bounded else None


def decode_conversation(data: bytes) -> ConversationEntry | None:
    """Decode an entry; None: it is none."""
    head, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if len(data) > MAX_ENTRY_BYTES or head != _digest(body):
        return None
    decompressor = zlib.decompressobj()
    try:
        text = decompressor.decompress(body, MAX_JSON_BYTES)
        found = json.loads(text)
        if not decompressor.eof or decompressor.unused_data or found["version"] != VERSION:
            return None
        items = tuple(EntryItem(item, turn) for item, turn in found["items"])
        members = {name: found[name] for name in _KINDS}
        entry = ConversationEntry(items=items, gone=tuple(found["gone"]), **members)
    except (zlib.error, ValueError, KeyError, TypeError, RecursionError):
        return None
    return entry if _is_sound(entry) else None


def merged(here: ConversationEntry, there: ConversationEntry) -> tuple[ConversationEntry, bool]:
    """Put together what a server has of a conversation that it has changed, and what the store has.

    Returns:
        What becomes of the conversation, and whether the two had gone on apart: then what was added
        here follows what the store has, as items that no turn has read.
    """
    gone = tuple(dict.fromkeys((*there.gone, *here.gone)))[-MAX_GONE:]
    known, deleted = there.item_ids, frozenset((*there.gone, *here.gone))
    if known <= here.item_ids | deleted and here.item_ids.isdisjoint(there.gone):
        return replace(here, gone=gone), False  # what is there has come from here
    left = [one for one in there.items if one.item_id not in deleted]
    added = [EntryItem(one.item) for one in here.items if one.item_id not in known | deleted]
    both = replace(there, items=(*left, *added), gone=gone)
    if len(left) < len(there.items):  # its session may have read what is deleted
        both = replace(both, turns=0, request="")
    return both, True


_KINDS: Mapping[str, type] = {
    "tenant": str,
    "conversation": str,
    "created_s": float,
    "metadata": dict,
    "instructions": str,
    "session": str,
    "turns": int,
    "request": str,
}


def _is_sound(entry: ConversationEntry) -> bool:
    """Whether an entry's members are what they are to be."""
    is_typed = all(type(getattr(entry, name)) is kind for name, kind in _KINDS.items())
    are_items = all(
        isinstance(one.item, dict)
        and isinstance(one.item.get("id"), str)
        and type(one.turn) is int
        and one.turn >= 0
        for one in entry.items
    )
    are_ids = all(isinstance(one, str) for one in entry.gone)
    is_point = is_typed and entry.turns >= 0 and bool(entry.session)
    return is_point and are_items and are_ids and len(entry.item_ids) == len(entry.items)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
