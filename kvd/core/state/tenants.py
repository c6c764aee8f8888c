"""Tenants: what each may have, and what it has.

Pure. A tenant's quota counts each of its blocks once, as `block_bytes`, wherever it lies and
however many sessions share it (salts keep tenants' blocks apart); slots that a store is still
filling count from the moment they are granted. So a partial block, which SSD packs, counts as a
whole one: what a quota bounds follows from the tokens stored, and does not change when a block
moves.

A quota that begins while sessions are stored bounds nobody until all of them are in order: they are
put there some at a time (kvd/core/operations/reconfiguring.py), the last to go first, and uses
meanwhile count.

Invariant: a session of a tenant whose quota has begun is in that tenant's order, unless it is
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


def nobody(tenant: str) -> bool:  # noqa: ARG001
    """Name no tenant as one that is being erased."""
    return False


@dataclass(slots=True)
class _Tenant:
    limits: TenantLimits
    num_blocks: int = 0
    num_sessions: int = 0
    order: LruOrder | None = None  # of its sessions, if it has a quota
    is_ordered: bool = True  # all of them are in the order, if there is one


class TenantTable:
    """Every tenant that has a block or a session, or had one.

    Attributes:
        charged: tenants with a quota that were charged with more, until somebody takes them out.
        is_erased: which tenants are being erased just now, and are refused.
    """

    def __init__(self, limits_of: Callable[[str], TenantLimits], block_bytes: int) -> None:
        self.charged: dict[str, None] = {}
        self._limits_of = limits_of
        self._block_bytes = block_bytes
        self._tenants: dict[str, _Tenant] = {}
        self.is_erased: Callable[[str], bool] = nobody

    def __iter__(self) -> Iterator[TenantUsage]:
        """Say what each tenant that stores something has."""
        for name, tenant in self._tenants.items():
            if tenant.num_blocks or tenant.num_sessions:
                used_bytes = tenant.num_blocks * self._block_bytes
                quota_bytes = tenant.limits.quota_bytes
                yield TenantUsage(name, used_bytes, quota_bytes, tenant.num_sessions)

    def refuse_erased(self, tenant: str) -> None:
        """Raise ErasingError if the tenant is being erased."""
        if self.is_erased(tenant):
            raise ErasingError(f"tenant {tenant!r} is being erased", "try again in a moment")

    def limits(self, tenant: str) -> TenantLimits:
        """Return what is configured for it."""
        return self._of(tenant).limits

    def change_limits(self, limits_of: Callable[[str], TenantLimits]) -> frozenset[str]:
        """Take other limits, for all tenants.

        Returns:
            Tenants that have a quota from now on, and had none: each of their sessions is to be
            entered by `insert_before`, the last to go first; then `begin_quotas`.
        """
        self._limits_of = limits_of
        begun = []
        for name, tenant in self._tenants.items():
            had_quota = tenant.order is not None and tenant.is_ordered
            tenant.limits = limits_of(name)
            if tenant.limits.quota_bytes is None:
                tenant.order = None
            elif not had_quota:
                tenant.order = LruOrder()
                tenant.is_ordered = not tenant.num_sessions
                begun.append(name)
        return frozenset(begun)

    def begin_quotas(self) -> None:
        """Hold every quota from now on: all sessions are entered."""
        for tenant in self._tenants.values():
            tenant.is_ordered = True

    def charge(self, tenant: str, num_blocks: int) -> None:
        """Count blocks, or slots that are to hold one; a negative number gives them back."""
        entry = self._of(tenant)
        entry.num_blocks += num_blocks
        assert entry.num_blocks >= 0, "a block is discharged once"
        if num_blocks > 0 and entry.order is not None:
            self.charged[tenant] = None

    def num_over(self, tenant: str, num_wanted: int) -> int:
        """Count the blocks that must go before a tenant with a quota may have this many more."""
        return max(0, self._of(tenant).num_blocks + num_wanted - self.num_allowed(tenant))

    def may_ever_have(self, tenant: str, num_wanted: int) -> bool:
        """Whether the quota of a tenant that has one is large enough for this many blocks."""
        return num_wanted <= self.num_allowed(tenant)

    def num_allowed(self, tenant: str) -> int:
        """Count the blocks that the quota of a tenant that has one allows."""
        quota_bytes = self._of(tenant).limits.quota_bytes
        assert quota_bytes is not None, "only a tenant with a quota is asked for"
        return quota_bytes // self._block_bytes

    # ------------------------------------------------------------------------------------ sessions

    def count_session(self, tenant: str, increment: int) -> None:
        """Take note of a session that came, or went."""
        self._of(tenant).num_sessions += increment

    def order_of(self, tenant: str) -> LruOrder | None:
        """Return a tenant's sessions in order of eviction; None if it has no quota in force."""
        entry = self._of(tenant)
        return entry.order if entry.is_ordered else None

    def on_access(self, key: SessionKey) -> None:
        """Record a use of a session that may be evicted."""
        order = self._of(key.tenant).order
        if order is not None:
            order.touch(key)

    def on_insert(self, key: SessionKey) -> None:
        """Note, without a use, that a session may be evicted."""
        order = self._of(key.tenant).order
        if order is not None:
            order.enter(key)

    def insert_before(self, key: SessionKey) -> None:
        """Record that a session may be evicted, sooner than all that are in the order."""
        order = self._of(key.tenant).order
        if order is not None:
            order.enter_before(key)

    def on_end(self, key: SessionKey) -> None:
        """Record that the session will not come back."""
        order = self._of(key.tenant).order
        if order is not None:
            order.end(key)

    def guard(self, key: SessionKey, guard: Guard) -> None:
        """Have the session go after all that are guarded less."""
        order = self._of(key.tenant).order
        if order is not None:
            order.guard(key, guard)

    def on_remove(self, key: SessionKey) -> None:
        """Take out a session that is gone, or may not be evicted."""
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
