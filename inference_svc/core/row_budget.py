"""Who holds which rows of working KV; no row is counted twice, none is lost.

A row holds K and V of one token, all layers. They are held by requests, as slabs and as write
buffers, and by residents. What happens to them:

    event                 slab                               write buffer
    ─────────────────     ────────────────────────────────   ──────────────────────────────────
    admitted, fresh       + capacity                         + capacity, the worst case
    admitted, in place    the resident's become its own      + capacity, the worst case
    admitted, moving      + capacity; the resident's stay    + capacity, the worst case
    announced                                                shrinks to what can be new
    moved                 the resident's are free
    preempted             become a resident's                stay
    restarted             free                               stay
    ended                 stay                               stay
    kept                  become a resident's
    release_slab          free; a move under way ends, and
                          the resident stays
    release_write                                            the oldest one's are free
    resident evicted or   the resident's are free
     dropped

A request that was preempted and admitted again may have several write buffers: the last one is its
own, the others are being saved. Without saving there are none.

Invariants (`check`): 1. what requests and residents hold fits; 2. nobody holds less than nothing.
"""

from collections import deque
from collections.abc import Sequence

from inference_svc.core.request import Request
from inference_svc.core.residents import Resident, Residents


class RowBudget:
    """See the module docstring.

    Args:
        num_rows: of slabs, write buffers and residents together.
        residents: may also be taken directly, when a resident is given up.

    Attributes:
        reserved_rows: held by requests.
    """

    def __init__(self, num_rows: int, residents: Residents) -> None:
        self.reserved_rows = 0
        self._num_rows = num_rows
        self._residents = residents
        self._slabs: dict[int, int] = {}  # rows, by request number
        self._writes: dict[int, deque[int]] = {}  # rows of each, oldest first

    @property
    def free_rows(self) -> int:
        """Rows nobody holds."""
        return self._num_rows - self.reserved_rows - self._residents.num_rows

    def slab_rows(self, request: Request) -> int:
        """Rows of a request's slab; 0 if it has none."""
        return self._slabs.get(request.number, 0)

    def reserve(self, request: Request, slab_rows: int, write_rows: int) -> None:
        """Give a request a slab, unless it has one, and a write buffer, if that has rows."""
        if slab_rows:
            assert request.number not in self._slabs, f"request {request.number} has a slab"
            self._slabs[request.number] = slab_rows
        if write_rows:
            self._writes.setdefault(request.number, deque()).append(write_rows)
        self.reserved_rows += slab_rows + write_rows
        assert self.free_rows >= 0, "more is reserved than there is"

    def take_resident(self, request: Request) -> Resident:
        """Make the rows of a session's resident its request's slab."""
        resident = self._residents.take(request.key)
        self.reserve(request, resident.capacity_tokens, 0)
        return resident

    def become_resident(self, request: Request, token_ids: Sequence[int], now_ns: int) -> None:
        """Make the rows of a request's slab its session's resident."""
        rows = self._slabs.pop(request.number)
        self.reserved_rows -= rows
        self._residents.put(Resident(request.key, tuple(token_ids), rows, now_ns))

    def shrink_write(self, request: Request, write_rows: int) -> None:
        """Set the rows of a request's own write buffer, if it has one, to no more than now."""
        writes = self._writes.get(request.number)
        if writes:
            assert 0 <= write_rows <= writes[-1], "a write buffer does not grow"
            self.reserved_rows -= writes[-1] - write_rows
            writes[-1] = write_rows

    def release_slab(self, request: Request) -> None:
        """Free a request's slab, if it has one."""
        self.reserved_rows -= self._slabs.pop(request.number, 0)
        self._residents.cancel_move(request)

    def release_write(self, request: Request) -> None:
        """Free the oldest of a request's write buffers, if there is one."""
        writes = self._writes.get(request.number)
        if not writes:
            return
        self.reserved_rows -= writes.popleft()
        if not writes:
            del self._writes[request.number]

    def num_writes(self, request: Request) -> int:
        """How many write buffers a request has."""
        return len(self._writes.get(request.number, ()))

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._residents.check()
        slab_rows = sum(self._slabs.values())
        write_rows = sum(map(sum, self._writes.values()))
        assert self.reserved_rows == slab_rows + write_rows
        assert self.free_rows >= 0
        assert all(rows > 0 for rows in self._slabs.values())
        assert all(writes and min(writes) >= 0 for writes in self._writes.values())
