"""Stored responses in the object store that services share.

    v1/responses/TENANT/RESPONSE    an entry, or a mark of deletion (response_entry.py)

With a key an entry shows only where its session's transcript is, and how many turns that has;
everything else in it is sealed.

A client that has the id of a response can continue from it at any server. An entry is in the store
before its client gets the end of the answer, unless the store is silent: then it is put there
later, if this service is not killed before. An entry that was deleted never comes back: entries are
written only where there is none, and the mark stays.
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
from shared.blobs.blob_store import BlobExistsError, BlobMissingError, BlobStore
from shared.blobs.release import RESPONSES, stored_name
from shared.blobs.response_entry import (
    DELETED,
    ResponseEntry,
    decode_response,
    encode_response,
)
from shared.encryption.sealer import PLAIN, SealBrokenError, Sealer, is_sealed
from shared.process.log import get_logger

SEALED = "sealed"  # stands in place of sealed members
HIDDEN = ("session", "request", "info", "items")  # members that are sealed
MAX_BEHIND_BYTES = 16 << 20  # of entries that wait for a silent store; the oldest are given up

log = get_logger(__name__)


class Standing(Enum):
    """What the store has of a response."""

    THERE = "an entry"
    DELETED = "a mark"
    ABSENT = "nothing: it was never told, or what it had is swept"


class SharedResponses:
    """Reads and writes stored responses. Methods are called on the event loop.

    Args:
        calls: the calls to the store.
        sealer: seals and opens values there.
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
        """Return the entry of a tenant's response; None: it was deleted, or there is none.

        Raises:
            StoreSilentError: it is not known.
            TranscriptSealedError: it was sealed by a key that this service does not have.
        """
        name = _name(tenant, response_id)
        entry = await self._calls.call("asked", lambda store: _read(store, name))
        return None if entry is None else _open_entry(entry, name, self._sealer)

    async def standing(self, tenant: str, response_ids: Iterable[str]) -> dict[str, Standing]:
        """Return what the store has of some responses, by id.

        Raises:
            StoreSilentError: it is not known.
        """
        ids = list(response_ids)
        found: list[Standing] = []
        # As many at once as there are threads: further calls would wait for one until the deadline.
        for start in range(0, len(ids), THREADS):
            names = [_name(tenant, response_id) for response_id in ids[start : start + THREADS]]
            found += await asyncio.gather(*map(self._standing, names))
        return dict(zip(ids, found, strict=True))

    async def keep(self, tenant: str, response_id: str, entry: ResponseEntry) -> None:
        """Put the entry of a response into the store, which has its session."""
        name = _name(tenant, response_id)
        value = _encode(entry, name, self._sealer)
        if value is None:
            log.warning("response_not_shared", session=entry.session, reason="too long")
            return
        try:
            await self._put(name, value)
        except StoreSilentError:
            self._add_behind(name, value)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Mark a response as deleted.

        Raises:
            StoreSilentError: it is not known whether it is.
        """
        name = _name(tenant, response_id)
        await self._calls.call("told", lambda store: store.put(name, DELETED))
        self._remove_behind(name)

    async def delete_all(self, tenant: str, response_ids: Iterable[str]) -> None:
        """Mark the responses of a deleted session, until the store is silent.

        Entries that remain do no harm: they lead to a session that is gone.
        """
        ids = list(response_ids)
        with suppress(StoreSilentError):
            for start in range(0, len(ids), THREADS):  # as in `standing`
                some = ids[start : start + THREADS]
                await asyncio.gather(*(self.delete(tenant, response_id) for response_id in some))

    async def catch_up(self) -> None:
        """Put the entries that are behind into the store.

        Raises:
            StoreSilentError: it is still silent.
        """
        for name, value in list(self._behind.items()):
            if name in self._behind:  # it may have been deleted meanwhile
                await self._put(name, value)
                self._remove_behind(name)

    async def _put(self, name: str, value: bytes) -> None:
        await self._calls.call("told", lambda store: _put(store, name, value))

    async def _standing(self, name: str) -> Standing:
        """Return what the store has under a name, by its size alone."""
        blob = await self._calls.call("asked", lambda store: store.find(name))
        if blob is None:
            return Standing.ABSENT
        return Standing.DELETED if blob.num_bytes == len(DELETED) else Standing.THERE

    def _add_behind(self, name: str, value: bytes) -> None:
        """Keep an entry for `catch_up`; the oldest are given up for it."""
        self._remove_behind(name)
        self._behind[name] = value
        self._behind_bytes += len(value)
        while self._behind_bytes > MAX_BEHIND_BYTES:
            self._remove_behind(next(iter(self._behind)))

    def _remove_behind(self, name: str) -> None:
        self._behind_bytes -= len(self._behind.pop(name, b""))


def _name(tenant: str, response_id: str) -> str:
    return f"{RESPONSES}/{stored_name(tenant)}/{stored_name(response_id)}"


def _encode(entry: ResponseEntry, name: str, sealer: Sealer) -> bytes | None:
    """Encode an entry, sealed if there is a key; None: it is too long, even without its items."""
    if not sealer.seals:
        return encode_response(entry)
    value = encode_response(_seal_entry(entry, name, sealer))
    return value or encode_response(_seal_entry(replace(entry, items=""), name, sealer))


def _seal_entry(entry: ResponseEntry, name: str, sealer: Sealer) -> ResponseEntry:
    """Return an entry that shows only what the sweeper of the store has to know."""
    hidden = json.dumps({member: getattr(entry, member) for member in HIDDEN}).encode()
    sealed = b64encode(sealer.seal(hidden, _bound(entry, name))).decode()
    return replace(entry, session=SEALED, request="", info={SEALED: sealed}, items="")


def _open_entry(entry: ResponseEntry, name: str, sealer: Sealer) -> ResponseEntry | None:
    """Open a sealed entry; None: it was changed, or sealed for another place."""
    sealed = entry.info.get(SEALED)
    if sealed is None:
        return entry if sealer.takes_plain else None
    try:
        value = b64decode(sealed)
        if not is_sealed(value):
            return None
        hidden = json.loads(open_value(sealer, value, _bound(entry, name)))
        return replace(entry, **{member: hidden[member] for member in HIDDEN})
    except (SealBrokenError, ValueError, KeyError, TypeError):
        return None


def _bound(entry: ResponseEntry, name: str) -> str:
    """Return the visible members of a sealed entry and its name, to which the seal is bound."""
    return f"{name} {entry.transcript} {entry.turns} {entry.named}"


def _read(store: BlobStore, name: str) -> ResponseEntry | None:
    try:
        return decode_response(store.get(name))
    except BlobMissingError:
        return None


def _put(store: BlobStore, name: str, value: bytes) -> None:
    with suppress(BlobExistsError):  # the request was repeated, or the response was deleted
        store.put(name, value, if_absent=True)
