"""Identity: the name of a caller, and what it is allowed to do.

It comes from a Unix socket (its callers share one identity), a token or a certificate, never from
the contents of a request: a request names a tenant, and the identity says whether it may. The
interceptor of gRPC, or the middleware of HTTP, sets the identity of the running call.
"""

from collections.abc import Collection, Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from shared.types.errors import DeniedError
from shared.types.session_key import DEFAULT_TENANT, SessionKey, session_key

ANY = "*"  # among an identity's tenants: it may use all
_INCLUDED = {"reader": "operator"}  # role -> another role that includes it


class TenantDeniedError(DeniedError):
    """The caller named a tenant that it may not use."""

    reason = "tenant_denied"


class RoleDeniedError(DeniedError):
    """The caller is known, but may not do this."""

    reason = "role_denied"


@dataclass(frozen=True)
class Identity:
    """One caller, and what it may do.

    Attributes:
        name: name of the client or of the socket, for logs, metrics and limits.
        via: "unix", "loopback", "token" or "certificate".
        tenants: tenants that it may name. The first is meant when it names none. ANY: all.
        roles: some of "engine", "client", "reader", "operator".
        max_streams: most streams held at once; None: as in [limits].
    """

    name: str
    via: str
    tenants: tuple[str, ...]
    roles: frozenset[str]
    max_streams: int | None = None

    @property
    def allowed_tenants(self) -> frozenset[str] | None:
        """The tenants that it may name; None: all."""
        return None if ANY in self.tenants else frozenset(self.tenants)

    def tenant(self, requested: str) -> str:
        """Return the tenant that a request is about.

        Raises:
            TenantDeniedError: it is none of the caller's. Whether it exists is not revealed.
        """
        if requested and (ANY in self.tenants or requested in self.tenants):
            return requested
        own = next((tenant for tenant in self.tenants if tenant != ANY), DEFAULT_TENANT)
        if not requested and self.tenants:
            return own
        raise TenantDeniedError(
            f"{self.name} may not use tenant {requested[:40]!r}",
            f"name one of its tenants, such as {own}" if self.tenants else "configure its tenants",
        )

    def key(self, tenant: str, model: str, session_id: str) -> SessionKey:
        """Return the key of a session of a tenant; "" is the identity's first tenant.

        Raises:
            InvalidNameError: tenant or session id is no valid name.
            TenantDeniedError: the tenant is not one of the identity's.
        """
        # Names are checked first, because for an invalid one that is the more useful error.
        key = session_key(tenant, model, session_id)
        return key._replace(tenant=self.tenant(tenant))

    def check_role(self, role: str) -> None:
        """Check that the caller has a role.

        Raises:
            RoleDeniedError: the caller does not have it.
        """
        if role not in self.roles and _INCLUDED.get(role) not in self.roles:
            raise RoleDeniedError(
                f"{self.name} does not have the role {role}",
                "have the role granted, or call over a socket, or as a client, that has it",
            )

    def check_all_tenants(self, what: str) -> None:
        """Check that the caller may use all tenants.

        Raises:
            TenantDeniedError: it may not.
        """
        if ANY not in self.tenants:
            raise TenantDeniedError(
                f"{self.name} may not use {what}, which concerns all tenants",
                'name a session, or call as a client with tenants = ["*"]',
            )


def socket_identity(name: str, tenants: Iterable[str], roles: Collection[str]) -> Identity:
    """Return the identity of callers at a Unix socket."""
    return Identity(name, "unix", tuple(tenants), frozenset(roles))


_CURRENT: ContextVar[Identity] = ContextVar("identity")


def current_identity() -> Identity:
    """Return the identity of this call's caller.

    Raises:
        LookupError: the call was not authenticated, which never happens in our servers.
    """
    return _CURRENT.get()


def act_as(identity: Identity) -> None:
    """Set the current identity for the rest of this task, which is the call's own."""
    _CURRENT.set(identity)
