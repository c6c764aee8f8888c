"""Requests that wait: in which order they are admitted, until when, and how soon that is likely.

They are admitted by priority, then fairly between tenants. Of one priority, requests are ordered by
their start tag, which counts tokens of work: a tenant's next request starts, in this virtual time,
where its last one finishes, and one of weight 2 finishes in half the time. A tenant that floods the
queue waits behind its own requests; others pass. Virtual time is the tag of the newest admission;
it catches up when nobody waits.

A turn *arrives* before its prompt is known: its text is still to be encoded. The feed has it about
where it will wait, so that its history can be read meanwhile; its request, of the same number,
takes the place over.

Invariants (`check`): 1. the order is that of (-priority, start tag, number); 2. a request that
comes back has its old tag, so that it is before its equals; 3. a key has a rank while one of its
requests waits; 4. who arrives does not wait yet, and is counted nowhere but in the feed.

*Source:* start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM'96); virtual token counters for LLM
serving: Sheng et al., OSDI'24.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from itertools import islice

from sortedcontainers import SortedList

from inference_svc.core.rates.rates import Rates, pairs
from inference_svc.core.scheduling.request import Request
from shared.types.queue_delta import Rank
from shared.types.queue_feed import QueueFeed
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S


class WaitingQueue:
    """See the module docstring.

    Args:
        weights: tenants' weights; 1 for one that is not named.
        feed: receives each change of who waits.

    Attributes:
        weights: tenants' weights for requests to come; a reload sets them.
    """

    def __init__(self, weights: Mapping[str, float], feed: QueueFeed) -> None:
        self.weights = weights
        self._feed = feed
        self._order: SortedList[Rank] = SortedList()
        self._requests: dict[int, Request] = {}
        self._ranks: dict[SessionKey, list[Rank]] = {}  # of a session's requests, sorted
        self._finish_tags: dict[str, float] = {}  # by tenant, of its newest request
        self._virtual_time = 0.0
        self._arriving: dict[int, SessionKey] = {}  # by number

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[number] for _, _, number in self._order)

    @property
    def head(self) -> Request | None:
        """The next request to be admitted; None if none waits."""
        return self._requests[self._order[0][2]] if self._order else None

    def rank(self, key: SessionKey) -> Rank | None:
        """Return the rank of a session's first request; None if none waits."""
        ranks = self._ranks.get(key)
        return ranks[0] if ranks else None

    def report_arrival(
        self, number: int, key: SessionKey, priority: int, history_tokens: int
    ) -> None:
        """Report a turn of a session whose request will have this number.

        The caller owes `withdraw`, whatever becomes of it.
        """
        self._arriving[number] = key
        rank = (-priority, self._next_tag(key.tenant), number)
        self._feed.waits(rank, key, history_tokens)

    @contextmanager
    def arriving(
        self, number: int, key: SessionKey, priority: int, history_tokens: int
    ) -> Iterator[None]:
        """Report a turn as `arrives` does, and withdraw it behind the block."""
        self.report_arrival(number, key, priority, history_tokens)
        try:
            yield
        finally:
            self.withdraw(number)

    def withdraw(self, number: int) -> None:
        """Report that a turn has left before its request came; nothing if that has come."""
        if self._arriving.pop(number, None) is not None:
            self._feed.left(number)

    def is_arriving(self, key: SessionKey) -> bool:
        """Whether a turn of the session has arrived whose request has not come."""
        return key in self._arriving.values()

    def add(self, request: Request) -> None:
        """Queue a new request, and charge its tenant for it."""
        tenant = request.key.tenant
        tag = request.start_tag = self._next_tag(tenant)
        self._arriving.pop(request.number, None)
        self._finish_tags[tenant] = tag + self._cost(request)
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Queue a request that was admitted before, where it was."""
        rank = _rank_of(request)
        self._order.add(rank)
        insort(self._ranks.setdefault(request.key, []), rank)
        self._requests[request.number] = request
        if request.is_stored:
            self._feed.waits(rank, request.key, request.history_tokens)

    def on_history_change(self, request: Request) -> None:
        """Report that the session of a request that waits has another history now."""
        self._feed.waits(_rank_of(request), request.key, request.history_tokens)

    def admit(self, request: Request) -> None:
        """Take a request out of the queue because it is its turn: it runs from now on."""
        self._take_out(request)
        if request.is_stored:
            self._feed.runs(request.number, request.key)
        self._virtual_time = max(self._virtual_time, request.start_tag)
        if not self._order:
            # Nobody was kept waiting by anybody: who got how much does not matter any more.
            self._virtual_time = max([self._virtual_time, *self._finish_tags.values()])
            self._finish_tags.clear()

    def remove(self, request: Request) -> None:
        """Take out a request that is cancelled; its tenant does not pay for what it never got."""
        self._take_out(request)
        self._feed.left(request.number)
        tenant = request.key.tenant
        if not request.admitted_ns and tenant in self._finish_tags:
            self._finish_tags[tenant] -= self._cost(request)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert list(self._order) == sorted(map(_rank_of, self._requests.values()))
        ranks = [rank for ranks in self._ranks.values() for rank in ranks]
        assert sorted(ranks) == list(self._order)
        assert not self._arriving.keys() & self._requests.keys()
        assert all(ranks == sorted(ranks) for ranks in self._ranks.values())

    def _take_out(self, request: Request) -> None:
        rank = _rank_of(request)
        self._order.remove(rank)
        del self._requests[request.number]
        ranks = self._ranks[request.key]
        ranks.remove(rank)
        if not ranks:
            del self._ranks[request.key]

    def _next_tag(self, tenant: str) -> float:
        """Return the start tag of the tenant's next request."""
        return max(self._virtual_time, self._finish_tags.get(tenant, 0.0))

    def _cost(self, request: Request) -> float:
        """Return the virtual time of a request: tokens to compute over its tenant's weight."""
        new_tokens = max(1, request.prompt_tokens - request.history_tokens)
        weight = self.weights.get(request.key.tenant, 1.0)
        return (new_tokens + request.max_tokens) / weight


def _rank_of(request: Request) -> Rank:
    return (-request.priority, request.start_tag, request.number)


_SPARE = 64  # entries of ended requests that are never worth a clean-up


class Deadlines:
    """Requests by deadline, those that run, too.

    An ended request is forgotten when its turn comes, or when many have ended. Invariant: a request
    that has not ended and has a deadline is in the heap.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []  # deadline_ns, number
        self._clean_up_at = _SPARE

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline. O(log n)."""
        if request.deadline_ns is None:
            return
        heappush(self._heap, (request.deadline_ns, request.number, request))
        if len(self._heap) > self._clean_up_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_over]
            heapify(self._heap)
            self._clean_up_at = 2 * len(self._heap) + _SPARE

    def next_ns(self) -> int | None:
        """Return the earliest deadline of a request that has not ended."""
        while self._heap and self._heap[0][2].is_over:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ns: int) -> list[Request]:
        """Take out the requests whose deadline is not later than now and that have not ended."""
        due = []
        while (deadline_ns := self.next_ns()) is not None and deadline_ns <= now_ns:
            request = heappop(self._heap)[2]
            if request.deadline_ns is not None and request.deadline_ns <= now_ns:
                due.append(request)
            else:  # a repeat of its turn has moved its deadline
                self.add(request)
        return due


UNKNOWN_RETRY_S = 1.0  # a guess at a turn's length, until one was seen
_FEW = 16  # prompts that stand for all that wait
_SHARE = 0.1  # of the newest interval in the mean: about the last ten matter


class StartEstimates:
    """Estimates how often requests that wait are admitted, from the latest ends of requests.

    As often as places became free while somebody waited: an idle engine's pauses say nothing of its
    speed. Before two requests have ended, by what the prompts ahead add to steps.

    Args:
        rates: estimates of steps.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._interval_s: float | None = None  # mean time between two ends
        self._since_ns: int | None = None  # the last end, or when somebody began to wait

    def on_wait(self, now_ns: int) -> None:
        """Record that a request waits now."""
        if self._since_ns is None:
            self._since_ns = now_ns

    def on_end(self, now_ns: int, *, somebody_waits: bool) -> None:
        """Record that a request that was admitted has ended."""
        if self._since_ns is not None:
            newest_s = (now_ns - self._since_ns) / NS_PER_S
            mean_s = newest_s if self._interval_s is None else self._interval_s
            self._interval_s = mean_s + _SHARE * (newest_s - mean_s)
        self._since_ns = now_ns if somebody_waits else None

    def retry_after_s(self) -> float:
        """Return in how many seconds a place in the queue is likely free."""
        return UNKNOWN_RETRY_S if self._interval_s is None else self._interval_s

    def interval_s(self, waiting: Iterable[Request]) -> float:
        """Estimate the mean seconds between two starts; 0 if unknown. `waiting` is in order."""
        if self._interval_s is not None:
            return self._interval_s
        prompts_s = [self._prompt_s(request) for request in islice(waiting, _FEW)]
        return sum(prompts_s) / len(prompts_s) if prompts_s else 0.0

    def _prompt_s(self, request: Request) -> float:
        """Estimate the seconds that the rest of a prompt adds to steps; 0 if unknown."""
        end = len(request.token_ids)
        start = min(max(request.computed_tokens, request.history_tokens), end - 1)
        return self._rates.steps.added_seconds(end - start, pairs(start, end)) or 0.0
