"""The calls that a client of some tenants may make, and the tenants that engines may name."""

import os

import pytest

from kvd.config import uid_of
from kvd.core.records.errors import InvalidRequestError
from kvd.engines.data_socket import EngineUsers
from kvd.errors import AttachDeniedError
from kvd.rpc.access import restrict_to_tenants
from kvd.wire.selection import names_one_session
from shared.access.identity import Identity, TenantDeniedError
from shared.pb.kvd.v1 import kvd_pb2

ACME = Identity("acme-ops", "token", ("acme", "acme-test"), frozenset({"operator"}))
ALL = Identity("ops", "token", ("*",), frozenset({"operator"}))
# Methods that name a session, or restrict themselves to the caller's tenants.
SESSIONS = {
    "Reader": {"DescribeSession"},
    "Operator": {"Pin", "Unpin", "SetTtl", "ExportSession", "AnswerWanted"},
}
OWN_CHECK = {"Reader": {"ListSessions", "WatchEvents"}, "Operator": {"Flush", "ImportSession"}}


def methods():
    """Return every method of Reader and Operator, with an empty request."""
    for service in ("Reader", "Operator"):
        for method in kvd_pb2.DESCRIPTOR.services_by_name[service].methods:
            request = getattr(kvd_pb2, method.input_type.name)()
            yield pytest.param(service, method, request, id=f"{service}.{method.name}")


@pytest.mark.parametrize(("service", "method", "request_"), list(methods()))
def test_every_method_is_limited_to_its_callers_tenants(service, method, request_):
    """Or refused, as are all future methods that are not listed here."""
    path = f"/kvd.v1.{service}/{method.name}"
    before = request_.SerializeToString()
    restrict_to_tenants(path, ALL, request_)
    assert request_.SerializeToString() == before
    if method.name in SESSIONS[service]:
        restrict_to_tenants(path, ACME, request_)
        assert request_.session.tenant == "acme"
        request_.session.tenant = "acme-test"
        restrict_to_tenants(path, ACME, request_)
        assert request_.session.tenant == "acme-test"
        request_.session.tenant = "other"
        with pytest.raises(TenantDeniedError):
            restrict_to_tenants(path, ACME, request_)
    elif method.name in OWN_CHECK[service]:
        restrict_to_tenants(path, ACME, request_)
    else:
        with pytest.raises(TenantDeniedError, match="concerns all tenants"):
            restrict_to_tenants(path, ACME, request_)


def test_which_sessions_a_flush_may_drop():
    """A filter or a session must be of the caller's tenants; "all" and nothing are refused."""
    flush = "/kvd.v1.Operator/Flush"
    idle = kvd_pb2.FlushRequest(filter=kvd_pb2.SessionFilter(idle_s=1))
    restrict_to_tenants(flush, ACME, idle)
    assert idle.filter.tenant == "acme"
    own = kvd_pb2.FlushRequest(filter=kvd_pb2.SessionFilter(tenant="acme-test"), secure=True)
    restrict_to_tenants(flush, ACME, own)
    assert own.filter.tenant == "acme-test"
    for nothing in (
        kvd_pb2.FlushRequest(secure=True),
        kvd_pb2.FlushRequest(filter=kvd_pb2.SessionFilter()),
    ):
        restrict_to_tenants(flush, ACME, nothing)
        assert not nothing.filter.tenant
        with pytest.raises(InvalidRequestError, match="not clear"):
            names_one_session(nothing)
    for request in (
        kvd_pb2.FlushRequest(all=True),
        kvd_pb2.FlushRequest(all=True, session=kvd_pb2.SessionKey(session_id="s")),
        kvd_pb2.FlushRequest(session=kvd_pb2.SessionKey(tenant="other", session_id="s")),
        kvd_pb2.FlushRequest(filter=kvd_pb2.SessionFilter(tenant="other")),
    ):
        with pytest.raises(TenantDeniedError):
            restrict_to_tenants(flush, ACME, request)


def test_engines_and_other_services_are_not_checked_here():
    """They have their own checks: their requests are not changed."""
    request = kvd_pb2.PrepareLoadRequest(session=kvd_pb2.SessionKey(tenant="other"))
    before = request.SerializeToString()
    restrict_to_tenants("/kvd.v1.Engine/PrepareLoad", ACME, request)
    assert request.SerializeToString() == before
    with pytest.raises(TenantDeniedError):  # the same request, for a checked service
        restrict_to_tenants("/kvd.v1.Reader/DescribeSession", ACME, request)
    untouchable = object()
    restrict_to_tenants("/grpc.health.v1.Health/Watch", ACME, untouchable)
    with pytest.raises(TenantDeniedError, match="concerns all tenants"):
        restrict_to_tenants("/kvd.v1.Reader/Watch", ACME, untouchable)


def test_which_engines_may_attach():
    """Those of kvd's own user, of root, of named users, and of users with tenants."""
    users = EngineUsers((70001,), {70002: ("acme",), os.geteuid(): ("own",)})
    assert {0, 70001, 70002, os.geteuid()} == {
        uid for uid in (0, 1, 70001, 70002, 70003, os.geteuid()) if uid in users
    }
    users.check(70001, "anybody")
    users.check(70002, "acme")
    for uid, tenant in ((70002, "other"), (os.geteuid(), "other")):
        with pytest.raises(TenantDeniedError):
            users.check(uid, tenant)


def test_a_reload_applies_to_attached_engines():
    """One that may not attach any more is refused at its next call."""
    users = EngineUsers((70001,))
    users.replace((), {70002: ("acme",)})
    with pytest.raises(AttachDeniedError, match=r"access\.allowed_uids"):
        users.check(70001, "anybody")
    users.check(70002, "acme")
    with pytest.raises(TenantDeniedError):
        users.check(70002, "other")


def test_users_are_given_by_name_or_number():
    """An unknown name is an error."""
    assert uid_of("root") == uid_of("0") == 0
    with pytest.raises(ValueError, match="user 'nobody-here' does not exist"):
        uid_of("nobody-here")
