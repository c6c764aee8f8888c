"""Who may come in, as the settings in force say, and what each caller may ask for.

A reload hands new settings to `Access`; every guard that it has made goes by them from then on.
Who may name every tenant may call everything that its role has. Anybody else may call what the
tables here name, about its own tenants; whatever else there is, or comes to be, concerns all
tenants and is refused.
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
# These are about the session that they name.
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
# These keep to kvd/wire/selection.py: allowed_tenants().
_NARROWED = frozenset(
    {f"{_READER}ListSessions", f"{_READER}WatchEvents", f"{_OPERATOR}ImportSession"}
)
_FLUSH = f"{_OPERATOR}Flush"
_OURS = (_READER, _OPERATOR)


class Access:
    """What guards every address; see the module docstring.

    Attributes:
        users: users whose engines may attach.
        book: clients that come with a token or a certificate.

    Args:
        settings: kvd's settings, as of its start.
        metrics: where refusals are counted.

    Raises:
        UnguardedError: anybody could connect to access.tcp.
    """

    def __init__(self, settings: Settings, metrics: RpcMetrics | None = None) -> None:
        check_access(settings)
        self._metrics = metrics or RpcMetrics()
        self.users = EngineUsers(settings.engine_uids(), settings.engine_tenants())
        self.book = ClientBook(Clients(settings.clients))
        self._streams = StreamCounts(settings.limits.max_streams_per_client)

    def replace(self, settings: Settings) -> None:
        """Go by other settings from now on."""
        self.users.replace(settings.engine_uids(), settings.engine_tenants())
        self.book.use(Clients(settings.clients))
        self._streams.most = settings.limits.max_streams_per_client

    def guard(self, socket_role: str) -> AccessInterceptor:
        """Return what stands before the services of one address.

        Args:
            socket_role: the role of those who may open that Unix socket; "" for TCP.
        """
        own: Identity | None = None
        if socket_role:
            own = socket_identity(f"{socket_role}.sock", (ANY,), (socket_role,))
        return AccessInterceptor(
            self.book,
            ROLES,
            own,
            streams=self._streams,
            check=narrow,
            leaves_reading=socket_role == "engine",
            metrics=self._metrics,
        )


def narrow(method: str, identity: Identity, request: Any) -> None:
    """Hold a request to its caller's tenants: an unnamed one is the caller's first.

    Args:
        method: full name of the RPC.
        identity: identity of the caller.
        request: message of the call; tenants are put into it.

    Raises:
        TenantDeniedError: the request is about other tenants.
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
