"""Responses that are stored, in the object store that services share.

    v1/responses/TENANT/RESPONSE    an entry, or a mark: it was deleted (response_entry.py)

Where there is a key an entry shows no more than where its session's transcript is, and how many
turns that has: the rest is sealed.

So whoever has the id of a response goes on from it at any server. An entry is there before its
client has the end of the answer, unless the store is silent: then it gets there later, if this
service is not killed before. One that was deleted never comes back: it is made only if absent.
"""

import asyncio
import json
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from enum import Enum

from inference_svc.runtime.turns.shared_transcripts import open_value
from inference_svc.runtime.turns.store_calls import THREADS, StoreCalls, StoreSilentError
from shared.blobs.blob_store import BlobStore
from shared.blobs.errors import BlobExistsError, BlobMissingError
from shared.blobs.release import RESPONSES, stored_name
from shared.blobs.response_entry import (
    DELETED,
    ResponseEntry,
    decode_response,
    encode_response,
)
from shared.encryption.sealer import PLAIN, SealBrokenError, Sealer, is_sealed
from shared.process.log import get_logger

SEALED = "sealed"  # in the place of what is
HIDDEN = ("session", "request", "info", "items")  # members that are sealed
MAX_BEHIND_BYTES = 16 << 20  # of entries that wait for a store that is silent; the oldest go first

log = get_logger(__name__)


class Standing(Enum):
    """What the store has of a response."""

    THERE = "an entry"
    DELETED = "a mark"
    ABSENT = "nothing: it was never told, or what it had is swept"


class SharedResponses:
    """See the module docstring. Methods are called on the event loop.

    Args:
        calls: to the store.
        sealer: of what is put there.
    """

    def __init__(self, calls: StoreCalls, sealer: Sealer = PLAIN) -> None:
        self._calls = calls
        self._sealer = sealer
        self._behind: OrderedDict[str, bytes] = OrderedDict()
        self._behind_bytes = 0

    @property
    def retry_s(self) -> float:
        """Seconds until the store is called again, if it is silent."""
        return self._calls.retry_s

    async def find(self, tenant: str, response_id: str) -> ResponseEntry | None:
        """Return what a tenant's response is; None: it is deleted, or there is none.

        Raises:
            StoreSilentError: nobody knows.
            TranscriptSealedError: it was sealed by a key that this service does not have.
        """
        name = _name(tenant, response_id)
        entry = await self._calls.call("asked", lambda store: _read(store, name))
        return None if entry is None else _opened(entry, name, self._sealer)

    async def standing(self, tenant: str, response_ids: Iterable[str]) -> dict[str, Standing]:
        """Return what the store has of some responses.

        Raises:
            StoreSilentError: nobody knows.
        """
        ids = list(response_ids)
        found: list[Standing] = []
        for start in range(0, len(ids), THREADS):  # else some wait for others' deadlines
            names = [_name(tenant, one) for one in ids[start : start + THREADS]]
            found += await asyncio.gather(*map(self._standing, names))
        return dict(zip(ids, found, strict=True))

    async def keep(self, tenant: str, response_id: str, entry: ResponseEntry) -> None:
        """Note a response whose session is in the store."""
        name = _name(tenant, response_id)
        value = _encoded(entry, name, self._sealer)
        if value is None:
            log.warning("response_not_shared", session=entry.session, reason="too long")
            return
        try:
            await self._put(name, value)
        except StoreSilentError:
            self._fall_behind(name, value)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Mark a response as deleted.

        Raises:
            StoreSilentError: nobody knows whether it is.
        """
        name = _name(tenant, response_id)
        await self._calls.call("told", lambda store: store.put(name, DELETED))
        self._caught_up(name)

    async def delete_all(self, tenant: str, response_ids: Iterable[str]) -> None:
        """Mark the responses of a session that is deleted, as far as the store answers.

        What it keeps of them leads to a session that is gone.
        """
        ids = list(response_ids)
        with suppress(StoreSilentError):
            for start in range(0, len(ids), THREADS):  # as above
                some = ids[start : start + THREADS]
                await asyncio.gather(*(self.delete(tenant, one) for one in some))

    async def catch_up(self) -> None:
        """Bring to the store what it was not told.

        Raises:
            StoreSilentError: it still is silent.
        """
        for name, value in list(self._behind.items()):
            if name in self._behind:  # else it was deleted meanwhile
                await self._put(name, value)
                self._caught_up(name)

    async def _put(self, name: str, value: bytes) -> None:
        await self._calls.call("told", lambda store: _put(store, name, value))

    async def _standing(self, name: str) -> Standing:
        blob = await self._calls.call("asked", lambda store: store.find(name))
        if blob is None:
            return Standing.ABSENT
        return Standing.DELETED if blob.num_bytes == len(DELETED) else Standing.THERE

    def _fall_behind(self, name: str, value: bytes) -> None:
        self._caught_up(name)
        self._behind[name] = value
        self._behind_bytes += len(value)
        while self._behind_bytes > MAX_BEHIND_BYTES:
            self._caught_up(next(iter(self._behind)))

    def _caught_up(self, name: str) -> None:
        self._behind_bytes -= len(self._behind.pop(name, b""))


def _name(tenant: str, response_id: str) -> str:
    return f"{RESPONSES}/{stored_name(tenant)}/{stored_name(response_id)}"


def _encoded(entry: ResponseEntry, name: str, sealer: Sealer) -> bytes | None:
    """Encode an entry as `encode_response` does, sealed if there is a key."""
    if not sealer.seals:
        return encode_response(entry)
    value = encode_response(_sealed(entry, name, sealer))
    return value or encode_response(_sealed(replace(entry, items=""), name, sealer))


def _sealed(entry: ResponseEntry, name: str, sealer: Sealer) -> ResponseEntry:
    """Return an entry that shows no more than who sweeps the store has to know."""
    words = json.dumps({member: getattr(entry, member) for member in HIDDEN}).encode()
    sealed = b64encode(sealer.seal(words, _bound(entry, name))).decode()
    return replace(entry, session=SEALED, request="", info={SEALED: sealed}, items="")


def _opened(entry: ResponseEntry, name: str, sealer: Sealer) -> ResponseEntry | None:
    """Undo `_sealed`; None: it is not what was sealed there."""
    sealed = entry.info.get(SEALED)
    if sealed is None:
        return entry if sealer.takes_plain else None
    try:
        value = b64decode(sealed)
        if not is_sealed(value):
            return None
        words = json.loads(open_value(sealer, value, _bound(entry, name)))
        return replace(entry, **{member: words[member] for member in HIDDEN})
    except (SealBrokenError, ValueError, KeyError, TypeError):
        return None


def _bound(entry: ResponseEntry, name: str) -> str:
    """Return what a sealed entry shows, and where: with another it does not open."""
    return f"{name} {entry.transcript} {entry.turns} {entry.named}"


def _read(store: BlobStore, name: str) -> ResponseEntry | None:
    try:
        return decode_response(store.get(name))
    except BlobMissingError:
        return None


def _put(store: BlobStore, name: str, value: bytes) -> None:
    with suppress(BlobExistsError):  # of a request that is repeated; or it is deleted
        store.put(name, value, if_absent=True)
