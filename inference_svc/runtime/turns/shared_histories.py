"""Which session a history is of, in the object store that services share.

    v1/histories/TENANT/DIGEST    an entry for each answer in a session that no client has named

So a conversation whose client sends all of it is recognised by whichever server it comes to. Two
sessions with the same history have one entry, the one of whoever was there last: either is right.
No turn fails for a store that is silent: then nothing is found, and nothing noted.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from inference_svc.runtime.turns.shared_transcripts import place_of
from inference_svc.runtime.turns.store_calls import THREADS, StoreCalls, StoreSilentError
from shared.blobs.blob_store import BlobStore
from shared.blobs.errors import BlobMissingError
from shared.blobs.history_entry import HistoryEntry, decode_entry, encode_entry
from shared.blobs.release import HISTORIES, stored_name
from shared.types.histogram import Tally
from shared.types.session_key import SessionKey


class SharedHistories:
    """See the module docstring. Methods are called on the event loop.

    Args:
        calls: to the store.

    Attributes:
        calls: likewise; while they are silent nobody asks, lest each conversation waits for it.
        asked: how often conversations were asked for, by what became of it: found, absent, gone
            (what the entry leads to has another history, or none), silent.
    """

    def __init__(self, calls: StoreCalls) -> None:
        self.calls = calls
        self.asked = Tally()

    async def find(self, tenant: str, digests: Sequence[str]) -> dict[str, str]:
        """Return the sessions of some histories, asked for all at once.

        Args:
            tenant: whose histories these are.
            digests: of them, in hex.

        Raises:
            StoreSilentError: nobody knows.
        """
        names = [_name(tenant, digest) for digest in digests]
        found = await asyncio.gather(*map(self._read, names))
        return {
            digest: entry.session for digest, entry in zip(digests, found, strict=True) if entry
        }

    async def keep(self, key: SessionKey, digest: str) -> None:
        """Note which session a history is of."""
        name = _name(key.tenant, digest)
        value = encode_entry(HistoryEntry(key.session_id, place_of(key)))
        with suppress(StoreSilentError):
            await self.calls.call("told", lambda store: store.put(name, value))

    async def forget(self, key: SessionKey, digests: Sequence[str]) -> None:
        """Remove what was noted of a session that is deleted; not what others have noted since."""
        names = [_name(key.tenant, digest) for digest in digests]
        with suppress(StoreSilentError):
            for start in range(0, len(names), THREADS):  # else some wait for others' deadlines
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
