"""HistoryEntry: leads from the digest of a history to the session that continued it. Pure.

It is for clients that name no session and send their whole history.

    v1/histories/TENANT/DIGEST    as JSON: "session", its id; "transcript", its place

DIGEST is that of a whole conversation, up to an answer. An entry is a hint: readers check that the
transcript has that history.
"""

import json
from dataclasses import asdict, dataclass

from shared.blobs.release import is_transcript_place


@dataclass(frozen=True)
class HistoryEntry:
    """The session that has a history.

    Attributes:
        session: its id.
        transcript: place of the versions of its transcript.
    """

    session: str
    transcript: str


def encode_entry(entry: HistoryEntry) -> bytes:
    """Encode an entry."""
    return json.dumps(asdict(entry)).encode()


def decode_entry(data: bytes) -> HistoryEntry | None:
    """Decode an entry; None if it is invalid, or does not name a transcript's place."""
    try:
        found = json.loads(data)
        entry = HistoryEntry(str(found["session"]), str(found["transcript"]))
    except (ValueError, KeyError, TypeError):
        return None
    return entry if is_transcript_place(entry.transcript) else None
