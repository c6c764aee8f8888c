"""Which release's objects lie in a store; the first that comes says it. And whose lie where.

v1/format         says which version this is
v1/transcripts/   the services' transcripts
v1/histories/     which of these a history leads to (history_entry.py)
v1/responses/     which of these a response is a turn of (response_entry.py)
v1/conversations/ lists of items that responses go on with (conversation_entry.py)
v1/…              kvd's sessions (kvd/remote/names.py)

Names of tenants, sessions and models are there as digests, which fit anywhere.
"""

import hashlib

from shared.blobs.blob_store import BlobStore
from shared.blobs.errors import BlobExistsError, UnfitStoreError

FORMAT = "v1/format"
TRANSCRIPTS = "v1/transcripts"
HISTORIES = "v1/histories"
RESPONSES = "v1/responses"
CONVERSATIONS = "v1/conversations"
DELETED_BYTES = 8  # a transcript, or a conversation, of so many says that it was deleted
THIS_FORMAT = b"KVDREMOT 1\n"
_PLACE_PARTS = 4  # of the name of a transcript's place


def stored_name(name: str) -> str:
    """Return what stands for a tenant's, a session's or a model's name: BLAKE2b-128, in hex."""
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def is_transcript_place(name: str) -> bool:
    """Whether a name could be the place of a transcript's versions: a sweep may remove these."""
    parts = name.split("/")
    return name.startswith(f"{TRANSCRIPTS}/") and len(parts) == _PLACE_PARTS and all(parts)


def claim(store: BlobStore) -> None:
    """Make sure that a store is one for this release's objects, or make it one.

    Raises:
        UnfitStoreError: it is of another release, or overwrites what it was not to.
    """
    for _ in range(2):  # the second time it is there
        try:
            store.put(FORMAT, THIS_FORMAT, if_absent=True)
        except BlobExistsError:
            break
    else:
        raise UnfitStoreError(
            "the store replaces objects that were to be made only if absent",
            "use one that knows If-None-Match: S3, GCS, Azure, a local directory",
        )
    if store.get(FORMAT) != THIS_FORMAT:
        raise UnfitStoreError(
            "what lies in the store is of another release", "use that one, or another prefix"
        )
