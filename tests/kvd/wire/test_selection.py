"""Filters of callers, and the tenants that these may see."""

import pytest

from kvd.core.inspection.session_filter import SessionFilter, SessionOrder
from kvd.core.records.errors import InvalidRequestError, UnknownSessionError
from kvd.core.records.tier import Tier
from kvd.wire.selection import (
    check_allowed,
    event_filter_of,
    filter_of,
    listing_of,
    names_one_session,
)
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.session_key import SessionKey

MINE = frozenset({"mine"})
SESSION = kvd_pb2.SessionKey(session_id="a")
OF_A_LATER_RELEASE = b"\x0a\x04mine\x78\x01"  # a tenant, and field 15, which does not exist yet


def test_a_filter_is_decoded():
    """Every condition has its field; an empty one matches everything."""
    message = kvd_pb2.SessionFilter(
        tenant="mine",
        tier=kvd_pb2.TIER_SSD,
        idle_s=1.5,
        larger_than_bytes=7,
        pinned=True,
        ended=True,
        id_prefix="a",
    )
    assert filter_of(message, None) == SessionFilter(
        MINE, Tier.SSD, 1_500_000_000, 7, pinned=True, ended=True, id_prefix="a"
    )
    assert filter_of(kvd_pb2.SessionFilter(), None) == SessionFilter()
    assert filter_of(kvd_pb2.SessionFilter(), MINE).tenants == MINE
    assert filter_of(kvd_pb2.SessionFilter(tenant="other"), MINE).tenants == frozenset()


@pytest.mark.parametrize(
    "message",
    [
        kvd_pb2.SessionFilter(tier=kvd_pb2.TIER_HBM),
        kvd_pb2.SessionFilter(idle_s=-1.0),
        kvd_pb2.SessionFilter(idle_s=float("nan")),
        kvd_pb2.SessionFilter(idle_s=1e300),
        kvd_pb2.SessionFilter.FromString(OF_A_LATER_RELEASE),
    ],
    ids=["tier", "negative", "nan", "too-long", "unknown"],
)
def test_an_invalid_filter_is_refused(message):
    """With a remedy, and before any session is read."""
    with pytest.raises(InvalidRequestError):
        filter_of(message, None)


def test_a_listing_has_a_known_order():
    """The default is the longest unused first; an order of a later version is refused."""
    request = kvd_pb2.ListSessionsRequest(filter=kvd_pb2.SessionFilter(model="5e"), reverse=True)
    listing = listing_of(request, MINE)
    assert (listing.order, listing.model, listing.is_reversed) == (SessionOrder.IDLE, "5e", True)
    assert listing.wanted.tenants == MINE
    with pytest.raises(InvalidRequestError, match="order"):
        listing_of(kvd_pb2.ListSessionsRequest(order=99), None)


def test_a_flush_has_exactly_one_selection():
    """One session, or conditions, or all; no condition is none of these."""
    by_model = kvd_pb2.FlushRequest(filter=kvd_pb2.SessionFilter(model="5e"))
    assert names_one_session(kvd_pb2.FlushRequest(session=SESSION))
    assert not names_one_session(kvd_pb2.FlushRequest(all=True))
    assert not names_one_session(by_model)
    for request in (
        kvd_pb2.FlushRequest(),
        kvd_pb2.FlushRequest(filter=kvd_pb2.SessionFilter()),
        kvd_pb2.FlushRequest(filter=kvd_pb2.SessionFilter(idle_s=-0.0)),
        kvd_pb2.FlushRequest(session=SESSION, all=True),
        kvd_pb2.FlushRequest(session=SESSION, filter=by_model.filter),
        kvd_pb2.FlushRequest(all=True, filter=by_model.filter),
    ):
        with pytest.raises(InvalidRequestError, match="not clear"):
            names_one_session(request)


def test_sessions_of_other_tenants_look_unknown():
    """The answer is the same as for a session that does not exist."""
    check_allowed(SessionKey("mine", "", "a"), MINE)
    check_allowed(SessionKey("other", "", "a"), None)
    with pytest.raises(UnknownSessionError, match="is stored"):
        check_allowed(SessionKey("other", "", "a"), MINE)


def test_events_of_others_are_not_sent():
    """A caller may name one of its tenants; of others, and of none, it receives nothing."""
    about = {
        name: kvd_pb2.Event(name=name, session=kvd_pb2.SessionKey(tenant=name, session_id="a"))
        for name in ("mine", "other")
    }
    about["none"] = kvd_pb2.Event(name="restored")

    def received(request, allowed):
        wanted = event_filter_of(request, allowed)
        return [name for name, event in about.items() if wanted.selects(event)]

    assert received(kvd_pb2.WatchEventsRequest(), None) == ["mine", "other", "none"]
    assert received(kvd_pb2.WatchEventsRequest(), MINE) == ["mine"]
    assert received(kvd_pb2.WatchEventsRequest(tenant="other"), MINE) == []
    assert received(kvd_pb2.WatchEventsRequest(session_id="a"), None) == ["mine", "other"]
