"""Who may come in, as the settings in force say, and the guards made from them.

One object that a reload tells of new settings; every guard that it has made goes by them then.
"""

from collections.abc import Mapping

from kvd.config import Settings, check_access
from kvd.host.engine_users import EngineUsers
from kvd.rpc.scoping import narrow
from shared.access.clients import ClientBook, Clients, StreamCounts
from shared.access.identity import ANY, Identity, socket_identity
from shared.serving.interceptor import AccessInterceptor
from shared.serving.rpc_observer import RpcMetrics

ROLES: Mapping[str, str] = {
    "kvd.v1.Engine": "engine",
    "kvd.v1.Operator": "operator",
    "kvd.v1.Reader": "reader",
}


class Access:
    """See the module docstring.

    Attributes:
        users: whose engines may attach.
        book: clients that come with a token or a certificate.

    Args:
        settings: of the start.
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
        """What stands before the services of one address.

        Args:
            socket_role: of whoever may open that Unix socket; "" for TCP.
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
