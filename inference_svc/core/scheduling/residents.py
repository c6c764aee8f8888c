"""Residents: sessions' KV that stays in the engine's memory after their turns, for later turns.

A turn that finds its history there needs no load (the paper's HBM cache). The module knows which
tokens the KV of a resident belongs to, after which discards, and which resident must go first when
room is needed. KV of another lineage than the request's cannot be reused, whatever its tokens.

Where slots are only counted:
    - a resident that is too small for its session's next turn is copied to a larger sequence KV,
      and then goes;
    - a resident that begins like another session's prompt is copied there as far as both agree,
      and stays. The KV of a running turn is copied in the same way. It becomes a resident in the
      end, so that these copies are counted here from their start.
Where slots are pages, a resident grows in place, and both sessions hold the pages of a prefix.

While a resident is copied, or compacted because some of its tokens were dropped, it is not evicted
and not written to. Sessions share within a tenant, a model and a lineage, as in kvd.

Invariants (`check`): 1. a session has at most one resident; 2. num_slots is the sum of their slots;
3. only residents are copied from or compacted, never both at once; 4. the index of prefixes has the
residents' tokens; 5. a resident that is not busy may be evicted, the slots of a busy one are in
use.

*Source:* look-ahead eviction: CachedAttention §3.3.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inference_svc.core.attention_window import is_whole
from inference_svc.core.ranges import Range, position_after
from inference_svc.core.scheduling.held_slots import (
    HeldSlots,
    Holding,
    PageCopy,
    choose_victims,
)
from inference_svc.core.scheduling.prefix_index import PrefixIndex, common_prefix
from inference_svc.core.scheduling.request import Request
from shared.types.lineage import Lineage
from shared.types.queue_delta import Rank
from shared.types.session_key import SessionKey

# Each has up to a block of token slots outside of the scheduler's account, for its tail.
MOST_RESIDENTS = 128


@dataclass(frozen=True, eq=False)
class Resident:
    """The KV of a session's tokens while no request computes on it.

    Attributes:
        key: the session's key.
        token_ids: the tokens whose KV its first slots hold.
        holding: its slots.
        last_used_ns: time when its turn ended or was preempted.
        lineage: the discards after which its KV was computed; None: that of requests without one.
        boundary: position of a token at which a stored block begins, from which blocks are counted.
            Part of a block before it cannot be reused: its pre-RoPE keys are gone, so that what is
            appended could not be stored. None: not known yet.
        window_from: first token with KV in layers with a window.
    """

    key: SessionKey
    token_ids: Sequence[int]
    holding: Holding
    last_used_ns: int
    lineage: Lineage | None = None
    boundary: int | None = None
    window_from: int = 0

    @property
    def scope(self) -> tuple[str, str, Lineage | None]:
        """The values that have to be equal for equal tokens to have equal KV."""
        return self.key.tenant, self.key.model, self.lineage

    def usable_tokens(self, num_tokens: int, block_tokens: int, *, has_state: bool = False) -> int:
        """Return how many of its first `num_tokens` tokens a request can reuse.

        All or none if a recurrent state belongs to them, or while the boundary is not known.
        """
        if has_state or self.boundary is None:
            return num_tokens if num_tokens == len(self.token_ids) else 0
        if num_tokens >= self.boundary:
            return num_tokens
        behind = (num_tokens - self.boundary) // block_tokens * block_tokens
        return max(0, self.boundary + behind)


class Residents:
    """The residents, by session, with the copies and compactions that keep them busy.

    Args:
        slots: the account of token slots.
        block_tokens: tokens of a stored block.
        have_states: whether a recurrent state belongs to their tokens: see
            `SchedulerLimits.has_states`.
        attention_window: see `SchedulerLimits.attention_window`.
        most: most residents; `take_surplus` removes those beyond.

    Attributes:
        num_slots: number of slots of all residents; a shared slot counts for each that holds it.
    """

    def __init__(
        self,
        slots: HeldSlots,
        block_tokens: int = 1,
        *,
        have_states: bool = False,
        attention_window: int = 0,
        most: int = MOST_RESIDENTS,
    ) -> None:
        self.num_slots = 0
        self._most = most
        self._slots = slots
        self._block_tokens = block_tokens
        self._have_states = have_states
        self._attention_window = attention_window
        self._residents: dict[SessionKey, Resident] = {}
        self._index: PrefixIndex[SessionKey] = PrefixIndex()
        self._copies: dict[int, SessionKey] = {}  # sources, by number of the request
        self._compactions: dict[SessionKey, bool] = {}  # False: dropped, to be removed
        self._last_match: tuple[Request | None, Resident | None, int] = (None, None, 0)

    def __len__(self) -> int:
        return len(self._residents)

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._residents

    def get(self, key: SessionKey) -> Resident | None:
        """Return a session's resident; None if it has none."""
        return self._residents.get(key)

    def put(self, resident: Resident) -> None:
        """Add a resident whose slots have no other user; the session has none yet."""
        assert resident.key not in self._residents, f"{resident.key} has a resident"
        self._residents[resident.key] = resident
        self._index.put(resident.key, resident.scope, resident.token_ids)
        self.num_slots += resident.holding.num_slots
        self._slots.remove_user(resident.holding)
        for _ in range(self._num_copies(resident.key)):  # copies that began while its turn ran
            self._slots.add_user(resident.holding)

    def note_boundary(self, key: SessionKey, boundary: int) -> None:
        """Record where a stored block begins in a session's resident, if it is still there."""
        if key in self._residents:
            self._residents[key] = replace(self._residents[key], boundary=boundary)

    def take(self, key: SessionKey) -> Resident:
        """Remove a resident that is not busy; its slots are in use by the caller from now on."""
        assert not self.is_busy(key), f"the resident of {key} is being copied or compacted"
        resident = self._remove(key)
        self._slots.add_user(resident.holding)
        return resident

    def evict(self, key: SessionKey) -> None:
        """Remove a resident that is not busy, and release its slots."""
        self._slots.release(self.take(key).holding)

    def drop(self, key: SessionKey) -> bool:
        """Remove a session's resident; return False if there is none, or it is being compacted.

        A resident that is being compacted goes at the end of that. A request that copies from the
        resident keeps its memory alive.
        """
        if key in self._compactions:
            self._compactions[key] = False
            return False
        if key not in self._residents:
            return False
        self._copies = {number: source for number, source in self._copies.items() if source != key}
        self._slots.release(self._remove(key).holding)
        return True

    def match(self, request: Request) -> int:
        """Count a request's first tokens whose KV its session's resident has and that are usable.

        0 if the lineage differs: then the same tokens have other KV. At most all but one: the last
        token is always computed. Repeated calls for the same request are cheap, because every step
        asks again while the request cannot be admitted.
        """
        resident = self._residents.get(request.key)
        if resident is None or resident.lineage != request.lineage:
            return 0
        last_request, last_resident, num_tokens = self._last_match
        if request is not last_request or resident is not last_resident:
            num_common = common_prefix(resident.token_ids, request.token_ids[:-1])
            num_tokens = self._usable(resident, num_common)
            self._last_match = (request, resident, num_tokens)
        return num_tokens

    def shared_prefix(self, request: Request) -> tuple[Resident, int] | None:
        """Find another session's resident with the KV of most of a request's first tokens.

        Returns:
            The resident and its number of usable tokens, at most all but one; None: there is none.
        """
        found = self._index.longest(
            request.scope,
            request.token_ids[:-1],
            lambda key: key != request.key and key not in self._compactions,
        )
        if found is None:
            return None
        key, num_common = found
        resident = self._residents[key]
        return resident, self._usable(resident, num_common)

    def victims(
        self,
        num_slots: int,
        rank: Callable[[SessionKey], Rank | None],
        spared: SessionKey | None = None,
    ) -> list[SessionKey]:
        """Choose as few residents as have to be evicted for `num_slots` slots, if there are enough.

        First those of sessions without a waiting request, least recently used first; then the
        others from the tail of the queue to its head.

        Args:
            num_slots: number of slots to free.
            rank: returns a session's position in the queue; None: it does not wait.
            spared: a session whose resident is not chosen.
        """
        tally = self._slots.tally_released()
        candidates = (resident for resident in self._evictable(rank) if resident.key != spared)
        chosen = choose_victims(
            candidates,
            lambda resident: tally.add(resident.holding),
            lambda resident: tally.remove(resident.holding),
            lambda: tally.num_slots >= num_slots,
        )
        return [resident.key for resident in chosen]

    def take_surplus(self, rank: Callable[[SessionKey], Rank | None]) -> list[SessionKey]:
        """Remove residents beyond `most` that are not busy, in the order of `victims`."""
        if len(self) <= self._most:
            return []
        taken = [resident.key for resident in self._evictable(rank)[: len(self) - self._most]]
        for key in taken:
            self.evict(key)
        return taken

    def unqueued(self, rank: Callable[[SessionKey], Rank | None]) -> list[SessionKey]:
        """List the sessions without a waiting request whose resident is not busy."""
        return [key for key in self._residents if not self.is_busy(key) and rank(key) is None]

    # ----------------------------------------------------------------------- copies, compactions

    def is_busy(self, key: SessionKey) -> bool:
        """Return whether a session's resident is copied or compacted, or its turn's KV copied."""
        return key in self._compactions or key in self._copies.values()

    def is_copied_to(self, request: Request) -> bool:
        """Return whether a resident is being copied to a request's KV."""
        return request.number in self._copies

    def begin_copy(self, source: SessionKey, request: Request) -> None:
        """Begin to copy a session's resident, or its running turn's KV, to a request's KV.

        The resident may be that of the request's own session.
        """
        assert source not in self._compactions, f"the resident of {source} is being compacted"
        assert request.number not in self._copies, f"request {request.number} copies already"
        self._copies[request.number] = source
        if source in self._residents:
            self._slots.add_user(self._residents[source].holding)

    def end_copy(self, request: Request) -> bool:
        """Record that a copy to a request's KV is complete.

        Returns:
            Whether the source was the resident of the request's own session, which is dropped now.
        """
        source = self._copies.get(request.number)
        self.cancel_copy(request)
        return source == request.key and self.drop(source)

    def cancel_copy(self, request: Request) -> None:
        """Cancel the copy to a request's KV, if there is one; its source stays."""
        source = self._copies.pop(request.number, None)
        if source in self._residents:
            self._slots.remove_user(self._residents[source].holding)

    def begin_compaction(self, key: SessionKey) -> bool:
        """Protect a resident while some of its tokens are dropped and the others are compacted.

        Returns:
            False if there is none, or it is busy; else `end_compaction` is owed.
        """
        if key not in self._residents or self.is_busy(key):
            return False
        self._compactions[key] = True
        self._slots.add_user(self._residents[key].holding)
        return True

    def make_private(self, key: SessionKey, first_token: int) -> list[PageCopy] | None:
        """Give a resident that is to be compacted pages of its own, from a token on.

        Returns:
            The pages whose content is to be copied before; None: there is no room.
        """
        resident = self._residents[key]
        if self._slots.num_shared(resident.holding, first_token) > self._slots.free_slots:
            return None
        return self._slots.make_private(resident.holding, first_token, resident.window_from)

    def end_compaction(
        self,
        key: SessionKey,
        token_ids: Sequence[int],
        lineage: Lineage | None = None,
        ranges: Sequence[Range] = (),
    ) -> bool:
        """Record that the resident's KV is that of `token_ids` now; return False if it was removed.

        It is removed if no token is left that can be reused, or if it was dropped meanwhile.

        Args:
            key: the session's key.
            token_ids: its tokens that are left.
            lineage: their lineage.
            ranges: the ranges that were dropped, as positions before the compaction, merged.
        """
        is_kept = self._compactions.pop(key)
        resident = self._residents[key]
        window_from = position_after(resident.window_from, ranges)
        is_usable = is_whole(len(token_ids), window_from, self._attention_window)
        if not (is_kept and token_ids and is_usable):
            self._slots.release(self._remove(key).holding)
            return False
        compacted = replace(
            resident,
            token_ids=tuple(token_ids),
            lineage=lineage,
            boundary=len(token_ids),
            window_from=window_from,
        )
        self._residents[key] = compacted
        self._index.take(key)
        self._index.put(key, compacted.scope, token_ids)
        self.num_slots -= resident.holding.num_slots
        self._slots.trim(resident.holding, len(token_ids))
        self.num_slots += resident.holding.num_slots
        self._slots.remove_user(resident.holding)
        return True

    def holdings(self) -> list[Holding]:
        """List the slots of all residents."""
        return [resident.holding for resident in self._residents.values()]

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert all(key == resident.key for key, resident in self._residents.items())
        assert self.num_slots == sum(r.holding.num_slots for r in self._residents.values())
        assert self._compactions.keys() <= self._residents.keys()
        assert not self._compactions.keys() & set(self._copies.values())
        rooms = {
            key: self._slots.tokens_in(r.holding.num_slots) for key, r in self._residents.items()
        }
        assert all(len(r.token_ids) <= rooms[key] for key, r in self._residents.items())
        assert len(self._index) == len(self._residents)
        self._index.check()
        for key, resident in self._residents.items():
            num_users = self._num_copies(key) + (key in self._compactions)
            assert resident.holding.num_users == num_users

    def _usable(self, resident: Resident, num_tokens: int) -> int:
        usable = resident.usable_tokens(num_tokens, self._block_tokens, has_state=self._have_states)
        return usable if is_whole(usable, resident.window_from, self._attention_window) else 0

    def _evictable(self, rank: Callable[[SessionKey], Rank | None]) -> list[Resident]:
        """List the residents that are not busy, in the order in which they may be evicted."""
        unqueued: list[tuple[int, int, Resident]] = []
        queued: list[tuple[Rank, Resident]] = []
        for resident in self._residents.values():
            if self.is_busy(resident.key):
                continue
            position = rank(resident.key)
            if position is None:
                unqueued.append((resident.last_used_ns, len(unqueued), resident))
            else:
                queued.append((position, resident))
        found = [resident for *_, resident in sorted(unqueued)]
        return found + [resident for _, resident in sorted(queued, reverse=True)]

    def _num_copies(self, key: SessionKey) -> int:
        return list(self._copies.values()).count(key)

    def _remove(self, key: SessionKey) -> Resident:
        resident = self._residents.pop(key)
        self._index.take(key)
        self.num_slots -= resident.holding.num_slots
        return resident
