"""Whose slots of working KV are which: requests' and residents'.

A slot holds K and V of one token, all layers; where layers with a window hold the last tokens only,
some of a long sequence's hold more tokens, of the other layers (`HeldRows`), or a slot is a token's
in one group of layers (`PageGroups`). They are held by
requests, as sequences' KV, and by residents; those of the write ring are counted apart
(`write_slots.py`). What happens to them:

    event                 sequence KV                             … in pages
    ───────────────────   ─────────────────────────────────────   ──────────────────────────────
    admitted, fresh       + capacity
    admitted, in place    the resident's become its own           + those beyond them
    admitted, copying     + capacity; the resident's stay
    admitted, sharing                                             those shared, + those beyond
    copied                its own resident's are free
    has outgrown them                                             + a page
    preempted, overflowed become a resident's                     … without those not in use
    ended                 stay
    kept                  become a resident's                     … without those not in use
    restarted, or         free; a copy under way is off, and the  free once no load is under way
      release_kv          resident stays
    resident compacted    stay, however few are in use            those not in use are free
    resident evicted      the resident's are free                 … that nobody else holds
      or dropped

Invariant (`check`): what requests, residents and loads hold fits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from inference_svc.core.scheduling.held_slots import HeldSlots, Holding
from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.residents import Resident, Residents


class SlotBudget:
    """See the module docstring.

    Args:
        slots: the account of token slots.
        residents: the residents, which hold the others.

    Attributes:
        account: the account of token slots, by holding.
    """

    def __init__(self, slots: HeldSlots, residents: Residents) -> None:
        self.account = slots
        self._pages = slots if isinstance(slots, PagedSlots) else None
        self._residents = residents
        self._kvs: dict[int, Holding] = {}  # by request number
        self._loads: list[Holding] = []

    @property
    def is_paged(self) -> bool:
        """Whether slots are pages: sequences' KV grow, and share what they begin with."""
        return self._pages is not None

    @property
    def reserved_slots(self) -> int:
        """Number of slots of requests; those that several share count for each."""
        return sum(holding.num_slots for holding in self._kvs.values())

    @property
    def shared_slots(self) -> int:
        """Number of slots that there would be more, if nobody shared any."""
        held = self.reserved_slots + self._residents.num_slots
        return held + self.account.free_slots - self.account.num_slots if self.is_paged else 0

    def room(self, preempted: Sequence[Request] = (), kept: Resident | None = None) -> int:
        """Return how many slots could be had by evicting every resident that may be.

        Args:
            preempted: requests that would be residents then.
            kept: a resident that has to stay; None: none has.
        """
        spared = [self._kvs[request.number] for request in preempted]
        stays = None if kept is None else kept.holding
        return self.account.free_slots + self.account.evictable_after(spared, stays)

    def per_token(self, num_slots: int) -> int:
        """Return how many tokens, in all layers, so many slots are."""
        return num_slots // self.account.num_groups

    def kv_slots(self, request: Request) -> int:
        """Return the slots of a request's KV; 0 if it has none."""
        holding = self._kvs.get(request.number)
        return 0 if holding is None else holding.num_slots

    def pages(self, request: Request) -> tuple[int, ...]:
        """Return the pages of a request's KV, in the order of tokens; none where none are."""
        holding = self._kvs.get(request.number)
        return () if holding is None else tuple(holding.pages)

    def whole_pages(self, num_tokens: int) -> int:
        """Return how many of so many tokens fill their page."""
        return num_tokens // self.account.page_tokens * self.account.page_tokens

    def tokens_in_place(self, resident: Resident, num_tokens: int) -> int:
        """Return how many of a resident's first tokens can stay where what follows is written.

        All, unless their last page is filled by other tokens of somebody who shares it.
        """
        whole = self.whole_pages(num_tokens)
        if whole == num_tokens:
            return num_tokens
        behind = self.account.num_shared(resident.holding, whole + self.account.page_tokens)
        is_shared = self.account.num_shared(resident.holding, num_tokens) > behind
        return whole if is_shared else num_tokens

    def growth_in_place(self, resident: Resident, num_tokens: int, capacity_tokens: int) -> int:
        """Return the slots that a resident needs more, to become KV of so many tokens.

        Args:
            resident: the resident.
            num_tokens: number of its first tokens that stay; what is behind is written to.
            capacity_tokens: number of tokens that there is to be room for.
        """
        shared = self.account.num_shared(resident.holding, num_tokens)
        needed = self.account.needed_for(capacity_tokens)
        return max(0, needed - resident.holding.num_slots + shared)

    def reserve(self, request: Request, kv_slots: int) -> None:
        """Give a request so many slots: KV of its own if it has none, else (pages) more of it."""
        holding = self._kvs.get(request.number)
        if holding is None:
            self._kvs[request.number] = self.account.take(kv_slots)
        else:
            assert self._pages is not None, f"request {request.number} has a sequence's KV"
            self._pages.extend(holding, kv_slots)

    def take_resident(self, request: Request) -> Resident:
        """Make the slots of a session's resident its request's sequence KV."""
        assert request.number not in self._kvs, f"request {request.number} has a sequence's KV"
        resident = self._residents.take(request.key)
        self._kvs[request.number] = resident.holding
        return resident

    def write_from(self, request: Request, first_token: int, capacity_tokens: int) -> None:
        """Give a request pages of its own, from a token's on, and none beyond its capacity.

        There is room for them; what is behind the token is written anew.
        """
        holding = self._kvs[request.number]
        self.account.trim(holding, capacity_tokens)
        self.account.own(holding, first_token, request.window_from)

    def write_window(self, request: Request, end_token: int) -> bool:
        """Give a request pages of its own for its next tokens in layers with a window.

        There is room for them; returns whether it has other pages now.
        """
        if self._pages is None or not self._pages.groups.num_windowed:
            return False
        holding = self._kvs[request.number]
        return self._pages.own_window(holding, request.computed_tokens, end_token)

    def shared_by(self, num_tokens: int) -> int:
        """Return how many slots fewer a request takes that shares so many first tokens."""
        return 0 if self._pages is None else self._pages.shared_slots(num_tokens)

    def share(self, request: Request, source: Resident | Request, num_tokens: int) -> None:
        """Give a request the pages of the first tokens of another, which fill them."""
        assert self._pages is not None, "only pages are shared"
        assert request.number not in self._kvs, f"request {request.number} has a sequence's KV"
        shared = self._pages.share(self._holding(source), num_tokens, request.window_from)
        self._kvs[request.number] = shared

    def become_resident(self, request: Request, token_ids: Sequence[int], now_ns: int) -> None:
        """Make the slots of a request's KV its session's resident."""
        holding = self._kvs.pop(request.number)
        self.account.trim(holding, len(token_ids))
        self._residents.put(
            Resident(
                request.key,
                tuple(token_ids),
                holding,
                now_ns,
                request.lineage,
                window_from=request.window_from,
            )
        )

    def release_kv(self, request: Request) -> None:
        """Free a request's KV, if it has one."""
        holding = self._kvs.pop(request.number, None)
        if holding is not None:
            self.account.release(holding)
        self._residents.cancel_copy(request)

    @contextmanager
    def hold_pages(self, request: Request) -> Iterator[None]:
        """Keep a request's pages from being given to others inside the block.

        For a load, which may be at work when its request has ended. Slots that are only counted
        need no such thing: their memory is lent anew when all copies are over.
        """
        if self._pages is None:
            yield
            return
        held = self._pages.hold(self._kvs[request.number])
        self._loads.append(held)
        try:
            yield
        finally:
            self._loads.remove(held)
            self._pages.release(held)

    def _holding(self, source: Resident | Request) -> Holding:
        return source.holding if isinstance(source, Resident) else self._kvs[source.number]

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._residents.check()
        assert all(holding.num_users == 1 for holding in self._kvs.values())
        self.account.check([*self._kvs.values(), *self._loads, *self._residents.holdings()])
