"""The order in which requests are admitted: by priority, then fairly between tenants.

Of one priority, requests are ordered by their start tag, which counts tokens of work: a tenant's
next request starts, in this virtual time, where its last one finishes, and one of weight 2
finishes in half the time. A tenant that floods the queue waits behind its own requests; others
pass. Virtual time is the tag of the newest admission; it catches up when nobody waits.

Invariants (`check`): 1. the order is that of (-priority, start tag, number); 2. a request that
comes back has its old tag, so that it is before its equals; 3. a key has a rank while one of its
requests waits.

*Source:* start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM'96); virtual token counters for LLM
serving: Sheng et al., OSDI'24.
"""

from bisect import insort
from collections.abc import Iterator, Mapping

from sortedcontainers import SortedList

from inference_svc.core.scheduling.request import Request
from shared.kvd_client.queue_feed import QueueFeed
from shared.types.queue_delta import Rank
from shared.types.session_key import SessionKey


class WaitingQueue:
    """See the module docstring.

    Args:
        weights: of tenants; 1 for one that is not there.
        feed: is told who waits, and who does not any more.

    Attributes:
        weights: as above, of requests to come; a reload sets it.
    """

    def __init__(self, weights: Mapping[str, float], feed: QueueFeed) -> None:
        self.weights = weights
        self._feed = feed
        self._order: SortedList[Rank] = SortedList()
        self._requests: dict[int, Request] = {}
        self._ranks: dict[SessionKey, list[Rank]] = {}  # of a session's requests, sorted
        self._finish_tags: dict[str, float] = {}  # by tenant, of its newest request
        self._virtual_time = 0.0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[number] for _, _, number in self._order)

    @property
    def head(self) -> Request | None:
        """The next to be admitted."""
        return self._requests[self._order[0][2]] if self._order else None

    def rank(self, key: SessionKey) -> Rank | None:
        """Where a session's first request stands; None if none waits."""
        ranks = self._ranks.get(key)
        return ranks[0] if ranks else None

    def add(self, request: Request) -> None:
        """Queue a new request, and charge its tenant for it."""
        tenant = request.key.tenant
        tag = max(self._virtual_time, self._finish_tags.get(tenant, 0.0))
        request.start_tag = tag
        self._finish_tags[tenant] = tag + self._cost(request)
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Queue a request that was admitted before, where it was."""
        rank = _rank_of(request)
        self._order.add(rank)
        insort(self._ranks.setdefault(request.key, []), rank)
        self._requests[request.number] = request
        self._feed.waits(rank, request.key, request.history_tokens)

    def history_changed(self, request: Request) -> None:
        """Tell of a request that waits that its session has another history now."""
        self._feed.waits(_rank_of(request), request.key, request.history_tokens)

    def admit(self, request: Request) -> None:
        """Take a request out of the queue because it is its turn: it runs from now on."""
        self._take_out(request)
        self._feed.runs(request.number, request.key)
        self._virtual_time = max(self._virtual_time, request.start_tag)
        if not self._order:
            # Nobody was kept waiting by anybody: who got how much does not matter any more.
            self._virtual_time = max([self._virtual_time, *self._finish_tags.values()])
            self._finish_tags.clear()

    def remove(self, request: Request) -> None:
        """Take a request out that gave up; a tenant does not pay for what it never got."""
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
        assert all(ranks == sorted(ranks) for ranks in self._ranks.values())

    def _take_out(self, request: Request) -> None:
        rank = _rank_of(request)
        self._order.remove(rank)
        del self._requests[request.number]
        ranks = self._ranks[request.key]
        ranks.remove(rank)
        if not ranks:
            del self._ranks[request.key]

    def _cost(self, request: Request) -> float:
        """Virtual time of a request: the tokens it may compute, over its tenant's weight."""
        new_tokens = max(1, request.prompt_tokens - request.history_tokens)
        weight = self.weights.get(request.key.tenant, 1.0)
        return (new_tokens + request.max_tokens) / weight


def _rank_of(request: Request) -> Rank:
    return (-request.priority, request.start_tag, request.number)
