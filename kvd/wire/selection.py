"""Decodes the filters and orders of requests, restricted to what the caller may see."""

from collections.abc import Mapping

from google.protobuf.unknown_fields import UnknownFieldSet

from kvd.core.inspection.listing import ListingRequest
from kvd.core.inspection.session_filter import EVERYTHING, SessionFilter, SessionOrder
from kvd.core.records.errors import InvalidRequestError, UnknownSessionError
from kvd.core.records.tier import Tier
from kvd.wire.events import EventFilter
from kvd.wire.messages import ns_of
from shared.access.identity import TenantDeniedError, current_identity
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.serving.message_fields import MessageFields
from shared.types.session_key import SessionKey

# Every condition must be decoded: without one, a flush would drop more sessions than selected.
_FILTER = MessageFields(
    SessionFilter,
    pb.SessionFilter,
    left_out=("tenants", "idle_ns"),
    given=("tenant", "model", "tier", "idle_s"),
)
_TIERS: Mapping[int, Tier | None] = {
    pb.TIER_UNSPECIFIED: None,
    pb.TIER_DRAM: Tier.DRAM,
    pb.TIER_SSD: Tier.SSD,
}
_ORDERS: Mapping[int, SessionOrder] = {
    pb.SESSION_ORDER_UNSPECIFIED: SessionOrder.IDLE,
    pb.SESSION_ORDER_IDLE: SessionOrder.IDLE,
    pb.SESSION_ORDER_BYTES: SessionOrder.BYTES,
    pb.SESSION_ORDER_TOKENS: SessionOrder.TOKENS,
    pb.SESSION_ORDER_TTL: SessionOrder.TTL,
}


def allowed_tenants() -> frozenset[str] | None:
    """Return the tenants whose sessions the caller may see and change; None: all tenants."""
    return current_identity().allowed_tenants


def filter_of(message: pb.SessionFilter, allowed: frozenset[str] | None) -> SessionFilter:
    """Decode a filter, without its model, and restrict it to what the caller may see.

    Args:
        message: the filter.
        allowed: tenants that the caller may see; None: all.

    Raises:
        InvalidRequestError: the tier or the idle time is not valid, or there is a condition of a
            later release, without which the filter would select more sessions.
    """
    if len(UnknownFieldSet(message)):
        raise InvalidRequestError(
            "the request has a condition that this kvd does not know",
            "use the kvd command of the same release as kvd",
        )
    if message.tier not in _TIERS:
        raise InvalidRequestError("there is no such tier", "send dram or ssd")
    if message.idle_s < 0:
        raise InvalidRequestError(
            f"an idle time of {message.idle_s} s is not valid", "send a number that is not negative"
        )
    session_filter = _FILTER.decode(
        message,
        tenants=frozenset((message.tenant,)) if message.tenant else None,
        tier=_TIERS[message.tier],
        idle_ns=ns_of(message.idle_s),
    )
    return session_filter.within(allowed)


def listing_of(request: pb.ListSessionsRequest, allowed: frozenset[str] | None) -> ListingRequest:
    """Decode a request for a list of sessions, restricted to what the caller may see.

    Raises:
        InvalidRequestError: the filter or the order is not valid.
    """
    if request.order not in _ORDERS:
        raise InvalidRequestError(
            "there is no such order", "send idle, bytes, tokens or ttl, or none"
        )
    return ListingRequest(
        filter_of(request.filter, allowed),
        request.filter.model,
        _ORDERS[request.order],
        request.reverse,
    )


def check_allowed(key: SessionKey, allowed: frozenset[str] | None) -> None:
    """Check that a caller may see a session; others do not exist for it.

    Raises:
        UnknownSessionError: the caller may not see the session. The message is that of a session
            that is not stored.
    """
    if allowed is not None and key.tenant not in allowed:
        raise UnknownSessionError(
            f"no session {key.session_id!r} of tenant {key.tenant!r} is stored",
            "list what is stored with: kvd ls",
        )


def names_one_session(request: pb.FlushRequest) -> bool:
    """Whether a flush is about one session; else it is about a filter's sessions, or all.

    Raises:
        InvalidRequestError: the request does not name exactly one of the three.
    """
    # Compared after decoding: an idle time of -0 is no condition.
    session_filter = filter_of(request.filter, None)
    has_filter = bool(request.filter.model) or session_filter != EVERYTHING
    if [request.HasField("session"), request.all, has_filter].count(True) != 1:
        raise InvalidRequestError(
            "it is not clear what to flush", "send one session, or a filter, or all"
        )
    return request.HasField("session")


def tenant_to_erase(request: pb.FlushRequest, allowed: frozenset[str] | None) -> str | None:
    """Return the tenant that a secure flush erases; None: all tenants.

    Raises:
        InvalidRequestError: the request names less than a whole tenant.
        TenantDeniedError: the caller may not erase the tenant, or all of them.
    """
    tenant = request.filter.tenant
    is_one_tenant = bool(tenant) and request.filter == pb.SessionFilter(tenant=tenant)
    if not (request.all or is_one_tenant):
        raise InvalidRequestError(
            "a key belongs to a whole tenant, so only all of a tenant can be erased",
            "send a tenant and nothing else, or all; or flush without --secure",
        )
    if allowed is not None and (request.all or tenant not in allowed):
        raise TenantDeniedError(
            "the caller may not erase everything that is selected", "select one of its own tenants"
        )
    return None if request.all else tenant


def event_filter_of(request: pb.WatchEventsRequest, allowed: frozenset[str] | None) -> EventFilter:
    """Decode a filter of events, restricted to what the caller may see."""
    tenants = frozenset((request.tenant,)) if request.tenant else None
    if allowed is not None:
        tenants = allowed if tenants is None else tenants & allowed
    return EventFilter(tenants, request.session_id, frozenset(request.names))
