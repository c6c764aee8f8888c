"""Histories of unnamed sessions in the object store that services share: which session has each.

    v1/histories/TENANT/DIGEST    an entry for each answer in a session that no client has named

A client may send its whole conversation with each request: by its history every server finds the
session that it continues. Two sessions with the same history have one entry, that of the last
writer: either session is right. No turn fails because the store is silent: then no history is found
and none is put there.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from inference_svc.runtime.turns.shared_transcripts import place_of
from inference_svc.runtime.turns.store_calls import THREADS, StoreCalls, StoreSilentError
from shared.blobs.blob_store import BlobMissingError, BlobStore
from shared.blobs.history_entry import HistoryEntry, decode_entry, encode_entry
from shared.blobs.release import HISTORIES, stored_name
from shared.types.histogram import Tally
from shared.types.session_key import SessionKey


class SharedHistories:
    """Finds and puts histories. Methods are called on the event loop.

    Args:
        calls: the calls to the store.

    Attributes:
        calls: the calls to the store. While it is silent, callers do not look histories up: each
            conversation would wait for the store.
        asked: number of lookups of conversations, by result: found, absent, gone (the entry's
            session has another history, or does not exist), silent.
    """

    def __init__(self, calls: StoreCalls) -> None:
        self.calls = calls
        self.asked = Tally()

    async def find(self, tenant: str, digests: Sequence[str]) -> dict[str, str]:
        """Return the sessions of some histories, by digest; all are read at once.

        Args:
            tenant: the tenant of the conversation.
            digests: digests of the histories, in hex.

        Raises:
            StoreSilentError: it is not known.
        """
        names = [_name(tenant, digest) for digest in digests]
        found = await asyncio.gather(*map(self._read, names))
        return {
            digest: entry.session for digest, entry in zip(digests, found, strict=True) if entry
        }

    async def keep(self, key: SessionKey, digest: str) -> None:
        """Put the entry of a history into the store; ignored if the store is silent."""
        name = _name(key.tenant, digest)
        value = encode_entry(HistoryEntry(key.session_id, place_of(key)))
        with suppress(StoreSilentError):
            await self.calls.call("told", lambda store: store.put(name, value))

    async def forget(self, key: SessionKey, digests: Sequence[str]) -> None:
        """Remove the entries of a deleted session, but not those that lead to another session."""
        names = [_name(key.tenant, digest) for digest in digests]
        with suppress(StoreSilentError):
            # As many at once as there are threads: further calls would wait until the deadline.
            for start in range(0, len(names), THREADS):
                some = names[start : start + THREADS]
                await asyncio.gather(*(self._forget(name, key.session_id) for name in some))

    async def _read(self, name: str) -> HistoryEntry | None:
        return await self.calls.call("asked", lambda store: _read(store, name))

    async def _forget(self, name: str, session_id: str) -> None:
        await self.calls.call("told", lambda store: _forget(store, name, session_id))


def _name(tenant: str, digest: str) -> str:
    return f"{HISTORIES}/{stored_name(tenant)}/{digest}"


def _read(store: BlobStore, name: str) -> HistoryEntry | None:
    try:
        return decode_entry(store.get(name))
    except BlobMissingError:
        return None


def _forget(store: BlobStore, name: str, session_id: str) -> None:
    entry = _read(store, name)
    if entry is not None and entry.session == session_id:
        store.delete([name])
