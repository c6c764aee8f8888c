"""Whose processes may be engines, and of which tenants: the kernel says who they are.

kvd's own user and root may always attach. A user of [engine_users.UID] is held to its tenants, be
it one of those two; every other engine may name any tenant, for it is trusted to know its clients.
"""

import os
import pwd
from collections.abc import Mapping, Sequence

from kvd.errors import AttachDeniedError
from shared.access.identity import ANY, Identity

ROOT_UID = 0
ENGINE = frozenset(("engine",))


def uid_of(user: str) -> int:
    """The number of a user, who may be named by it.

    Raises:
        ValueError: there is no such user here.
    """
    if user.isascii() and user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError as error:
        raise ValueError(f"no user {user[:40]!r} on this machine: give a name or a uid") from error


class EngineUsers:
    """Those in force; a reload replaces them.

    Args:
        allowed: users that may attach, besides kvd's own, root and those of `tenants`.
        tenants: by user.
    """

    def __init__(
        self, allowed: Sequence[int] = (), tenants: Mapping[int, Sequence[str]] | None = None
    ) -> None:
        self._identities: dict[int, Identity] = {}
        self.replace(allowed, tenants or {})

    def replace(self, allowed: Sequence[int], tenants: Mapping[int, Sequence[str]]) -> None:
        """Put others into force, for engines that are attached already, too."""
        self._identities = {
            uid: Identity(f"uid {uid}", "unix", tuple(tenants.get(uid, (ANY,))), ENGINE)
            for uid in {ROOT_UID, os.geteuid(), *allowed, *tenants}
        }

    def identity_of(self, uid: int) -> Identity | None:
        """Who an engine's process is; None: it may not attach."""
        return self._identities.get(uid)

    def check(self, uid: int, tenant: str) -> None:
        """Refuse an engine a tenant that is none of its user's.

        Raises:
            DeniedError: it is not, or the user may not have engines any more.
        """
        identity = self._identities.get(uid)
        if identity is None:
            raise AttachDeniedError(
                f"uid {uid} may not attach any more", "put it into access.allowed_uids"
            )
        identity.tenant(tenant)
