"""What a store of transcripts has of a history that no client has named: where it went on. Pure.

    v1/histories/TENANT/DIGEST    as JSON: "session", its id; "transcript", where that is

DIGEST is that of a whole conversation, up to an answer. An entry is a hint: whoever follows it
looks whether the transcript says the same.
"""

import json
from dataclasses import asdict, dataclass

from shared.blobs.release import is_transcript_place


@dataclass(frozen=True)
class HistoryEntry:
    """Where a history went on.

    Attributes:
        session: id of the session that has it.
        transcript: where versions of that session's transcript are.
    """

    session: str
    transcript: str


def encode_entry(entry: HistoryEntry) -> bytes:
    """Encode an entry."""
    return json.dumps(asdict(entry)).encode()


def decode_entry(data: bytes) -> HistoryEntry | None:
    """Decode an entry; None: it is none, or leads to something else than a transcript."""
    try:
        found = json.loads(data)
        entry = HistoryEntry(str(found["session"]), str(found["transcript"]))
    except (ValueError, KeyError, TypeError):
        return None
    return entry if is_transcript_place(entry.transcript) else None
