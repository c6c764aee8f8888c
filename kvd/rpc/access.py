"""Access control: which callers are admitted, and which RPCs they may call about which tenants.

A reload passes new settings to `Access`, and every guard that it has created applies them from then
on. A caller that may name every tenant may call all RPCs of its role. Any other caller may call the
RPCs in the tables below, for its own tenants. All other RPCs, future ones included, concern all
tenants and are refused.
"""

from collections.abc import Mapping
from typing import Any

from kvd.config import Settings, check_access
from kvd.engines.data_socket import EngineUsers
from shared.access.clients import ClientBook, Clients, StreamCounts
from shared.access.identity import ANY, Identity, socket_identity
from shared.serving.interceptor import AccessInterceptor
from shared.serving.rpc_observer import RpcMetrics

ROLES: Mapping[str, str] = {
    "kvd.v1.Engine": "engine",
    "kvd.v1.Operator": "operator",
    "kvd.v1.Reader": "reader",
}

_READER = "/kvd.v1.Reader/"
_OPERATOR = "/kvd.v1.Operator/"
# RPCs about the session that they name.
_OF_A_SESSION = frozenset(
    {
        f"{_READER}DescribeSession",
        f"{_OPERATOR}ExportSession",
        f"{_OPERATOR}Pin",
        f"{_OPERATOR}Unpin",
        f"{_OPERATOR}SetTtl",
        f"{_OPERATOR}AnswerWanted",
    }
)
# RPCs that restrict themselves to allowed_tenants() of kvd/wire/selection.py.
_FILTERED = frozenset(
    {f"{_READER}ListSessions", f"{_READER}WatchEvents", f"{_OPERATOR}ImportSession"}
)
_FLUSH = f"{_OPERATOR}Flush"
_SERVICES = (_READER, _OPERATOR)


class Access:
    """The access rules of all addresses, as the settings in force define them.

    Attributes:
        users: users whose engines may attach.
        book: clients that authenticate with a token or a certificate.

    Args:
        settings: kvd's settings at its start.
        metrics: counts refusals.

    Raises:
        UnguardedError: any client could connect to access.tcp.
    """

    def __init__(self, settings: Settings, metrics: RpcMetrics | None = None) -> None:
        check_access(settings)
        self._metrics = metrics or RpcMetrics()
        self.users = EngineUsers(settings.engine_uids(), settings.engine_tenants())
        self.book = ClientBook(Clients(settings.clients))
        self._streams = StreamCounts(settings.limits.max_streams_per_client)

    def replace(self, settings: Settings) -> None:
        """Apply other settings from now on."""
        self.users.replace(settings.engine_uids(), settings.engine_tenants())
        self.book.use(Clients(settings.clients))
        self._streams.most = settings.limits.max_streams_per_client

    def guard(self, socket_role: str) -> AccessInterceptor:
        """Return the interceptor that guards the services of one address.

        Args:
            socket_role: role of every caller that can open the Unix socket; "" for TCP.
        """
        own: Identity | None = None
        if socket_role:
            own = socket_identity(f"{socket_role}.sock", (ANY,), (socket_role,))
        return AccessInterceptor(
            self.book,
            ROLES,
            own,
            streams=self._streams,
            check=restrict_to_tenants,
            leaves_reading=socket_role == "engine",
            metrics=self._metrics,
        )


def restrict_to_tenants(method: str, identity: Identity, request: Any) -> None:
    """Restrict a request to its caller's tenants; a missing tenant becomes the caller's first.

    Args:
        method: full name of the RPC.
        identity: identity of the caller.
        request: message of the call; missing tenants are filled in.

    Raises:
        TenantDeniedError: the request is about other tenants.
    """
    if ANY in identity.tenants or not method.startswith(_SERVICES):
        return
    if method in _OF_A_SESSION:
        request.session.tenant = identity.tenant(request.session.tenant)
    elif method == _FLUSH:
        _restrict_flush(identity, request)
    elif method not in _FILTERED:
        identity.check_all_tenants(method.rpartition("/")[2])


def _restrict_flush(identity: Identity, request: Any) -> None:
    if request.all:
        identity.check_all_tenants("Flush of all")
    elif request.HasField("session"):
        request.session.tenant = identity.tenant(request.session.tenant)
    elif request.filter.ByteSize():  # an empty filter stays empty, and is refused later
        request.filter.tenant = identity.tenant(request.filter.tenant)
