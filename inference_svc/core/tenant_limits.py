"""Limits per tenant: turns and tokens a minute, turns at once, sessions kept. Pure.

A rate is a token bucket that holds a minute's worth and fills all the time. A turn takes one from
the bucket of turns when it begins. It may begin while the bucket of tokens is not empty. Then it
reserves the tokens that it may need, which can leave a debt. When it has ended, tokens that it
computed (prompt and answer) stay taken, and the others are returned: tokens found in the cache cost
nothing. A refused client gets a time to return at (`ReturnTimes`).

Invariants (`check`): 1. a tenant's turns are counted from `enter` to `leave`, and the sessions that
they open until these exist; 2. an idle tenant without a debt has no entry, at the latest after the
next sweep; 3. no tenant sees anything of another.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from inference_svc.core.errors import RateLimitedError, TooManySessionsError, TooManyTurnsError
from shared.types.errors import ExhaustedError
from shared.types.units import NS_PER_S


class ReturnTimes:
    """The times at which refused clients are asked to return.

    Each time is later than the one before by the time that a place takes to become free: if a
    thousand clients returned together, nearly all would be refused again. The times start over when
    they are too far ahead: the pace may be estimated too slow, and places must not stay empty.

    Attributes:
        last_ns: time at which the client that was refused last may return.
    """

    def __init__(self) -> None:
        self.last_ns = 0

    def next_s(self, now_ns: int, first_s: float, pace_s: float, most_s: float) -> float:
        """Return in how many seconds the next client may return.

        Args:
            now_ns: the time.
            first_s: seconds until the first client may.
            pace_s: seconds between two clients.
            most_s: most seconds from now; beyond it the times start over at `first_s`.
        """
        first_ns, pace_ns = now_ns + int(first_s * NS_PER_S), int(pace_s * NS_PER_S)
        return_ns = max(first_ns, self.last_ns + pace_ns)
        if return_ns > now_ns + int(most_s * NS_PER_S):
            return_ns = first_ns
        self.last_ns = return_ns
        return (return_ns - now_ns) / NS_PER_S


MINUTE_S = 60.0
MAX_RETRY_S = MINUTE_S  # refused clients' return times are spread over this
MIN_PACE_S = 0.005  # between two clients that return: refusing them costs time, too
SWEEP = 1024  # new entries between two sweeps


@dataclass(frozen=True)
class TenantBounds:
    """A tenant's limits: rates a minute, turns at once, sessions kept; None: no bound."""

    turns_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_turns: int | None = None
    max_sessions: int | None = None


class Bucket:
    """A token bucket: fills at a rate up to a minute's worth; may be left with a debt.

    Args:
        per_minute: the rate; None: no bound.
        now_ns: the time.
    """

    def __init__(self, per_minute: float | None, now_ns: int) -> None:
        self._per_minute = per_minute
        self._level = self.capacity
        self._filled_ns = now_ns

    @property
    def capacity(self) -> float:
        """The most that it holds: a minute's worth, and at least 1."""
        return max(1.0, self._per_minute or 0.0)

    def level(self, now_ns: int) -> float:
        """Return its level; below 0 it is a debt."""
        if self._per_minute is not None:
            passed_s = max(0, now_ns - self._filled_ns) / NS_PER_S
            level = self._level + self._per_minute * passed_s / MINUTE_S
            self._level = min(self.capacity, level)
        self._filled_ns = now_ns
        return self._level

    def take(self, amount: float, now_ns: int) -> None:
        """Take an amount out, or return a negative one."""
        if self._per_minute is not None:
            self._level = min(self.capacity, self.level(now_ns) - amount)

    def set_rate(self, per_minute: float | None, now_ns: int) -> None:
        """Fill at another rate from now on; a bucket that had no bound starts full."""
        had_bound, level = self._per_minute is not None, self.level(now_ns)
        self._per_minute = per_minute
        self._level = min(level, self.capacity) if had_bound else self.capacity

    def wait_s(self, wanted: float, now_ns: int) -> float:
        """Return in how many seconds `wanted` will be in it; 0 if it is."""
        if self._per_minute is None:
            return 0.0
        missing = min(wanted, self.capacity) - self.level(now_ns)
        return max(0.0, missing * MINUTE_S / self._per_minute)

    def pace_s(self, amount: float) -> float:
        """Return how many seconds it takes to fill by an amount."""
        return amount * MINUTE_S / self._per_minute if self._per_minute is not None else 0.0


@dataclass(frozen=True)
class Reservation:
    """The part of its tenant's limits that a turn under way has reserved.

    Attributes:
        tenant: the tenant's name.
        tokens: tokens taken from the bucket when it began.
        opens: id of the session that it opens; "" if the session exists.
    """

    tenant: str
    tokens: float
    opens: str


@dataclass
class _Tenant:
    """The limits of one tenant, and what its turns under way have used of them."""

    bounds: TenantBounds
    turns: Bucket
    tokens: Bucket
    num_turns: int = 0
    opening: Counter[str] = field(default_factory=Counter)
    returns: ReturnTimes = field(default_factory=ReturnTimes)

    def is_needed(self, now_ns: int) -> bool:
        """Return whether the entry differs from a new one."""
        buckets = (self.turns, self.tokens)
        owes = any(bucket.level(now_ns) < bucket.capacity for bucket in buckets)
        return bool(self.num_turns or self.opening) or owes or self.returns.last_ns > now_ns


class TenantLimits:
    """The limits of all tenants, and what turns under way have used of them.

    Args:
        default: limits of tenants without limits of their own.
        named: limits of the others, by name.
        turn_s: returns how many seconds a turn takes at present, to estimate return times.
    """

    def __init__(
        self,
        default: TenantBounds,
        named: Mapping[str, TenantBounds],
        turn_s: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._default = default
        self._named = named
        self._turn_s = turn_s
        self._tenants: dict[str, _Tenant] = {}
        self._sweep_at = SWEEP

    def __len__(self) -> int:
        return len(self._tenants)

    def set_bounds(
        self, default: TenantBounds, named: Mapping[str, TenantBounds], now_ns: int
    ) -> None:
        """Apply other limits from now on; turns under way keep their reservations."""
        self._default, self._named = default, named
        for name, tenant in self._tenants.items():
            tenant.bounds = self._named.get(name, self._default)
            tenant.turns.set_rate(tenant.bounds.turns_per_minute, now_ns)
            tenant.tokens.set_rate(tenant.bounds.tokens_per_minute, now_ns)

    def refusal(
        self, name: str, tokens: float, opens: str, num_sessions: int, now_ns: int
    ) -> ExhaustedError | None:
        """Return why a turn may not begin now; None if it may. Only return times are changed.

        Sessions are checked last, so that a client that deletes one is not refused for another
        reason.

        Args:
            name: the tenant's name.
            tokens: tokens that the turn may need.
            opens: id of the session that it opens; "" if the session exists.
            num_sessions: number of sessions that the tenant has.
            now_ns: the time.
        """
        tenant = self._tenant(name, now_ns)
        bounds = tenant.bounds
        if bounds.max_turns is not None and tenant.num_turns >= bounds.max_turns:
            pace_s = max(MIN_PACE_S, self._turn_s())
            wait_s = tenant.returns.next_s(now_ns, pace_s, pace_s, MAX_RETRY_S)
            return _too_many_turns(name, tenant.num_turns, wait_s)
        wait_s = max(tenant.turns.wait_s(1.0, now_ns), tenant.tokens.wait_s(1.0, now_ns))
        if wait_s:
            pace_s = max(MIN_PACE_S, tenant.turns.pace_s(1.0), tenant.tokens.pace_s(tokens))
            return _rate_limited(
                name, bounds, tenant.returns.next_s(now_ns, wait_s, pace_s, MAX_RETRY_S)
            )
        return self.session_refusal(name, opens, num_sessions, now_ns) if opens else None

    def session_refusal(
        self, name: str, opens: str, num_sessions: int, now_ns: int
    ) -> ExhaustedError | None:
        """Return why a tenant with `num_sessions` sessions may not open this one; None: it may."""
        tenant = self._tenant(name, now_ns)
        most, num_kept = tenant.bounds.max_sessions, num_sessions + len(tenant.opening)
        if most is None or opens in tenant.opening or num_kept < most:
            return None
        return _too_many_sessions(name, num_kept)

    def enter(self, name: str, tokens: float, opens: str, now_ns: int) -> Reservation:
        """Count a turn that begins, after `refusal` returned None; `leave` is owed."""
        tenant = self._tenant(name, now_ns)
        # At most a minute's worth: a turn with an endless max_tokens must not wait endlessly.
        reservation = Reservation(name, min(tokens, tenant.tokens.capacity), opens)
        tenant.num_turns += 1
        if opens:
            self.begin_opening(name, opens, now_ns)
        tenant.turns.take(1.0, now_ns)
        tenant.tokens.take(reservation.tokens, now_ns)
        return reservation

    def leave(self, reservation: Reservation, used_tokens: float, now_ns: int) -> None:
        """Count a turn that ended, and return reserved tokens that it did not use."""
        tenant = self._tenants[reservation.tenant]
        tenant.num_turns -= 1
        if reservation.opens:
            self.end_opening(reservation.tenant, reservation.opens)
        tenant.tokens.take(used_tokens - reservation.tokens, now_ns)

    def begin_opening(self, name: str, session_id: str, now_ns: int) -> None:
        """Count a session that is being opened; `end_opening` is owed."""
        self._tenant(name, now_ns).opening[session_id] += 1

    def opened(self, name: str, session_id: str) -> None:
        """Stop counting a session as being opened, by any turn: it exists now."""
        if name in self._tenants:
            self._tenants[name].opening.pop(session_id, None)

    def end_opening(self, name: str, session_id: str) -> None:
        """Stop counting a session as being opened by one that is done, or has failed."""
        opening = self._tenants[name].opening if name in self._tenants else Counter[str]()
        if session_id in opening:
            opening[session_id] -= 1
            if not opening[session_id]:
                del opening[session_id]

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        for tenant in self._tenants.values():
            assert tenant.num_turns >= 0
            assert all(count > 0 for count in tenant.opening.values())

    def _tenant(self, name: str, now_ns: int) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._sweep_at:
                self._sweep(now_ns)
            bounds = self._named.get(name, self._default)
            turns = Bucket(bounds.turns_per_minute, now_ns)
            tokens = Bucket(bounds.tokens_per_minute, now_ns)
            tenant = self._tenants[name] = _Tenant(bounds, turns, tokens)
        return tenant

    def _sweep(self, now_ns: int) -> None:
        self._tenants = {n: t for n, t in self._tenants.items() if t.is_needed(now_ns)}
        self._sweep_at = 2 * len(self._tenants) + SWEEP


def _too_many_sessions(name: str, num_sessions: int) -> TooManySessionsError:
    return TooManySessionsError(
        f"tenant {name} has {num_sessions} sessions, and may not have more",
        "delete some of them, or raise the tenant's max_sessions",
        details={"num_sessions": str(num_sessions)},
    )


def _too_many_turns(name: str, num_turns: int, wait_s: float) -> TooManyTurnsError:
    return TooManyTurnsError(
        f"tenant {name} has {num_turns} turns that run or wait, and may not have more",
        "submit again later, or raise the tenant's max_turns",
        details={"num_turns": str(num_turns)},
        retry_after_s=wait_s,
    )


def _rate_limited(name: str, bounds: TenantBounds, wait_s: float) -> RateLimitedError:
    allowed = {"turns": bounds.turns_per_minute, "tokens": bounds.tokens_per_minute}
    named = [f"{value:g} {what}" for what, value in allowed.items() if value is not None]
    return RateLimitedError(
        f"tenant {name} has used up its {' and '.join(named)} per minute",
        "submit again later, or raise the tenant's limits",
        retry_after_s=wait_s,
    )
