"""Listings: the order of all sessions as it was when a listing's first page was asked for.

Pure. The first page sorts once, O(n log n); the others only take the keys that follow. A listing is
kept until its last page is served, or until newer ones take its place; then a page token still says
after which session to go on, and the sessions are sorted anew.

    page token = listing / position / last access / tenant / model / session id
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.core.errors import InvalidRequestError
from kvd.core.session import Session
from shared.session_key import SessionKey

MAX_LISTINGS = 4  # at once; each takes 16 bytes a session
_NUM_NUMBERS = 3
_LAST_ACCESS, _KEY = attrgetter("last_access_ns"), attrgetter("key")


class Rank(NamedTuple):
    """A session's place among all: least recently used first."""

    last_access_ns: int
    key: SessionKey


@dataclass(frozen=True, slots=True)
class PageToken:
    """Where a page ended."""

    listing_id: int
    position: int  # of the next session in that listing
    last: Rank

    def __str__(self) -> str:
        numbers = (self.listing_id, self.position, self.last.last_access_ns)
        return "/".join((*map(str, numbers), *self.last.key))


def parse_page_token(text: str) -> PageToken:
    """Read a page token.

    Raises:
        InvalidRequestError: it is none.
    """
    parts = text.split("/")
    numbers = parts[:_NUM_NUMBERS]
    is_good = len(parts) == _NUM_NUMBERS + len(SessionKey._fields) and all(
        part.isascii() and part.isdigit() and len(part) < 20 for part in numbers
    )
    if not is_good:
        raise InvalidRequestError(
            f"page token {text[:40]!r} is not one of ours", "start from the first page"
        )
    listing_id, position, last_access_ns = map(int, numbers)
    rank = Rank(last_access_ns, SessionKey(*parts[_NUM_NUMBERS:]))
    return PageToken(listing_id, position, rank)


@dataclass(frozen=True, slots=True)
class Listing:
    """Sessions in order, with their last access as of then."""

    keys: list[SessionKey]
    last_access_ns: NDArray[np.int64]

    def token(self, listing_id: int, position: int) -> PageToken:
        """Name the place before a position."""
        rank = Rank(int(self.last_access_ns[position - 1]), self.keys[position - 1])
        return PageToken(listing_id, position, rank)


class Listings:
    """The last few listings."""

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

    def find(self, token: PageToken) -> Listing | None:
        """Find the listing that a token belongs to; None if it is gone (or an earlier kvd's)."""
        listing = self._listings.get(token.listing_id)
        if listing is None or not 0 < token.position <= len(listing.keys):
            return None
        return listing if listing.token(token.listing_id, token.position) == token else None


def list_in_order(sessions: Iterable[Session], after: Rank | None) -> Listing:
    """List the sessions that rank after a given one."""
    listed = list(sessions)
    if after is not None:
        listed = [s for s in listed if Rank(s.last_access_ns, s.key) > after]
    last_access = np.fromiter(map(_LAST_ACCESS, listed), np.int64, len(listed))
    order = np.argsort(last_access, kind="stable")
    all_keys = list(map(_KEY, listed))
    keys = [all_keys[index] for index in order.tolist()]
    last_access = last_access[order]
    starts = np.flatnonzero(np.diff(last_access, prepend=-1))
    lengths = np.diff(starts, append=len(keys))
    ties = lengths > 1
    for start, length in zip(starts[ties].tolist(), lengths[ties].tolist(), strict=True):
        keys[start : start + length] = sorted(keys[start : start + length])
    return Listing(keys, last_access)
