"""Whether and how a request gets its rows: on its session's resident, or on KV of its own.

    resident large enough      in place: only a write buffer is needed
    resident too small         moved to a new sequence KV, if old and new fit together …
    … or they do not, or it    … on a new sequence KV; a resident of the session is evicted
      is of no use, or none

Other residents are evicted for it, never more than it takes, and none if it cannot be had anyway.
"""

from dataclasses import dataclass

from inference_svc.core.scheduling.request import Request, RequestState
from inference_svc.core.scheduling.residents import Residents
from inference_svc.core.scheduling.row_budget import RowBudget
from inference_svc.core.scheduling.step_plan import Admission, SchedulerLimits
from inference_svc.core.scheduling.waiting_queue import WaitingQueue
from shared.types.session_key import SessionKey


@dataclass(frozen=True)
class Terms:
    """One way to admit a request.

    Attributes:
        capacity_tokens: rows it may fill.
        kv_slots: of a new sequence KV; 0 if it takes the resident's.
        write_rows: of its write buffer, in the worst case.
        resident_tokens: it has from the resident, which must stay for that; 0: it need not.
    """

    capacity_tokens: int
    kv_slots: int
    write_rows: int
    resident_tokens: int = 0

    @property
    def new_rows(self) -> int:
        """Rows that must be free."""
        return self.kv_slots + self.write_rows


class Admissions:
    """See the module docstring."""

    def __init__(
        self, limits: SchedulerLimits, queue: WaitingQueue, rows: RowBudget, residents: Residents
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._rows = rows
        self._residents = residents

    def terms(self, request: Request) -> list[Terms]:
        """The ways to admit a request, the best first; the last one needs the fewest rows."""
        capacity = request.wanted_capacity(self._limits.answer_tokens)
        fresh = Terms(capacity, capacity, self._write_rows(capacity))
        resident = self._residents.get(request.key)
        num_tokens = self._residents.match(request)
        # With less than half of the history, as after a truncation, the store likely has more.
        if resident is None or not num_tokens or 2 * num_tokens < request.history_tokens:
            return [fresh]
        if resident.capacity_tokens >= capacity:
            usable = min(resident.capacity_tokens, request.full_capacity_tokens)
            return [Terms(usable, 0, self._write_rows(usable), num_tokens)]
        return [Terms(capacity, capacity, self._write_rows(capacity), num_tokens), fresh]

    def fits(self, request: Request, terms: Terms, preempted_rows: int = 0) -> bool:
        """Whether there is room, if residents are evicted and so many rows preempted."""
        resident = self._residents.get(request.key)
        spared = resident.capacity_tokens if resident and terms.resident_tokens else 0
        room = self._rows.free_rows + self._residents.evictable_rows - spared + preempted_rows
        return terms.new_rows <= room

    def admit(
        self, request: Request, terms: Terms, now_ns: int
    ) -> tuple[Admission, list[SessionKey]]:
        """Take a request from the queue and reserve its rows; also returns whom that evicts."""
        self._queue.admit(request)
        evicted = []
        if not terms.resident_tokens and request.key in self._residents:
            evicted.append(request.key)
            self._residents.take(request.key)
        missing = terms.new_rows - self._rows.free_rows
        for key in self._residents.victims(missing, self._queue.rank, request.key):
            evicted.append(key)
            self._residents.take(key)
        in_place = bool(terms.resident_tokens) and not terms.kv_slots
        if in_place:
            self._rows.take_resident(request)
        elif terms.resident_tokens:
            self._residents.begin_move(request)
        self._rows.reserve(request, terms.kv_slots, terms.write_rows)
        request.move(RequestState.LOADING)
        request.capacity_tokens = terms.capacity_tokens
        request.admitted_ns = request.admitted_ns or now_ns
        return Admission(request, terms.resident_tokens, in_place), evicted

    def _write_rows(self, capacity_tokens: int) -> int:
        return capacity_tokens if self._limits.saves else 0
