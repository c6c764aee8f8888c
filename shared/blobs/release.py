"""The release that a store's objects are of, and the names of the objects.

The first process that uses a store marks it with its format.

v1/format         the format of all objects here
v1/transcripts/   the services' transcripts
v1/histories/     from a history to its transcript (history_entry.py)
v1/responses/     from a response to its transcript (response_entry.py)
v1/conversations/ lists of items that responses continue (conversation_entry.py)
v1/…              kvd's sessions (kvd/remote/names.py)

In names, tenants, sessions and models stand as digests, which are valid in every store.
"""

import hashlib

from shared.blobs.blob_store import BlobExistsError, BlobStore, UnfitStoreError

FORMAT = "v1/format"
TRANSCRIPTS = "v1/transcripts"
HISTORIES = "v1/histories"
RESPONSES = "v1/responses"
CONVERSATIONS = "v1/conversations"
DELETED_BYTES = 8  # size of a transcript or conversation that marks a deletion
THIS_FORMAT = b"KVDREMOT 1\n"
_PLACE_PARTS = 4  # parts in the name of a transcript's place


def stored_name(name: str) -> str:
    """Return the digest that stands for a tenant, session or model: BLAKE2b-128, in hex."""
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def is_transcript_place(name: str) -> bool:
    """Whether a name is that of a transcript's place, whose versions a sweep may remove."""
    parts = name.split("/")
    return name.startswith(f"{TRANSCRIPTS}/") and len(parts) == _PLACE_PARTS and all(parts)


def claim(store: BlobStore) -> None:
    """Check that a store is of this release's format; mark a new one.

    Raises:
        UnfitStoreError: it has another format, or replaces objects in spite of `if_absent`.
    """
    for _ in range(2):  # the second put has to find the object of the first
        try:
            store.put(FORMAT, THIS_FORMAT, if_absent=True)
        except BlobExistsError:
            break
    else:
        raise UnfitStoreError(
            "this object store overwrites objects although it was asked not to",
            "use a store that supports conditional writes (If-None-Match): S3, GCS, Azure or "
            "a local directory",
        )
    if store.get(FORMAT) != THIS_FORMAT:
        raise UnfitStoreError(
            "the object store was written by another release",
            "use that release, or another prefix in the URL",
        )
