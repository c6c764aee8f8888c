"""Lists the sessions of all layouts in bounded chunks, so that engines are served in between.

A listing visits each session once. Since the event loop serves other calls between two chunks, the
listing is not a snapshot of one moment: a session that is stored meanwhile may be missing.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from functools import partial

from kvd.caches.caches import Caches
from kvd.core.engine import CacheEngine
from kvd.core.inspection.listing import (
    Listing,
    ListingBuilder,
    ListingRequest,
    Listings,
    PageToken,
    parse_page_token,
)
from kvd.core.inspection.session_filter import SessionFilter, SessionOrder
from kvd.core.records.records import SessionInfo
from kvd.runtime.cache import Cache
from kvd.wire.messages import session_message
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.session_key import SessionKey

CHUNK_SESSIONS = 1_000  # visited without a break: blocks the loop for some milliseconds


async def scan_sessions(
    caches: Iterable[Cache], session_filter: SessionFilter, order: SessionOrder = SessionOrder.IDLE
) -> AsyncIterator[tuple[Cache, list[tuple[int, SessionKey]]]]:
    """Yield (cache, [(rank, session)]) of the selected sessions, chunk by chunk.

    Args:
        caches: caches to scan.
        session_filter: selects sessions.
        order: order that the ranks express.
    """
    for cache in caches:
        keys = cache.act(lambda core: core.inspection.keys())
        for start in range(0, len(keys), CHUNK_SESSIONS):
            chunk = keys[start : start + CHUNK_SESSIONS]
            yield cache, cache.act(partial(_ranked, chunk, session_filter, order))
            await asyncio.sleep(0)


class SessionLister:
    """Serves listings in pages, and keeps a listing for the requests of its next pages."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._listings = Listings()

    async def page(
        self, request: ListingRequest, page_token: str, limit: int
    ) -> kvd_pb2.ListSessionsResponse:
        """Return one page of a listing.

        A session that is used between two pages keeps its rank. It is left out if the filter does
        not select it any more.

        Args:
            request: filter and order of the listing.
            page_token: token of the last page; "": return the first page.
            limit: most sessions of the page.

        Raises:
            InvalidRequestError: the token is not of such a listing.
        """
        token = parse_page_token(page_token, request.order_name) if page_token else None
        listing = self._listings.find(token, request) if token else None
        if token is None or listing is None:
            listing = await self._list(request, token)
            listing_id, position = self._listings.open(listing), 0
        else:
            listing_id, position = token.listing_id, token.position
        response = kvd_pb2.ListSessionsResponse(total=len(listing))
        while position < len(listing) and len(response.sessions) < limit:
            end = min(len(listing), position + limit - len(response.sessions))
            response.sessions.extend(self._messages(listing, position, end))
            position = end
        if position == len(listing):
            self._listings.close(listing_id)
        else:
            response.next_page_token = str(listing.token(listing_id, position))
        return response

    async def _list(self, request: ListingRequest, token: PageToken | None) -> Listing:
        builder = ListingBuilder(request, token.last if token else None)
        caches = self._caches.of_model(request.model)
        async for cache, ranked in scan_sessions(caches, request.wanted, request.order):
            builder.add(cache.layout.fingerprint, ranked)
        # In a thread: sorting very many sessions of equal rank takes a second.
        return await asyncio.to_thread(builder.finish)

    def _messages(self, listing: Listing, start: int, end: int) -> list[kvd_pb2.SessionInfo]:
        """Encode the sessions of a range of the listing that are still stored and selected."""
        keys_of: dict[str, list[SessionKey]] = {}
        entries = list(zip(listing.layouts[start:end], listing.keys[start:end], strict=True))
        for layout, key in entries:
            keys_of.setdefault(layout, []).append(key)
        messages: dict[tuple[str, SessionKey], kvd_pb2.SessionInfo] = {}
        for cache in self._caches:
            layout = cache.layout.fingerprint
            infos, now_ns = cache.act(
                partial(_infos, keys_of.get(layout, []), listing.request.wanted)
            )
            for info in infos:
                messages[layout, info.key] = session_message(info, cache.layout, now_ns)
        return [messages[entry] for entry in entries if entry in messages]


def _ranked(
    keys: list[SessionKey],
    session_filter: SessionFilter,
    order: SessionOrder,
    core: CacheEngine,
) -> list[tuple[int, SessionKey]]:
    return core.inspection.ranked(keys, session_filter, order)


def _infos(
    keys: list[SessionKey], session_filter: SessionFilter, core: CacheEngine
) -> tuple[list[SessionInfo], int]:
    return core.inspection.infos(keys, session_filter), core.now_ns
