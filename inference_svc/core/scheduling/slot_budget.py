"""Who holds which token slots of working KV; no slot is counted twice, none is lost.

A slot holds K and V of one token, all layers. They are held by requests, as sequences' KV and as
write buffers, and by residents. What happens to them:

    event                 sequence KV                       write buffer
    ───────────────────   ───────────────────────────────   ─────────────────────────────────────
    admitted, fresh       + capacity                        + capacity promised, the worst case
    admitted, in place    the resident's become its own     + capacity promised
    admitted, copying     + capacity; the resident's stay   + capacity promised
    announced                                               of the promise, what can be new stays
    copied                its own resident's are free
    preempted, overflowed become a resident's               stay
    ended                 stay                              stay
    kept                  become a resident's               stay
    restarted, or         free; a copy under way is         a promise is void; others stay
      release_kv            off, and the resident stays
    release_write                                           the oldest one's are free
    resident compacted    stay, however few are in use
    resident evicted      the resident's are free
      or dropped

A request that was preempted and admitted again may have several write buffers: the last one is its
own, the others are being saved. Without saving there are none.

Invariants (`check`): 1. what requests and residents hold fits; 2. only who has a sequence's KV is
promised a write buffer.
"""

from collections import deque
from collections.abc import Sequence

from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.residents import Resident, Residents


class SlotBudget:
    """The account of token slots; see the module docstring.

    Args:
        num_slots: token slots of sequences' KV, write buffers and residents together.
        residents: the residents; they may also be taken directly, when one is evicted.

    Attributes:
        reserved_slots: number of slots held by requests.
    """

    def __init__(self, num_slots: int, residents: Residents) -> None:
        self.reserved_slots = 0
        self._num_slots = num_slots
        self._residents = residents
        self._kvs: dict[int, int] = {}  # slots, by request number
        self._promises: dict[int, int] = {}  # slots of a write buffer that is not there yet
        self._writes: dict[int, deque[int]] = {}  # slots of each, oldest first

    @property
    def free_slots(self) -> int:
        """Number of slots that nobody holds."""
        return self._num_slots - self.reserved_slots - self._residents.num_slots

    def kv_slots(self, request: Request) -> int:
        """Return the slots of a request's KV; 0 if it has none."""
        return self._kvs.get(request.number, 0)

    def reserve(self, request: Request, kv_slots: int, write_slots: int) -> None:
        """Give a request KV, unless it has some, and promise a write buffer, if it has slots."""
        if kv_slots:
            assert request.number not in self._kvs, f"request {request.number} has a sequence's KV"
            self._kvs[request.number] = kv_slots
        if write_slots:
            assert request.number not in self._promises, f"request {request.number} was promised"
            self._promises[request.number] = write_slots
        self.reserved_slots += kv_slots + write_slots
        assert self.free_slots >= 0, "more is reserved than there is"

    def take_resident(self, request: Request) -> Resident:
        """Make the slots of a session's resident its request's sequence KV."""
        resident = self._residents.take(request.key)
        self.reserve(request, resident.capacity_tokens, 0)
        return resident

    def become_resident(self, request: Request, token_ids: Sequence[int], now_ns: int) -> None:
        """Make the slots of a request's KV its session's resident."""
        slots = self._kvs.pop(request.number)
        self.reserved_slots -= slots
        self._residents.put(Resident(request.key, tuple(token_ids), slots, now_ns, request.lineage))

    def open_write(self, request: Request, write_slots: int) -> None:
        """Give a request the write buffer it was promised, if it was, with no more slots."""
        promised = self._promises.pop(request.number, None)
        if promised is not None:
            assert 0 <= write_slots <= promised, "a write buffer is no larger than was promised"
            self.reserved_slots -= promised - write_slots
            self._writes.setdefault(request.number, deque()).append(write_slots)

    def release_kv(self, request: Request) -> None:
        """Free a request's KV, if it has one, and what it was only promised."""
        self.reserved_slots -= self._kvs.pop(request.number, 0)
        self.reserved_slots -= self._promises.pop(request.number, 0)
        self._residents.cancel_copy(request)

    def release_write(self, request: Request) -> None:
        """Free the oldest of a request's write buffers, if there is one."""
        writes = self._writes.get(request.number)
        if not writes:
            return
        self.reserved_slots -= writes.popleft()
        if not writes:
            del self._writes[request.number]

    def num_writes(self, request: Request) -> int:
        """Return how many write buffers a request has."""
        return len(self._writes.get(request.number, ()))

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._residents.check()
        kv_slots = sum(self._kvs.values())
        write_slots = sum(map(sum, self._writes.values())) + sum(self._promises.values())
        assert self.reserved_slots == kv_slots + write_slots
        assert self.free_slots >= 0
        assert all(slots > 0 for slots in self._kvs.values())
        assert set(self._promises) <= set(self._kvs)
        assert all(writes and min(writes) >= 0 for writes in self._writes.values())
