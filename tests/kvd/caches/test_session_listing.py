"""Listings of all layouts: page by page, each session once, in one order."""

import pytest

from kvd.caches.session_listing import SessionLister
from kvd.core.inspection.listing import ListingRequest
from kvd.core.inspection.session_filter import SessionFilter, SessionOrder
from kvd.core.records.errors import InvalidRequestError
from tests.kvd.caches.cache_bench import LAYOUT, caches_in, store
from tests.synthetic_engine import small_layout

ALL = ListingRequest()


async def pages_of(lister, request, limit, token=""):
    """Return the session ids of all pages from a token on."""
    pages = []
    while True:
        page = await lister.page(request, token, limit)
        pages.append([info.session.session_id for info in page.sessions])
        token = page.next_page_token
        if not token:
            return pages


async def test_pages_follow_each_other_over_all_layouts(tmp_path):
    """Every session is on one page, by its last use; each page has the total."""
    async with caches_in(tmp_path) as caches:
        lister = SessionLister(caches)
        assert await pages_of(lister, ALL, 10) == [[]]
        first, _ = await caches.open(LAYOUT)
        second, _ = await caches.open(small_layout(num_layers=3))
        for number, name in enumerate("abcde"):
            store(second if name in "bd" else first, name, number)
        assert await pages_of(lister, ALL, 2) == [["a", "b"], ["c", "d"], ["e"]]
        assert (await lister.page(ALL, "", 2)).total == 5
        backwards = ListingRequest(is_reversed=True)
        assert await pages_of(lister, backwards, 10) == [["e", "d", "c", "b", "a"]]


async def test_sessions_are_filtered_before_they_are_counted(tmp_path):
    """By filter and model; the total is that of the selected ones."""
    async with caches_in(tmp_path) as caches:
        cache, _ = await caches.open(LAYOUT)
        for number, name in enumerate(("chat-1", "chat-2", "job-1")):
            store(cache, name, number)
        lister = SessionLister(caches)
        chats = ListingRequest(SessionFilter(id_prefix="chat-"))
        assert await pages_of(lister, chats, 10) == [["chat-1", "chat-2"]]
        assert (await lister.page(chats, "", 1)).total == 2
        assert await pages_of(lister, ListingRequest(model="nobody"), 10) == [[]]


async def test_a_session_dropped_between_two_pages_is_not_listed(tmp_path):
    """The page is filled with those behind it, up to its size."""
    async with caches_in(tmp_path) as caches:
        cache, _ = await caches.open(LAYOUT)
        keys = [store(cache, name, number) for number, name in enumerate("abcdef")]
        lister = SessionLister(caches)
        page = await lister.page(ALL, "", 1)
        cache.act(lambda core: core.sessions.flush(keys[1], dry_run=False))
        assert await pages_of(lister, ALL, 2, page.next_page_token) == [["c", "d"], ["e", "f"]]


async def test_a_listing_continues_behind_its_last_session_after_a_restart(tmp_path):
    """Another lister has never seen the token."""
    async with caches_in(tmp_path) as caches:
        cache, _ = await caches.open(LAYOUT)
        for number, name in enumerate("abcd"):
            store(cache, name, number)
        page = await SessionLister(caches).page(ALL, "", 2)
        rest = await pages_of(SessionLister(caches), ALL, 10, page.next_page_token)
        assert rest == [["c", "d"]]


@pytest.mark.parametrize("token", ["x", "1/2/3", "1/0/bytes/5/layout/a/m/s"])
async def test_a_token_belongs_to_its_listing(tmp_path, token):
    """An impossible token, or one of another order, is refused."""
    async with caches_in(tmp_path) as caches:
        by_idle = ListingRequest(order=SessionOrder.IDLE)
        with pytest.raises(InvalidRequestError, match="start with the first page"):
            await SessionLister(caches).page(by_idle, token, 10)
