"""Sessions whose KV is kept after their turn: a hit there needs no load (the HBM-resident tail).

Knows which tokens a resident's KV is of, after which discards, and who must go first when room
is needed. KV of another lineage than a request's is of no use to it, whatever its tokens.

Where slots are only counted, a resident that is too small for its session's next turn is copied to
a larger sequence KV, after which it goes; one that begins as another session's prompt is copied
there as far as it does, and stays. (So is the KV of a turn that runs, and becomes a resident in the
end: these copies are counted here from the start.) Where slots are pages, it grows, and the pages
that both begin with are both sessions'. While it is copied, or compacted because some of its tokens
were dropped, it is no victim, and nothing is written to it. Sessions share within a tenant, a model
and a lineage, as in kvd.

Invariants (`check`): 1. a session has one resident at most; 2. num_slots is the sum of
theirs; 3. only a resident is copied from, or compacted, not both; 4. the index of prefixes
holds residents' tokens; 5. residents that are not busy may be evicted, the others are needed.

*Source:* look-ahead eviction: CachedAttention §3.3.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inference_svc.core.attention_window import is_whole
from inference_svc.core.discards import Range, position_after
from inference_svc.core.scheduling.held_slots import HeldSlots, Holding, PageCopy
from inference_svc.core.scheduling.prefix_index import PrefixIndex, common_prefix
from inference_svc.core.scheduling.request import Request
from shared.types.lineage import Lineage
from shared.types.queue_delta import Rank
from shared.types.session_key import SessionKey

# Each has up to a block of token slots beside the scheduler's account: for its tail.
MOST_RESIDENTS = 128


@dataclass(frozen=True, eq=False)
class Resident:
    """A sequence's KV that nobody computes on.

    Attributes:
        key: the session's key.
        token_ids: the tokens whose KV its first slots hold.
        holding: its slots.
        last_used_ns: time when its turn ended or was preempted.
        lineage: which discards its KV was computed after; None: that of requests without one.
        boundary: position of a token that a block of what is stored begins with; from there blocks
            are counted. Of what is before it, part of a block is of no use: as it was before RoPE
            it is gone, and its growth could not be stored. None: not known yet.
        window_from: first token of which layers with a window have KV.
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
        """What has to be equal for equal tokens to have equal KV."""
        return self.key.tenant, self.key.model, self.lineage

    def usable_tokens(self, num_tokens: int, block_tokens: int, *, has_state: bool = False) -> int:
        """Return how many of its first `num_tokens` tokens can be built on.

        All or none where a state belongs to them, and until it is known where a block begins.
        """
        if has_state or self.boundary is None:
            return num_tokens if num_tokens == len(self.token_ids) else 0
        if num_tokens >= self.boundary:
            return num_tokens
        behind = (num_tokens - self.boundary) // block_tokens * block_tokens
        return max(0, self.boundary + behind)


class Residents:
    """See the module docstring.

    Args:
        slots: the account of token slots.
        block_tokens: tokens of a block of what is stored.
        have_states: whether a state belongs to their tokens: see `SchedulerLimits.has_states`.
        attention_window: see `SchedulerLimits.attention_window`.
        most: how many are kept: `take_surplus` removes others.

    Attributes:
        num_slots: number of slots of all residents; those that several share count for each.
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
        self._copies: dict[int, SessionKey] = {}  # whose is copied, by number of the request
        self._compactions: dict[SessionKey, bool] = {}  # False: dropped meanwhile
        self._last_match: tuple[Request | None, Resident | None, int] = (None, None, 0)

    def __len__(self) -> int:
        return len(self._residents)

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._residents

    def get(self, key: SessionKey) -> Resident | None:
        """Return a session's resident."""
        return self._residents.get(key)

    def put(self, resident: Resident) -> None:
        """Add one, whose slots nobody else needs; the session has none."""
        assert resident.key not in self._residents, f"{resident.key} has a resident"
        self._residents[resident.key] = resident
        self._index.put(resident.key, resident.scope, resident.token_ids)
        self.num_slots += resident.holding.num_slots
        self._slots.remove_user(resident.holding)
        for _ in range(self._num_copies(resident.key)):  # that were begun while its turn ran
            self._slots.add_user(resident.holding)

    def note_boundary(self, key: SessionKey, boundary: int) -> None:
        """Record where a block of a session's resident begins, if it is still there."""
        if key in self._residents:
            self._residents[key] = replace(self._residents[key], boundary=boundary)

    def take(self, key: SessionKey) -> Resident:
        """Remove one that is not busy; whoever takes it needs its slots now."""
        assert not self.is_busy(key), f"the resident of {key} is being copied or compacted"
        resident = self._remove(key)
        self._slots.add_user(resident.holding)
        return resident

    def evict(self, key: SessionKey) -> None:
        """Remove one that is not busy, and release its slots."""
        self._slots.release(self.take(key).holding)

    def drop(self, key: SessionKey) -> bool:
        """Remove a session's resident; False if there is none, or it is being compacted.

        One that is being compacted goes when that ends; who copies one holds its memory.
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
        """Count a request's first tokens whose KV its session's resident has, and that are usable.

        0 if that is of another lineage: the same tokens have other KV there. One less than all
        at most: the last token is always computed. Cheap when repeated for the same request, as
        at every step while that cannot be admitted.
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
            It and the number of usable tokens, one less than all at most; None: there is none.
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
        """Choose the residents to evict for so many slots: enough, if there are enough.

        First those of whom no request waits, the least recently used first; then from the tail of
        the queue to its head. `rank` is a session's position there; `spared` is no victim.
        """
        idle: list[tuple[int, int, Resident]] = []
        queued: list[tuple[Rank, Resident]] = []
        for resident in self._residents.values():
            if resident.key == spared or self.is_busy(resident.key):
                continue
            place = rank(resident.key)
            if place is None:
                idle.append((resident.last_used_ns, len(idle), resident))
            else:
                queued.append((place, resident))
        candidates = [resident for *_, resident in sorted(idle)]
        candidates += [resident for _, resident in sorted(queued, reverse=True)]
        chosen: list[Resident] = []
        for resident in candidates:
            if self._slots.freed_by([other.holding for other in chosen]) >= num_slots:
                break
            chosen.append(resident)
        return [resident.key for resident in chosen]

    def take_surplus(self, rank: Callable[[SessionKey], Rank | None]) -> list[SessionKey]:
        """Remove residents beyond `most`, as far as they may go, in the order of `victims`."""
        taken = []
        while len(self) > self._most and (found := self.victims(1, rank)):
            self.evict(found[0])
            taken.append(found[0])
        return taken

    def unqueued(self, rank: Callable[[SessionKey], Rank | None]) -> list[SessionKey]:
        """List those of whom no request waits and that are not busy."""
        return [key for key in self._residents if not self.is_busy(key) and rank(key) is None]

    # ----------------------------------------------------------------------- copies, compactions

    def is_busy(self, key: SessionKey) -> bool:
        """Whether a session's resident is being copied or compacted, or its turn's KV copied."""
        return key in self._compactions or key in self._copies.values()

    def is_copied_to(self, request: Request) -> bool:
        """Whether a resident is being copied to a request's KV."""
        return request.number in self._copies

    def begin_copy(self, source: SessionKey, request: Request) -> None:
        """Begin to copy a session's resident, or the KV of its turn that runs, to a request's KV.

        The resident may be the request's own session's.
        """
        assert source not in self._compactions, f"the resident of {source} is being compacted"
        assert request.number not in self._copies, f"request {request.number} copies already"
        self._copies[request.number] = source
        if source in self._residents:
            self._slots.add_user(self._residents[source].holding)

    def end_copy(self, request: Request) -> bool:
        """Note that the KV is there; True: it was the session's own resident, which is no more."""
        source = self._copies.get(request.number)
        self.cancel_copy(request)
        return source == request.key and self.drop(source)

    def cancel_copy(self, request: Request) -> None:
        """Keep what was being copied to the KV of a request, which gives that up."""
        source = self._copies.pop(request.number, None)
        if source in self._residents:
            self._slots.remove_user(self._residents[source].holding)

    def begin_compaction(self, key: SessionKey) -> bool:
        """Protect a resident while tokens of it are dropped and the others are compacted.

        False if there is none, or it is busy; else `end_compaction` is owed.
        """
        if key not in self._residents or self.is_busy(key):
            return False
        self._compactions[key] = True
        self._slots.add_user(self._residents[key].holding)
        return True

    def own(self, key: SessionKey, first_token: int) -> list[PageCopy] | None:
        """Give a resident that is to be compacted pages of its own, from a token's on.

        Returns:
            The pages to be copied there before; None: there is no room for them.
        """
        resident = self._residents[key]
        if self._slots.num_shared(resident.holding, first_token) > self._slots.free_slots:
            return None
        return self._slots.own(resident.holding, first_token, resident.window_from)

    def end_compaction(
        self,
        key: SessionKey,
        token_ids: Sequence[int],
        lineage: Lineage | None = None,
        ranges: Sequence[Range] = (),
    ) -> bool:
        """Record that the resident's KV is that of `token_ids` now; False: it was removed.

        It is removed if it has no token left that can be built on, or was dropped meanwhile.

        Args:
            key: the session's key.
            token_ids: what is left of its tokens.
            lineage: theirs.
            ranges: of its tokens before that were dropped, merged.
        """
        is_wanted = self._compactions.pop(key)
        resident = self._residents[key]
        window_from = position_after(resident.window_from, ranges)
        is_usable = is_whole(len(token_ids), window_from, self._attention_window)
        if not (is_wanted and token_ids and is_usable):
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
        """List the slots of all."""
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

    def _num_copies(self, key: SessionKey) -> int:
        return list(self._copies.values()).count(key)

    def _remove(self, key: SessionKey) -> Resident:
        resident = self._residents.pop(key)
        self._index.take(key)
        self.num_slots -= resident.holding.num_slots
        return resident
