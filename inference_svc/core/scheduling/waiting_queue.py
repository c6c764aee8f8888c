"""Requests that wait: their order of admission, their deadlines, and estimates of their start.

Requests are admitted by priority, then fairly between tenants. Requests of the same priority are
ordered by their start tag, which counts tokens of work. A tenant's next request starts, in this
virtual time, where the tenant's last one finishes; with weight 2 a request finishes in half the
time. A tenant that floods the queue waits behind its own requests, and other tenants overtake it.
Virtual time is the tag of the newest admission; it catches up when the queue is empty.

A turn *arrives* before its prompt is known, because its text is still to be tokenized. The feed
reports it about where it will wait, so that kvd can read its history ahead. Later its request, of
the same number, takes this place over.

Invariants (`check`): 1. the order is that of (-priority, start tag, number); 2. a request that
returns has its old tag, so that it is before its equals; 3. a key has a rank while one of its
requests waits; 4. an arriving turn is not in the queue yet, and is counted in the feed only.

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
    """The waiting requests, in the order in which they will be admitted.

    Args:
        weights: tenants' weights; 1 for a tenant without one.
        feed: receives each change of the queue.

    Attributes:
        weights: tenants' weights for new requests; a reload of the settings replaces them.
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
        """The next request to be admitted; None if the queue is empty."""
        return self._requests[self._order[0][2]] if self._order else None

    def rank(self, key: SessionKey) -> Rank | None:
        """Return the rank of a session's first waiting request; None if none waits."""
        ranks = self._ranks.get(key)
        return ranks[0] if ranks else None

    def report_arrival(
        self, number: int, key: SessionKey, priority: int, history_tokens: int
    ) -> None:
        """Report a turn whose request is not made yet, for kvd to read its history ahead.

        Args:
            number: the number that its request will have.
            key: its session's key.
            priority: the priority that its request will have.
            history_tokens: number of tokens of its session's history.

        The caller owes `withdraw`, also when the request has been queued.
        """
        self._arriving[number] = key
        rank = (-priority, self._next_tag(key.tenant), number)
        self._feed.on_wait(rank, key, history_tokens)

    @contextmanager
    def arriving(
        self, number: int, key: SessionKey, priority: int, history_tokens: int
    ) -> Iterator[None]:
        """Report a turn as `report_arrival` does, and withdraw it at the end of the block."""
        self.report_arrival(number, key, priority, history_tokens)
        try:
            yield
        finally:
            self.withdraw(number)

    def withdraw(self, number: int) -> None:
        """Report that an arriving turn has left; do nothing if its request has been queued."""
        if self._arriving.pop(number, None) is not None:
            self._feed.on_leave(number)

    def is_arriving(self, key: SessionKey) -> bool:
        """Return whether a turn of the session has arrived whose request is not queued yet."""
        return key in self._arriving.values()

    def add(self, request: Request) -> None:
        """Queue a new request, and charge its tenant for it."""
        tenant = request.key.tenant
        tag = request.start_tag = self._next_tag(tenant)
        self._arriving.pop(request.number, None)
        self._finish_tags[tenant] = tag + self._cost(request)
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Queue a request that was admitted before, at its old place."""
        rank = _rank_of(request)
        self._order.add(rank)
        insort(self._ranks.setdefault(request.key, []), rank)
        self._requests[request.number] = request
        if request.is_stored:
            self._feed.on_wait(rank, request.key, request.history_tokens)

    def on_history_change(self, request: Request) -> None:
        """Report the new length of a waiting request's history."""
        self._feed.on_wait(_rank_of(request), request.key, request.history_tokens)

    def admit(self, request: Request) -> None:
        """Take a request out of the queue to be admitted, and report that it runs."""
        self._take_out(request)
        if request.is_stored:
            self._feed.on_run(request.number, request.key)
        self._virtual_time = max(self._virtual_time, request.start_tag)
        if not self._order:
            # The queue is empty, no tenant delays another: what each one got matters no more.
            self._virtual_time = max([self._virtual_time, *self._finish_tags.values()])
            self._finish_tags.clear()

    def remove(self, request: Request) -> None:
        """Remove a request that ended while it waited.

        Its tenant is charged for it only if it was admitted before.
        """
        self._take_out(request)
        self._feed.on_leave(request.number)
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
        """Return a request's virtual time: its tokens to compute divided by its tenant's weight."""
        new_tokens = max(1, request.prompt_tokens - request.history_tokens)
        weight = self.weights.get(request.key.tenant, 1.0)
        return (new_tokens + request.max_tokens) / weight


def _rank_of(request: Request) -> Rank:
    return (-request.priority, request.start_tag, request.number)


_SPARE = 64  # entries of ended requests that are never worth a clean-up


class Deadlines:
    """Requests by deadline, the running ones included.

    An ended request is removed when its deadline comes, or when many have ended. Invariant: every
    request that has a deadline and has not ended is in the heap.
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
        """Remove and return the requests that have not ended and whose deadline has passed."""
        due = []
        while (deadline_ns := self.next_ns()) is not None and deadline_ns <= now_ns:
            request = heappop(self._heap)[2]
            if request.deadline_ns is not None and request.deadline_ns <= now_ns:
                due.append(request)
            else:  # a repeat of its turn has moved its deadline
                self.add(request)
        return due


UNKNOWN_RETRY_S = 1.0  # a guess at a turn's length, until one has ended
_NUM_SAMPLED_PROMPTS = 16  # prompts at the head of the queue, from which the mean is taken
_NEWEST_WEIGHT = 0.1  # weight of the newest interval in the mean: about the last ten matter


class StartEstimates:
    """Estimates how often waiting requests are admitted, from the latest ends of requests.

    The estimate is the mean interval at which places became free while requests waited: an idle
    engine's pauses do not tell its speed. Before two requests have ended, it is the time that the
    first prompts of the queue add to steps.

    Args:
        rates: estimates of steps.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._interval_s: float | None = None  # mean time between two ends
        self._since_ns: int | None = None  # the last end, or when a request began to wait

    def on_wait(self, now_ns: int) -> None:
        """Record that a request waits now."""
        if self._since_ns is None:
            self._since_ns = now_ns

    def on_end(self, now_ns: int, *, is_queue_busy: bool) -> None:
        """Record that a request that was admitted has ended."""
        if self._since_ns is not None:
            newest_s = (now_ns - self._since_ns) / NS_PER_S
            mean_s = newest_s if self._interval_s is None else self._interval_s
            self._interval_s = mean_s + _NEWEST_WEIGHT * (newest_s - mean_s)
        self._since_ns = now_ns if is_queue_busy else None

    def retry_after_s(self) -> float:
        """Return in how many seconds a place in the queue will likely be free."""
        return UNKNOWN_RETRY_S if self._interval_s is None else self._interval_s

    def interval_s(self, waiting: Iterable[Request]) -> float:
        """Estimate the mean seconds between two starts; 0 if unknown.

        Args:
            waiting: the waiting requests, in order.
        """
        if self._interval_s is not None:
            return self._interval_s
        prompts_s = [self._prompt_s(request) for request in islice(waiting, _NUM_SAMPLED_PROMPTS)]
        return sum(prompts_s) / len(prompts_s) if prompts_s else 0.0

    def _prompt_s(self, request: Request) -> float:
        """Estimate the seconds that the uncomputed part of a prompt adds to steps; 0 if unknown."""
        end = len(request.token_ids)
        start = min(max(request.computed_tokens, request.history_tokens), end - 1)
        return self._rates.steps.added_seconds(end - start, pairs(start, end)) or 0.0
