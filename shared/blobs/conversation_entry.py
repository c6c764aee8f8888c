"""ConversationEntry: a conversation in an object store, with which any server can continue it.

Pure.

    16 bytes    BLAKE2b-128 of what follows
    zlib        JSON: "version": 1; the members of `ConversationEntry`

Members that only a newer release knows are ignored. An entry of another version, or that is damaged
or too long, counts as absent. Readers check that the entry is of the conversation that they want.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

VERSION = 1
MAX_ENTRY_BYTES = 16 << 20
MAX_JSON_BYTES = 64 << 20  # most bytes that an entry may decompress to
MAX_GONE = 1000
_DIGEST_BYTES = 16


class EntryItem(NamedTuple):
    """An item of a conversation.

    Attributes:
        item: the item as clients see it, with its id.
        turn: number of the turn that has read it, from 1; 0: none has.
    """

    item: Mapping[str, Any]
    turn: int = 0

    @property
    def item_id(self) -> str:
        """The item's id, unique in its conversation."""
        return str(self.item["id"])


@dataclass(frozen=True)
class ConversationEntry:
    """A whole conversation.

    Attributes:
        tenant: its tenant.
        conversation: its id.
        created_s: Unix time of its creation, in seconds.
        metadata: the client's metadata.
        instructions: its instructions, before all items.
        session: id of the session of its turns.
        turns: number of the session's first turns that belong to the conversation.
        request: request id of the last of these turns; "" if there are none.
        items: its items, in order.
        gone: ids of deleted items, the last MAX_GONE of them, so that no merge restores them.
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
        """The ids of all items."""
        return frozenset(item.item_id for item in self.items)


def encode_conversation(entry: ConversationEntry) -> bytes | None:
    """Encode an entry; None if it is too long."""
    members = {name: getattr(entry, name) for name in (*_KINDS, "items", "gone")}
    text = json.dumps({"version": VERSION, **members}).encode()
    body = zlib.compress(text)
    is_bounded = len(text) <= MAX_JSON_BYTES and _DIGEST_BYTES + len(body) <= MAX_ENTRY_BYTES
    return _digest(body) + body if is_bounded else None


def decode_conversation(data: bytes) -> ConversationEntry | None:
    """Decode an entry; None if the bytes are no valid entry."""
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
    """Merge a server's changed conversation with the store's.

    Args:
        here: the server's.
        there: the store's.

    Returns:
        The merged conversation, and whether the two had diverged. If so, the items that were added
        here follow those of the store, as items that no turn has read.
    """
    gone = tuple(dict.fromkeys((*there.gone, *here.gone)))[-MAX_GONE:]
    known, deleted = there.item_ids, frozenset((*there.gone, *here.gone))
    if known <= here.item_ids | deleted and here.item_ids.isdisjoint(there.gone):
        return replace(here, gone=gone), False  # the store has an earlier version of ours
    left = [item for item in there.items if item.item_id not in deleted]
    added = [EntryItem(item.item) for item in here.items if item.item_id not in known | deleted]
    both = replace(there, items=(*left, *added), gone=gone)
    if len(left) < len(there.items):  # its session may have read the deleted items
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
    """Whether an entry's members have valid types and values."""
    is_typed = all(type(getattr(entry, name)) is kind for name, kind in _KINDS.items())
    are_items = all(
        isinstance(item.item, dict)
        and isinstance(item.item.get("id"), str)
        and type(item.turn) is int
        and item.turn >= 0
        for item in entry.items
    )
    are_ids = all(isinstance(item_id, str) for item_id in entry.gone)
    is_point = is_typed and entry.turns >= 0 and bool(entry.session)
    return is_point and are_items and are_ids and len(entry.item_ids) == len(entry.items)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
