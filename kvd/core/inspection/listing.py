"""Listings: pages of the sessions of all layouts, in their order at the time of the first page.

Pure. The first page sorts all sessions; further pages take those that follow. A listing is kept
until its last page is served, or newer listings replace it. Then a page token still says after
which session to continue, and the sessions are sorted again.

    page token = listing / position / order / rank / layout / tenant / model / session id
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.core.inspection.session_filter import EVERYTHING, SessionFilter, SessionOrder
from kvd.core.records.errors import InvalidRequestError
from shared.types.session_key import SessionKey

MAX_LISTINGS = 8  # kept at a time; each takes 24 bytes per session
_MOST_DIGITS = 20
_REVERSED = "-"


class Place(NamedTuple):
    """A session's place in a listing: lower ranks first, equal ones by their keys.

    Attributes:
        rank: rank in the listing's order.
        key: the session.
        layout: fingerprint of its layout.
    """

    rank: int
    key: SessionKey
    layout: str


@dataclass(frozen=True, slots=True)
class ListingRequest:
    """The sessions to list and their order; the same for all pages of a listing.

    Attributes:
        wanted: the sessions to list.
        model: only models whose fingerprint starts with this.
        order: the order.
        is_reversed: whether the order is reversed.
    """

    wanted: SessionFilter = EVERYTHING
    model: str = ""
    order: SessionOrder = SessionOrder.IDLE
    is_reversed: bool = False

    @property
    def order_name(self) -> str:
        """Name of the order in page tokens."""
        return self.order.value + (_REVERSED if self.is_reversed else "")


@dataclass(frozen=True, slots=True)
class PageToken:
    """The end of a page, from which the next page continues.

    Attributes:
        listing_id: id of the listing.
        position: index of the next session in it.
        order_name: name of its order.
        last: place of the page's last session, to continue if the listing is gone.
    """

    listing_id: int
    position: int
    order_name: str
    last: Place

    def __str__(self) -> str:
        rank, key, layout = self.last
        return "/".join(
            map(str, (self.listing_id, self.position, self.order_name, rank, layout, *key))
        )


def parse_page_token(text: str, order_name: str) -> PageToken:
    """Parse a page token of a listing in this order.

    Raises:
        InvalidRequestError: it is not such a token.
    """
    parts = text.split("/")
    if len(parts) == 5 + len(SessionKey._fields):
        listing_id, position, order, rank, layout, *key = parts
        is_good = _is_number(listing_id) and _is_number(position)
        if is_good and _is_number(rank.removeprefix("-")) and order == order_name:
            place = Place(int(rank), SessionKey(*key), layout)
            return PageToken(int(listing_id), int(position), order, place)
    raise InvalidRequestError(
        f"page token {text[:40]!r} is not one of this listing's", "start with the first page"
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS


@dataclass(frozen=True, slots=True)
class Listing:
    """Sorted sessions, with their ranks at the time of the first page."""

    request: ListingRequest
    ranks: NDArray[np.int64]
    keys: list[SessionKey]
    layouts: list[str]

    def __len__(self) -> int:
        return len(self.keys)

    def token(self, listing_id: int, position: int) -> PageToken:
        """Return the token of a page that begins at a position (at least 1)."""
        before = position - 1
        last = Place(int(self.ranks[before]), self.keys[before], self.layouts[before])
        return PageToken(listing_id, position, self.request.order_name, last)


@dataclass(slots=True, eq=False)
class ListingBuilder:
    """Collects the sessions of a listing, layout by layout and in steps.

    Attributes:
        request: what to list.
        after: leave out sessions up to this place; None: take all.
    """

    request: ListingRequest
    after: Place | None = None
    _ranks: list[int] = field(default_factory=list)
    _keys: list[SessionKey] = field(default_factory=list)
    _layouts: list[str] = field(default_factory=list)

    def add(self, layout: str, ranked: Iterable[tuple[int, SessionKey]]) -> None:
        """Add some sessions of a layout, with their ranks."""
        is_reversed = self.request.is_reversed
        places = [(-rank if is_reversed else rank, key) for rank, key in ranked]
        if self.after is not None:
            places = [place for place in places if (*place, layout) > self.after]
        self._ranks.extend(rank for rank, _ in places)
        self._keys.extend(key for _, key in places)
        self._layouts.extend([layout] * len(places))

    def finish(self) -> Listing:
        """Sort the sessions; O(n log n), most of it inside numpy."""
        ranks = np.array(self._ranks, np.int64)
        order = np.argsort(ranks, kind="stable")
        ranks = ranks[order]
        indexes = order.tolist()
        _, starts, lengths = np.unique(ranks, return_index=True, return_counts=True)
        ties = lengths > 1
        for start, length in zip(starts[ties].tolist(), lengths[ties].tolist(), strict=True):
            indexes[start : start + length] = sorted(indexes[start : start + length], key=self._key)
        keys, layouts = self._keys, self._layouts
        return Listing(
            self.request, ranks, [keys[i] for i in indexes], [layouts[i] for i in indexes]
        )

    def _key(self, index: int) -> tuple[SessionKey, str]:
        return self._keys[index], self._layouts[index]


class Listings:
    """The latest listings, at most MAX_LISTINGS."""

    def __init__(self) -> None:
        self._listings: OrderedDict[int, Listing] = OrderedDict()
        self._next_id = 1

    def open(self, listing: Listing) -> int:
        """Keep a new listing; returns its id."""
        if len(self._listings) == MAX_LISTINGS:
            self._listings.popitem(last=False)
        self._next_id += 1
        self._listings[self._next_id - 1] = listing
        return self._next_id - 1

    def close(self, listing_id: int) -> None:
        """Forget a listing."""
        self._listings.pop(listing_id, None)

    def find(self, token: PageToken, request: ListingRequest) -> Listing | None:
        """Return the listing of a token; None if it is gone, or of another request."""
        listing = self._listings.get(token.listing_id)
        if listing is None or listing.request != request:
            return None
        if not 0 < token.position <= len(listing):
            return None
        return listing if listing.token(token.listing_id, token.position) == token else None
