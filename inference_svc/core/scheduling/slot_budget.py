"""The account of token slots by owner: requests, residents, and loads.

A slot holds K and V of one token in all layers. Where layers with a window hold the last tokens
only, there are two exceptions: some slots of a long sequence hold more tokens, of the other layers
(`HeldRows`), or a slot is a token's in one group of layers (`PageGroups`). Requests hold slots as
sequence KV, and residents hold the others; those of the write ring are counted apart
(`write_slots.py`). Changes of ownership:

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
    restarted, or         free; a copy under way is cancelled,    free once no load is under way
      release_kv          and the resident stays
    resident compacted    stay, however few are in use            those not in use are free
    resident evicted      the resident's are free                 … that no other sequence holds
      or dropped

Invariant (`check`): requests, residents and loads together hold no more slots than there are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from inference_svc.core.scheduling.held_slots import HeldSlots, Holding, SlotTally
from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.residents import Resident, Residents


class SlotBudget:
    """The slots of each request, and what residents add to them.

    Args:
        slots: the account of token slots, by holding.
        residents: the residents, which hold the other slots.

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
        """Whether slots are pages, so that sequences' KV can grow and share pages of a prefix."""
        return self._pages is not None

    @property
    def reserved_slots(self) -> int:
        """Number of slots of requests; a shared slot counts for each request that holds it."""
        return sum(holding.num_slots for holding in self._kvs.values())

    @property
    def shared_slots(self) -> int:
        """Number of slots that sharing saves."""
        held = self.reserved_slots + self._residents.num_slots
        return held + self.account.free_slots - self.account.num_slots if self.is_paged else 0

    def tally_room(self, kept: Resident | Request | None = None) -> SlotTally:
        """Begin to count the slots that would be free if every resident that may be evicted were.

        The holdings of requests whose KV would be residents' then may be added.

        Args:
            kept: the holder whose slots have to stay; None: none has.
        """
        tally = self.account.tally_evictable(None if kept is None else self.holding(kept))
        tally.num_slots += self.account.free_slots
        return tally

    def per_token(self, num_slots: int) -> int:
        """Return how many tokens, in all layers, `num_slots` slots hold."""
        return num_slots // self.account.num_groups

    def holding(self, source: Resident | Request) -> Holding:
        """Return the slots of a resident, or of a request that has KV."""
        return source.holding if isinstance(source, Resident) else self._kvs[source.number]

    def kv_slots(self, request: Request) -> int:
        """Return the number of slots of a request's KV; 0 if it has none."""
        holding = self._kvs.get(request.number)
        return 0 if holding is None else holding.num_slots

    def pages(self, request: Request) -> tuple[int, ...]:
        """Return the pages of a request's KV, in the order of tokens; empty if it has none."""
        holding = self._kvs.get(request.number)
        return () if holding is None else tuple(holding.pages)

    def whole_pages(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` first tokens fill whole pages."""
        return num_tokens // self.account.page_tokens * self.account.page_tokens

    def tokens_in_place(self, resident: Resident, num_tokens: int) -> int:
        """Return how many of a resident's first tokens can stay when new tokens are appended.

        That is all of them, unless their last page is partly filled by other tokens of a sequence
        that shares it.
        """
        whole = self.whole_pages(num_tokens)
        if whole == num_tokens:
            return num_tokens
        behind = self.account.num_shared(resident.holding, whole + self.account.page_tokens)
        is_shared = self.account.num_shared(resident.holding, num_tokens) > behind
        return whole if is_shared else num_tokens

    def growth_in_place(self, resident: Resident, num_tokens: int, capacity_tokens: int) -> int:
        """Return how many more slots a resident needs to become KV of `capacity_tokens` tokens.

        Args:
            resident: the resident.
            num_tokens: number of its first tokens that stay; what is behind them is overwritten.
            capacity_tokens: number of tokens to have room for.
        """
        shared = self.account.num_shared(resident.holding, num_tokens)
        needed = self.account.needed_for(capacity_tokens)
        return max(0, needed - resident.holding.num_slots + shared)

    def reserve(self, request: Request, kv_slots: int) -> None:
        """Reserve slots for a request: new KV if it has none, else (pages only) more of it."""
        holding = self._kvs.get(request.number)
        if holding is None:
            self._kvs[request.number] = self.account.take(kv_slots)
        else:
            assert self._pages is not None, f"request {request.number} has a sequence's KV"
            self._pages.extend(holding, kv_slots)

    def take_resident(self, request: Request) -> Resident:
        """Make the slots of a session's resident its request's KV."""
        assert request.number not in self._kvs, f"request {request.number} has a sequence's KV"
        resident = self._residents.take(request.key)
        self._kvs[request.number] = resident.holding
        return resident

    def write_from(self, request: Request, first_token: int, capacity_tokens: int) -> None:
        """Give a request pages of its own from a token on, and none beyond its capacity.

        There is room for them. KV behind the token is computed again.
        """
        holding = self._kvs[request.number]
        self.account.trim(holding, capacity_tokens)
        self.account.make_private(holding, first_token, request.window_from)

    def write_window(self, request: Request, end_token: int) -> bool:
        """Give a request pages of its own for its next tokens in layers with a window.

        There is room for them.

        Returns:
            Whether its pages changed.
        """
        if self._pages is None or not self._pages.groups.num_windowed:
            return False
        holding = self._kvs[request.number]
        return self._pages.make_window_private(holding, request.computed_tokens, end_token)

    def shared_by(self, num_tokens: int) -> int:
        """Return how many slots a request saves by sharing `num_tokens` first tokens."""
        return 0 if self._pages is None else self._pages.shared_slots(num_tokens)

    def share(self, request: Request, source: Resident | Request, num_tokens: int) -> None:
        """Give a request the pages of another sequence's first tokens, which fill whole pages."""
        assert self._pages is not None, "only pages are shared"
        assert request.number not in self._kvs, f"request {request.number} has a sequence's KV"
        shared = self._pages.share(self.holding(source), num_tokens, request.window_from)
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
        """Free a request's KV, if it has any."""
        holding = self._kvs.pop(request.number, None)
        if holding is not None:
            self.account.release(holding)
        self._residents.cancel_copy(request)

    @contextmanager
    def hold_pages(self, request: Request) -> Iterator[None]:
        """Keep a request's pages from being reused inside the block.

        A load may still write to them when its request has ended. Slots that are only counted do
        not need this: their memory is reused only when all copies to it are over.
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

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._residents.check()
        assert all(holding.num_users == 1 for holding in self._kvs.values())
        self.account.check([*self._kvs.values(), *self._loads, *self._residents.holdings()])
