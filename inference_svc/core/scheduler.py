"""Which requests are loaded, run and stepped: iteration-level batching over a budget of KV tokens.

Owns the order of requests and the budget; knows nothing of slabs, text, sessions or kvd. The
engine loop calls, in this order,

    submit, admit (load these), loaded, schedule (compute this), apply, finish, release

and no method blocks. First come, first served: a request that does not fit the budget holds back
those behind it, so that nothing starves.

Invariants (`check`):
    1. the reserved tokens are the sum of the capacities of what is admitted and not released, and
       fit the budget;
    2. at most max_running requests run, max_loading load or wait loaded, max_waiting wait;
    3. a step contains every decoding request, and prompt tokens up to the step's bound.

*Source:* iteration-level scheduling: Orca (OSDI'22); prompt chunks beside decodes: Sarathi-Serve
(OSDI'24).
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from inference_svc.core.errors import QueueFullError
from inference_svc.core.request import TRANSITIONS, Request, RequestState


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of the scheduler; all in tokens or requests.

    Attributes:
        kv_tokens: working KV of all admitted requests together, in slab rows.
        step_tokens: prompt tokens computed in one step, over all requests.
    """

    max_running: int
    max_loading: int
    max_waiting: int
    kv_tokens: int
    step_tokens: int


@dataclass(frozen=True)
class PlannedChunk:
    """Feed the next `num_tokens` uncomputed tokens of a request.

    Attributes:
        sample: whether they reach its last token, so that the next one can be sampled.
    """

    request: Request
    num_tokens: int
    sample: bool


class Scheduler:
    """See the module docstring."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._waiting: deque[Request] = deque()
        self._admitted: dict[int, Request] = {}  # by number, in order of admission
        self._reserved_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Requests not yet admitted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that are being computed."""
        return self._count(RequestState.RUNNING)

    def waiting(self) -> Iterable[Request]:
        """Requests not yet admitted, in the order they will be."""
        return iter(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFullError: the waiting queue is at its bound.
        """
        assert request.capacity_tokens <= self._limits.kv_tokens, "the caller checks the window"
        if len(self._waiting) >= self._limits.max_waiting:
            raise QueueFullError(
                f"the queue is full ({len(self._waiting)} turns wait)",
                "submit again later or raise scheduler.max_turns",
            )
        self._waiting.append(request)

    def admit(self, now_ns: int) -> list[Request]:
        """Reserve budget for requests from the head of the queue; the caller loads them now."""
        admitted = []
        while self._waiting and self._has_room_for(self._waiting[0]):
            request = self._waiting.popleft()
            request.move(RequestState.LOADING)
            request.admitted_ns = now_ns
            self._admitted[request.number] = request
            self._reserved_tokens += request.capacity_tokens
            admitted.append(request)
        return admitted

    def loaded(self, request: Request, num_tokens: int, now_ns: int) -> None:
        """Note that a request's slab holds its first tokens; at least one is left to compute."""
        assert 0 <= num_tokens < request.prompt_tokens, "the last prompt token is always computed"
        request.move(RequestState.READY)
        request.computed_tokens = request.loaded_tokens = num_tokens
        request.ready_ns = now_ns

    def schedule(self, now_ns: int) -> tuple[PlannedChunk, ...]:
        """Choose what the next step computes; empty when nothing is ready."""
        self._start_ready(now_ns)
        running = [r for r in self._admitted.values() if r.state is RequestState.RUNNING]
        chunks = [PlannedChunk(r, 1, sample=True) for r in running if r.is_decoding]
        left = self._limits.step_tokens
        for request in running:
            if left and not request.is_decoding:
                num_tokens = min(left, request.uncomputed_tokens)
                sample = num_tokens == request.uncomputed_tokens
                chunks.append(PlannedChunk(request, num_tokens, sample))
                left -= num_tokens
        return tuple(chunks)

    def apply(
        self, chunks: Iterable[PlannedChunk], sampled: Mapping[int, int], now_ns: int
    ) -> None:
        """Advance computed requests and append the sampled tokens, given by request number."""
        for chunk in chunks:
            request = chunk.request
            request.computed_tokens += chunk.num_tokens
            if chunk.sample:
                request.token_ids.append(sampled[request.number])
                request.first_token_ns = request.first_token_ns or now_ns

    def finish(self, request: Request, now_ns: int) -> None:
        """End a running request; its budget stays reserved until `release`."""
        request.move(RequestState.FINISHED)
        request.finished_ns = now_ns

    def stop(self, request: Request, state: RequestState, now_ns: int) -> None:
        """Cancel or fail a request wherever it is; the caller owes `release`."""
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        request.move(state)
        request.finished_ns = now_ns

    def release(self, request: Request) -> None:
        """Give back an ended request's budget, once nothing uses its slab any more."""
        assert not TRANSITIONS[request.state], "only an ended request is released"
        if self._admitted.pop(request.number, None) is not None:
            self._reserved_tokens -= request.capacity_tokens

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        limits = self._limits
        capacities = [request.capacity_tokens for request in self._admitted.values()]
        assert self._reserved_tokens == sum(capacities) <= limits.kv_tokens
        assert self.num_running <= limits.max_running
        assert self._num_not_yet_running() <= limits.max_loading
        assert len(self._waiting) <= limits.max_waiting
        assert all(r.state is RequestState.WAITING for r in self._waiting)

    def _has_room_for(self, request: Request) -> bool:
        fits = self._reserved_tokens + request.capacity_tokens <= self._limits.kv_tokens
        return fits and self._num_not_yet_running() < self._limits.max_loading

    def _start_ready(self, now_ns: int) -> None:
        """Let loaded requests run, in order of admission, while there is room in the batch."""
        room = self._limits.max_running - self.num_running
        for request in self._admitted.values():
            if room > 0 and request.state is RequestState.READY:
                request.move(RequestState.RUNNING)
                request.started_ns = now_ns
                room -= 1

    def _num_not_yet_running(self) -> int:
        return self._count(RequestState.LOADING) + self._count(RequestState.READY)

    def _count(self, state: RequestState) -> int:
        return sum(request.state is state for request in self._admitted.values())
