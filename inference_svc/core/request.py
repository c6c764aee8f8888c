"""One turn as the scheduler sees it: token ids, how many of them have KV, and a state.

    WAITING ──admit──► LOADING ──loaded──► READY ──schedule──► RUNNING ──finish──► FINISHED
       │                  │                  │                    │
       └──────────────────┴───── cancel: CANCELLED, fail: FAILED ─┘

Invariants:
    1. the state moves along TRANSITIONS only;
    2. computed_tokens <= capacity_tokens: the last token of an answer is never fed;
    3. token_ids only grows.
"""

from dataclasses import dataclass, field
from enum import Enum


class RequestState(Enum):
    """Where a request is; see the module's drawing."""

    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


_ENDS = frozenset({RequestState.CANCELLED, RequestState.FAILED})
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: _ENDS | {RequestState.LOADING},
    RequestState.LOADING: _ENDS | {RequestState.READY},
    RequestState.READY: _ENDS | {RequestState.RUNNING},
    RequestState.RUNNING: _ENDS | {RequestState.FINISHED},
    RequestState.FINISHED: frozenset(),
    RequestState.CANCELLED: frozenset(),
    RequestState.FAILED: frozenset(),
}


@dataclass(eq=False)
class Request:
    """A turn's prompt (history and new tokens) and, as they are sampled, its answer's tokens.

    Attributes:
        number: unique while the engine runs; requests are served in this order.
        token_ids: the prompt, then the sampled tokens.
        max_tokens: upper bound of the answer's length.
        computed_tokens: how many of token_ids have KV in the request's slab.
        loaded_tokens: how many of these were loaded rather than computed.
        arrived_ns, admitted_ns, ready_ns, started_ns, first_token_ns, finished_ns: 0 until
            it happens.
    """

    number: int
    token_ids: list[int]
    max_tokens: int
    arrived_ns: int
    state: RequestState = RequestState.WAITING
    computed_tokens: int = 0
    loaded_tokens: int = 0
    admitted_ns: int = 0
    ready_ns: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.token_ids)

    @property
    def capacity_tokens(self) -> int:
        """Rows the slab must have: the last token of the answer needs none."""
        return self.prompt_tokens + self.max_tokens - 1

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens that still have to be fed before the next one can be sampled."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def output_ids(self) -> list[int]:
        """The sampled tokens."""
        return self.token_ids[self.prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is computed and a sampled token waits to be fed."""
        return self.uncomputed_tokens == 1 and len(self.token_ids) > self.prompt_tokens

    def move(self, state: RequestState) -> None:
        """Take a transition of the table."""
        assert state in TRANSITIONS[self.state], f"request {self.number}: {self.state} -> {state}"
        self.state = state
