"""Tenants: the limits of each, and what it uses.

Pure. A tenant's quota counts each of its blocks once, as `block_bytes`, wherever the block lies and
however many sessions share it (salts keep the blocks of tenants apart). Slots that a store is still
filling count from the moment they are granted. A partial block, which SSD packs, counts as a whole
one: so what a quota allows follows from the stored tokens, and does not change when a block moves.

A quota that begins while sessions are stored limits nothing until all of them are in the tenant's
eviction order. They are entered in steps (kvd/core/operations/reconfiguring.py), the last to be
evicted first. Uses in the meantime count.

Invariant: a session of a tenant whose quota is in force is in the tenant's order, unless it is
hard-pinned.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvd.core.eviction.lru_order import LruOrder
from kvd.core.eviction.session_order import Guard
from kvd.core.records.errors import ErasingError
from kvd.core.records.records import TenantUsage
from kvd.core.state.limits import TenantLimits
from shared.types.session_key import SessionKey


def no_erasure(tenant: str) -> bool:  # noqa: ARG001
    """Return that no tenant is being erased."""
    return False


@dataclass(slots=True)
class _Tenant:
    limits: TenantLimits
    num_blocks: int = 0
    num_sessions: int = 0
    order: LruOrder | None = None  # its sessions, if it has a quota
    is_ordered: bool = True  # whether all of them are in the order, if there is one


class TenantTable:
    """All tenants that have, or had, a block or a session.

    Attributes:
        charged: tenants with a quota that were charged with more blocks. The reader removes them.
        is_erased: says which tenants are being erased at the moment, and so are refused.
    """

    def __init__(self, limits_of: Callable[[str], TenantLimits], block_bytes: int) -> None:
        self.charged: dict[str, None] = {}
        self._limits_of = limits_of
        self._block_bytes = block_bytes
        self._tenants: dict[str, _Tenant] = {}
        self.is_erased: Callable[[str], bool] = no_erasure

    def __iter__(self) -> Iterator[TenantUsage]:
        """Yield the usage of each tenant that stores something."""
        for name, tenant in self._tenants.items():
            if tenant.num_blocks or tenant.num_sessions:
                used_bytes = tenant.num_blocks * self._block_bytes
                quota_bytes = tenant.limits.quota_bytes
                yield TenantUsage(name, used_bytes, quota_bytes, tenant.num_sessions)

    def refuse_erased(self, tenant: str) -> None:
        """Raise ErasingError if the tenant is being erased."""
        if self.is_erased(tenant):
            raise ErasingError(f"tenant {tenant!r} is just being erased", "try again in a moment")

    def limits(self, tenant: str) -> TenantLimits:
        """Return the limits of a tenant."""
        return self._of(tenant).limits

    def change_limits(self, limits_of: Callable[[str], TenantLimits]) -> frozenset[str]:
        """Replace the limits of all tenants.

        Returns:
            Tenants that now have a quota and had none. The caller enters each of their sessions by
            `insert_before`, the last to be evicted first, and then calls `begin_quotas`.
        """
        self._limits_of = limits_of
        with_new_quota = []
        for name, tenant in self._tenants.items():
            had_quota = tenant.order is not None and tenant.is_ordered
            tenant.limits = limits_of(name)
            if tenant.limits.quota_bytes is None:
                tenant.order = None
            elif not had_quota:
                tenant.order = LruOrder()
                tenant.is_ordered = not tenant.num_sessions
                with_new_quota.append(name)
        return frozenset(with_new_quota)

    def begin_quotas(self) -> None:
        """Enforce every quota from now on, because all sessions are in their orders."""
        for tenant in self._tenants.values():
            tenant.is_ordered = True

    def charge(self, tenant: str, num_blocks: int) -> None:
        """Count blocks, or slots that will hold one. A negative number gives them back."""
        entry = self._of(tenant)
        entry.num_blocks += num_blocks
        assert entry.num_blocks >= 0, "a block is discharged once"
        if num_blocks > 0 and entry.order is not None:
            self.charged[tenant] = None

    def num_over(self, tenant: str, num_wanted: int) -> int:
        """Return how many blocks must go before a tenant with a quota may have this many more."""
        return max(0, self._of(tenant).num_blocks + num_wanted - self.num_allowed(tenant))

    def may_ever_have(self, tenant: str, num_wanted: int) -> bool:
        """Whether this many blocks fit the quota of a tenant that has one."""
        return num_wanted <= self.num_allowed(tenant)

    def num_allowed(self, tenant: str) -> int:
        """Return how many blocks the quota of a tenant that has one allows."""
        quota_bytes = self._of(tenant).limits.quota_bytes
        assert quota_bytes is not None, "only a tenant with a quota is asked for"
        return quota_bytes // self._block_bytes

    # ------------------------------------------------------------------------------------ sessions

    def count_session(self, tenant: str, increment: int) -> None:
        """Add to a tenant's number of sessions."""
        self._of(tenant).num_sessions += increment

    def order_of(self, tenant: str) -> LruOrder | None:
        """Return a tenant's sessions in order of eviction; None if no quota is in force."""
        entry = self._of(tenant)
        return entry.order if entry.is_ordered else None

    def on_access(self, key: SessionKey) -> None:
        """Record a use of an evictable session."""
        order = self._of(key.tenant).order
        if order is not None:
            order.touch(key)

    def on_insert(self, key: SessionKey) -> None:
        """Record, without a use, that a session is evictable."""
        order = self._of(key.tenant).order
        if order is not None:
            order.enter(key)

    def insert_before(self, key: SessionKey) -> None:
        """Enter an evictable session, to be evicted before all that are in the order."""
        order = self._of(key.tenant).order
        if order is not None:
            order.enter_before(key)

    def on_end(self, key: SessionKey) -> None:
        """Record that a session has ended."""
        order = self._of(key.tenant).order
        if order is not None:
            order.end(key)

    def guard(self, key: SessionKey, guard: Guard) -> None:
        """Change the guard of a session: it is evicted after all sessions with a lower one."""
        order = self._of(key.tenant).order
        if order is not None:
            order.guard(key, guard)

    def on_remove(self, key: SessionKey) -> None:
        """Remove a session that is gone, or no longer evictable."""
        order = self._of(key.tenant).order
        if order is not None:
            order.remove(key)

    def _of(self, tenant: str) -> _Tenant:
        entry = self._tenants.get(tenant)
        if entry is None:
            limits = self._limits_of(tenant)
            entry = self._tenants[tenant] = _Tenant(limits)
            entry.order = None if limits.quota_bytes is None else LruOrder()
        return entry
