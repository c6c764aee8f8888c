"""The requests that are admitted, and what one step computes of those that run.

A step holds every answer under way, and prompt tokens up to a bound: a long prompt is cut, so that
it never holds up answers for longer than its share of a step takes.

*Source:* iteration-level scheduling: Orca (OSDI'22); prompt chunks beside decodes: Sarathi-Serve
(OSDI'24).
"""

from collections.abc import Iterator, Sequence

from inference_svc.core.scheduling.request import Request, RequestState
from inference_svc.core.scheduling.step_plan import PlannedChunk, SchedulerLimits
from shared.types.session_key import SessionKey

_STATES = frozenset({RequestState.LOADING, RequestState.READY, RequestState.RUNNING})


class ActiveRequests:
    """Requests that are admitted and not over: LOADING, READY or RUNNING.

    There are few, so that everything may look at all of them. Invariants (`check`): 1. nothing else
    is here; 2. one request of a session at a time; 3. it has not computed more than it has rows
    for, nor rows for more than its window.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}  # by number, in order of admission

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Add one that is admitted now."""
        self._requests[request.number] = request

    def remove(self, request: Request) -> None:
        """Remove one."""
        del self._requests[request.number]

    def has_session(self, key: SessionKey) -> bool:
        """Whether a session has one."""
        return any(request.key == key for request in self)

    def in_state(self, *states: RequestState) -> list[Request]:
        """Those in one of these states: higher priorities first, then in order of admission."""
        found = [request for request in self if request.state in states]
        return sorted(found, key=lambda request: -request.priority)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert all(request.state in _STATES for request in self)
        assert len(self) == len({request.key for request in self})
        for request in self:
            assert request.computed_tokens <= request.capacity_tokens <= request.window_tokens


def prompt_budget(running: Sequence[Request], limits: SchedulerLimits) -> int:
    """Prompt tokens a step may compute."""
    is_mixed = any(request.is_decoding for request in running)
    return limits.mixed_step_tokens if is_mixed else limits.step_tokens


def plan_chunks(running: Sequence[Request], limits: SchedulerLimits) -> tuple[PlannedChunk, ...]:
    """Choose the chunks of a step; prompts are served in the order of `running`."""
    growing = [
        request for request in running if not (request.is_outgrown or request.is_overflowing)
    ]
    chunks = [PlannedChunk(r, 1, sample=True) for r in growing if r.is_decoding]
    left = prompt_budget(running, limits)
    for request in growing:
        if left and not request.is_decoding:
            num_tokens = min(left, request.uncomputed_tokens)
            sample = num_tokens == request.uncomputed_tokens
            chunks.append(PlannedChunk(request, num_tokens, sample))
            left -= num_tokens
    assert all(c.num_tokens <= c.request.unused_rows for c in chunks), "an answer is too long"
    return tuple(chunks)
