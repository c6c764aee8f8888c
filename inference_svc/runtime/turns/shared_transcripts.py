"""Transcripts in an object store that services share: one of each session, the newest.

    v1/transcripts/TENANT/DIGEST/NUMBER    versions of a session's (shared/blobs/register.py)

    value = eight random bytes, then the file, compressed and, if there is a key, sealed
            (shared/encryption/sealer.py); no file behind them: the session was deleted

A service that adds a turn replaces the version that it has seen; if another service has replaced
that already, it gets an OvertakenError.
"""

import asyncio
import secrets
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from inference_svc.core.transcript_format import (
    Transcript,
    TranscriptDamagedError,
    TranscriptSealedError,
    decode_transcript,
    digest_of,
)
from inference_svc.runtime.turns.store_calls import StoreCalls
from shared.blobs.blob_store import BlobStore
from shared.blobs.register import Register, Seen, is_version
from shared.blobs.release import DELETED_BYTES, TRANSCRIPTS, stored_name
from shared.encryption.sealer import PLAIN, KeyMissingError, SealBrokenError, Sealer
from shared.types.session_key import SessionKey

MAX_FILE_BYTES = 1 << 30  # of a decompressed transcript; a larger one counts as damaged


@dataclass(frozen=True)
class SharedTranscript:
    """A session's transcript as the store has it.

    Attributes:
        seen: its version.
        data: the file; None: the session was deleted.
        transcript: the transcript in the file; None: the session was deleted.
    """

    seen: Seen
    data: bytes | None = None
    transcript: Transcript | None = None


class SharedTranscripts:
    """Reads and replaces transcripts in the store. Methods are called on the event loop.

    Args:
        calls: the calls to the store.
        sealer: seals and opens values there.

    Attributes:
        calls: the calls to the store.
        sealer: seals and opens values there.
    """

    def __init__(self, calls: StoreCalls, sealer: Sealer = PLAIN) -> None:
        self.calls = calls
        self.sealer = sealer

    async def look(self, key: SessionKey) -> Seen:
        """Return the version of a session's transcript in the store, without reading it.

        Raises:
            StoreSilentError: it is not known.
        """
        return await self.calls.call("looked", lambda store: register_of(store, key).look())

    async def read(self, key: SessionKey) -> SharedTranscript | None:
        """Return the newest transcript of a session.

        Returns:
            The transcript; None: there never was one, or it was deleted long ago.

        Raises:
            StoreSilentError: it is not known.
            TranscriptDamagedError: the value is damaged, or another session's.
            TranscriptSealedError: it was sealed by a key that this service does not have.
        """
        version = await self.calls.call("read", lambda store: register_of(store, key).read())
        if version is None:
            return None
        data, transcript = await asyncio.to_thread(decode_value, version.data, key, self.sealer)
        return SharedTranscript(version.seen, data, transcript)

    async def replace(self, key: SessionKey, before: Seen, data: bytes | None) -> Seen:
        """Replace the version of a transcript that was seen; return the new version.

        Args:
            key: the session's key.
            before: the version that was seen.
            data: the file; None: the session is deleted.

        Raises:
            OvertakenError: another service has replaced it.
            StoreSilentError: it is not known whether it was replaced.
        """
        value = await asyncio.to_thread(encode_value, data, key, self.sealer)
        return await self.calls.call(
            "replaced", lambda store: register_of(store, key).replace(before, value)
        )

    async def deleted(self) -> list[str]:
        """Return the digests of deleted sessions, with which their files are named.

        Raises:
            StoreSilentError: it is not known.
        """
        places = await self.calls.call(
            "looked", lambda store: list(deleted_places(store, TRANSCRIPTS)), is_long=True
        )
        return [place.rpartition("/")[2] for place in places]


def register_of(store: BlobStore, key: SessionKey) -> Register:
    """Return the register of a session's transcript."""
    return Register(store, place_of(key))


def place_of(key: SessionKey) -> str:
    """Return the place of a session's transcript: the beginning of its versions' names."""
    return f"{TRANSCRIPTS}/{stored_name(key.tenant)}/{digest_of(key)}"


def encode_value(data: bytes | None, key: SessionKey, sealer: Sealer) -> bytes:
    """Encode a session's file; None: the session is deleted. No two values are equal."""
    file = b"" if data is None else sealer.seal(zlib.compress(data), place_of(key))
    return secrets.token_bytes(DELETED_BYTES) + file


def decode_value(
    value: bytes, key: SessionKey, sealer: Sealer
) -> tuple[bytes | None, Transcript | None]:
    """Decode a session's file and its transcript; both None: the session was deleted.

    Raises:
        TranscriptDamagedError: it is no transcript, or another session's.
        TranscriptSealedError: it was sealed by a key that this service does not have.
    """
    if len(value) == DELETED_BYTES:
        return None, None
    decompressor = zlib.decompressobj()
    try:
        file = open_value(sealer, value[DELETED_BYTES:], place_of(key))
        data = decompressor.decompress(file, MAX_FILE_BYTES)
    except (SealBrokenError, zlib.error) as error:
        raise _damaged_error() from error
    transcript, good_bytes = decode_transcript(data)
    is_whole = decompressor.eof and good_bytes == len(data)
    if transcript is None or transcript.header.key != key or not is_whole:
        raise _damaged_error()
    return data, transcript


def open_value(sealer: Sealer, value: bytes, place: str) -> bytes:
    """Open a value that was sealed for a place in the store.

    Raises:
        TranscriptSealedError: it was sealed by a key that this service does not have.
        SealBrokenError: it was changed, or sealed for another place.
    """
    try:
        return sealer.open(value, place)
    except KeyMissingError as error:
        raise TranscriptSealedError(
            "the session's transcript in the object store is encrypted with key "
            f"{str(error)[:8]}, which this service does not have",
            "add the file of that key to remote.key_file or remote.old_key_files",
        ) from error


def _damaged_error() -> TranscriptDamagedError:
    return TranscriptDamagedError(
        "the session's transcript in the object store is damaged",
        "delete the session, or remove its objects from the store",
    )


def deleted_places(store: BlobStore, under: str) -> Iterator[str]:
    """Return the places of registers whose newest version is a mark of deletion."""
    newest: dict[str, tuple[str, int]] = {}
    for page in store.list(f"{under}/"):
        for blob in page:
            if is_version(blob.name):
                place, _, number = blob.name.rpartition("/")
                newest[place] = max(newest.get(place, ("", 0)), (number, blob.num_bytes))
    return (place for place, (_, size) in newest.items() if size == DELETED_BYTES)
