"""Requests that are admitted and not over: LOADING, READY or RUNNING.

Invariants (`check`): 1. nothing else is here; 2. one request of a session at a time; 3. it has not
computed more than it has rows for, nor rows for more than its window.
"""

from collections.abc import Iterator

from inference_svc.core.scheduling.request import Request, RequestState
from shared.types.session_key import SessionKey

_STATES = frozenset({RequestState.LOADING, RequestState.READY, RequestState.RUNNING})


class ActiveRequests:
    """See the module docstring. There are few, so that everything may look at all of them."""

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
