"""ResponseEntry: leads from a response to the turn that made it, for any server to continue. Pure.

    v1/responses/TENANT/RESPONSE    names as digests (release.py)

    32 hex digits    BLAKE2b-128 of what follows
    JSON             "version": 1; the members of `ResponseEntry`

    deleted          these bytes alone: it was deleted

Members that only a newer release knows are ignored. An entry of another version, or that is damaged
or too long, counts as absent. Readers check that the transcript has that turn.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shared.blobs.release import is_transcript_place

VERSION = 1
DELETED = b"deleted\n"
MAX_ENTRY_BYTES = 2 << 20  # an input of 256 KiB takes three times that as JSON in JSON
_DIGEST_BYTES = 16
_HEAD = 2 * _DIGEST_BYTES


@dataclass(frozen=True)
class ResponseEntry:
    """A stored response.

    Attributes:
        transcript: place of the versions of its session's transcript.
        session: id of its session.
        turns: number of complete turns of the session up to its answer.
        request: request id of the last of these turns.
        named: whether a client gave the session its name.
        info: its members besides its answer, in the services' form.
        items: its input as JSON; "": it is not kept.
    """

    transcript: str
    session: str
    turns: int
    request: str
    named: bool
    info: Mapping[str, Any]
    items: str = ""


def encode_response(entry: ResponseEntry) -> bytes | None:
    """Encode an entry, without its input if it is too long; None if it is too long even so."""
    for items in (entry.items, ""):
        body = json.dumps({"version": VERSION, **asdict(entry), "items": items}).encode()
        if _HEAD + len(body) <= MAX_ENTRY_BYTES:
            return _digest(body) + body
    return None


def decode_response(data: bytes) -> ResponseEntry | None:
    """Decode an entry; None if the bytes are no valid entry."""
    head, body = data[:_HEAD], data[_HEAD:]
    if len(data) > MAX_ENTRY_BYTES or head != _digest(body):
        return None
    try:
        found = json.loads(body)
        if found["version"] != VERSION:
            return None
        entry = ResponseEntry(**{name: found[name] for name in _KINDS})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_sound = all(type(getattr(entry, name)) is kind for name, kind in _KINDS.items())
    is_point = is_sound and entry.turns > 0 and bool(entry.session)
    return entry if is_point and is_transcript_place(entry.transcript) else None


_KINDS: Mapping[str, type] = {
    "transcript": str,
    "session": str,
    "turns": int,
    "request": str,
    "named": bool,
    "info": dict,
    "items": str,
}


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest().encode()
