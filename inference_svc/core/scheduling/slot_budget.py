"""Who holds which token slots of working KV; no slot is counted twice, none is lost.

A slot holds K and V of one token, all layers. They are held by requests, as sequences' KV, and by
residents; those of the write ring are counted apart (`write_slots.py`). What happens to them:

    event                 sequence KV
    ───────────────────   ─────────────────────────────────────────────────────────
    admitted, fresh       + capacity
    admitted, in place    the resident's become its own
    admitted, copying     + capacity; the resident's stay
    copied                its own resident's are free
    preempted, overflowed become a resident's
    ended                 stay
    kept                  become a resident's
    restarted, or         free; a copy under way is off, and the resident stays
      release_kv
    resident compacted    stay, however few are in use
    resident evicted      the resident's are free
      or dropped

Invariant (`check`): what requests and residents hold fits.
"""

from collections.abc import Sequence

from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.residents import Resident, Residents


class SlotBudget:
    """The account of token slots; see the module docstring.

    Args:
        num_slots: token slots of sequences' KV and residents together.
        residents: the residents; they may also be taken directly, when one is evicted.

    Attributes:
        reserved_slots: number of slots held by requests.
    """

    def __init__(self, num_slots: int, residents: Residents) -> None:
        self.reserved_slots = 0
        self._num_slots = num_slots
        self._residents = residents
        self._kvs: dict[int, int] = {}  # slots, by request number

    @property
    def free_slots(self) -> int:
        """Number of slots that nobody holds."""
        return self._num_slots - self.reserved_slots - self._residents.num_slots

    def kv_slots(self, request: Request) -> int:
        """Return the slots of a request's KV; 0 if it has none."""
        return self._kvs.get(request.number, 0)

    def reserve(self, request: Request, kv_slots: int) -> None:
        """Give a request KV; it has none."""
        assert request.number not in self._kvs, f"request {request.number} has a sequence's KV"
        self._kvs[request.number] = kv_slots
        self.reserved_slots += kv_slots
        assert self.free_slots >= 0, "more is reserved than there is"

    def take_resident(self, request: Request) -> Resident:
        """Make the slots of a session's resident its request's sequence KV."""
        resident = self._residents.take(request.key)
        self.reserve(request, resident.capacity_tokens)
        return resident

    def become_resident(self, request: Request, token_ids: Sequence[int], now_ns: int) -> None:
        """Make the slots of a request's KV its session's resident."""
        slots = self._kvs.pop(request.number)
        self.reserved_slots -= slots
        self._residents.put(Resident(request.key, tuple(token_ids), slots, now_ns, request.lineage))

    def release_kv(self, request: Request) -> None:
        """Free a request's KV, if it has one."""
        self.reserved_slots -= self._kvs.pop(request.number, 0)
        self._residents.cancel_copy(request)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._residents.check()
        assert self.reserved_slots == sum(self._kvs.values())
        assert self.free_slots >= 0
        assert all(slots > 0 for slots in self._kvs.values())
