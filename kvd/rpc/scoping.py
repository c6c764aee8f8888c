"""What a client of some tenants may ask of the Reader and Operator services. Pure.

Who may name every tenant is not looked at here. Anybody else may call what this table names, about
its own tenants; whatever else there is, or comes to be, concerns all tenants and is refused.
"""

from typing import Any

from shared.access.identity import ANY, Identity

_READER = "/kvd.v1.Reader/"
_OPERATOR = "/kvd.v1.Operator/"
# These are about the session that they name.
_OF_A_SESSION = frozenset(
    {
        f"{_READER}DescribeSession",
        f"{_OPERATOR}ExportSession",
        f"{_OPERATOR}Pin",
        f"{_OPERATOR}Unpin",
        f"{_OPERATOR}SetTtl",
    }
)
# These keep to kvd/wire/selection.py: allowed_tenants().
_NARROWED = frozenset(
    {f"{_READER}ListSessions", f"{_READER}WatchEvents", f"{_OPERATOR}ImportSession"}
)
_FLUSH = f"{_OPERATOR}Flush"
_OURS = (_READER, _OPERATOR)


def narrow(method: str, identity: Identity, request: Any) -> None:
    """Hold a request to its caller's tenants: an unnamed one is the caller's first.

    Raises:
        TenantDeniedError: it is about others.
    """
    if ANY in identity.tenants or not method.startswith(_OURS):
        return
    if method in _OF_A_SESSION:
        request.session.tenant = identity.tenant(request.session.tenant)
    elif method == _FLUSH:
        _narrow_flush(identity, request)
    elif method not in _NARROWED:
        identity.check_all_tenants(method.rpartition("/")[2])


def _narrow_flush(identity: Identity, request: Any) -> None:
    if request.all:
        identity.check_all_tenants("Flush of all")
    elif request.HasField("session"):
        request.session.tenant = identity.tenant(request.session.tenant)
    elif request.filter.ByteSize():  # what names nothing stays so, and is refused: it is no "all"
        request.filter.tenant = identity.tenant(request.filter.tenant)
