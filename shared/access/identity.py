"""An identity: who a caller is, and what that allows.

It comes from a Unix socket (whoever may open it), a token or a certificate, never from what a
request says of itself: a request names a tenant, and the identity says whether it may. The
interceptor of gRPC, or the middleware of HTTP, sets the identity of the running call.
"""

from collections.abc import Collection, Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from shared.types.errors import DeniedError
from shared.types.session_key import DEFAULT_TENANT, SessionKey, session_key

ANY = "*"  # among an identity's tenants: all there are
_INCLUDED = {"reader": "operator"}  # role -> the one that includes it


class TenantDeniedError(DeniedError):
    """The caller named a tenant that is not its own."""

    reason = "tenant_denied"


class RoleDeniedError(DeniedError):
    """The caller is known, and may not do this."""

    reason = "role_denied"


@dataclass(frozen=True)
class Identity:
    """One caller, and what it may do.

    Attributes:
        name: name of the client or of the socket, for logs, metrics and limits.
        via: "unix", "loopback", "token" or "certificate".
        tenants: tenants that it may name; the first is meant when it names none; ANY: all.
        roles: some of "engine", "client", "reader", "operator".
        max_streams: most streams held at once; None: the limits' bound.
    """

    name: str
    via: str
    tenants: tuple[str, ...]
    roles: frozenset[str]
    max_streams: int | None = None

    @property
    def allowed_tenants(self) -> frozenset[str] | None:
        """The tenants it may name; None: all."""
        return None if ANY in self.tenants else frozenset(self.tenants)

    def tenant(self, requested: str) -> str:
        """Return the tenant that a request is about.

        Raises:
            TenantDeniedError: it is none of the caller's; whether it exists is not revealed.
        """
        if requested and (ANY in self.tenants or requested in self.tenants):
            return requested
        own = next((tenant for tenant in self.tenants if tenant != ANY), DEFAULT_TENANT)
        if not requested and self.tenants:
            return own
        raise TenantDeniedError(
            f"{self.name} may not use tenant {requested[:40]!r}",
            f"name one of its own, such as {own}" if self.tenants else "give it tenants",
        )

    def key(self, tenant: str, model: str, session_id: str) -> SessionKey:
        """Return the key of a session of that tenant; "" is the identity's own, its first.

        Raises:
            InvalidNameError: tenant or session can be no names.
            TenantDeniedError: the tenant is not one of the identity's.
        """
        # What is no name is told first: the identity would only say that it is not its own.
        asked = session_key(tenant, model, session_id)
        return asked._replace(tenant=self.tenant(tenant))

    def check_role(self, role: str) -> None:
        """Check that the caller has a role.

        Raises:
            RoleDeniedError: the caller does not have it.
        """
        if role not in self.roles and _INCLUDED.get(role) not in self.roles:
            raise RoleDeniedError(
                f"{self.name} does not have the role {role}",
                f"ask for it, or come by a socket or as a client that is {role}",
            )

    def check_all_tenants(self, what: str) -> None:
        """Check that the caller may name all tenants.

        Raises:
            TenantDeniedError: the caller may not name all.
        """
        if ANY not in self.tenants:
            raise TenantDeniedError(
                f"{self.name} may not use {what}, which concerns all tenants",
                'name a session, or come as a client with tenants = ["*"]',
            )


def socket_identity(name: str, tenants: Iterable[str], roles: Collection[str]) -> Identity:
    """Make the identity of callers on a Unix socket."""
    return Identity(name, "unix", tuple(tenants), frozenset(roles))


_CURRENT: ContextVar[Identity] = ContextVar("identity")


def current_identity() -> Identity:
    """Return the identity of the caller of this call.

    Raises:
        LookupError: this is no call that was authenticated, which no server of ours has.
    """
    return _CURRENT.get()


def act_as(identity: Identity) -> None:
    """Set the current identity for the rest of this task, which is the call's own."""
    _CURRENT.set(identity)
