"""One turn as the scheduler sees it: token ids, how many of them have KV, and a state.

    WAITING ──admit──► LOADING ──announce──► READY ──start──► RUNNING ──finish──► FINISHED
     │  ▲                 │                   │                  │
     │  └──── restart ────┴── preempt, restart┴──────────────────┤
     └─────────────────── cancel: CANCELLED, fail: FAILED ───────┘  (from LOADING and READY, too)

Invariants:
    1. the state moves along TRANSITIONS only;
    2. computed_tokens <= capacity_tokens: the last token of an answer is never fed;
    3. token_ids only grows.
"""

from dataclasses import dataclass, field
from enum import Enum

from shared.session_key import SessionKey


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
_BACK = frozenset({RequestState.WAITING})
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: _ENDS | {RequestState.LOADING},
    RequestState.LOADING: _ENDS | _BACK | {RequestState.READY},
    RequestState.READY: _ENDS | _BACK | {RequestState.RUNNING},
    RequestState.RUNNING: _ENDS | _BACK | {RequestState.FINISHED},
    RequestState.FINISHED: frozenset(),
    RequestState.CANCELLED: frozenset(),
    RequestState.FAILED: frozenset(),
}


@dataclass(eq=False)
class Request:
    """A turn's prompt (history and new tokens) and, as they are sampled, its answer's tokens.

    Attributes:
        number: unique while the engine runs; of equals, the lower one is served first.
        key: the session.
        token_ids: the prompt, then the sampled tokens.
        max_tokens: upper bound of the answer's length.
        history_tokens: how many of the prompt's tokens the session had before this turn.
        priority: higher ones are served first.
        deadline_ns: when it fails if it is not finished; None: never.
        computed_tokens: how many of token_ids have KV in the request's slab. From a preemption
            until the next load is announced: how many its session's resident was left with.
        loaded_tokens: how many were found rather than computed, when it was first admitted.
        capacity_tokens: rows it may fill, set at each admission; its slab has as many or more.
        num_preemptions: how often it was sent back to the queue with its KV kept.
        start_tag: the waiting queue's; see there.
        arrived_ns, admitted_ns, ready_ns, started_ns, first_token_ns, finished_ns: 0 until
            it happens for the first time.
    """

    number: int
    key: SessionKey
    token_ids: list[int]
    max_tokens: int
    arrived_ns: int
    history_tokens: int = 0
    priority: int = 0
    deadline_ns: int | None = None
    state: RequestState = RequestState.WAITING
    computed_tokens: int = 0
    loaded_tokens: int = 0
    capacity_tokens: int = 0
    num_preemptions: int = 0
    start_tag: float = 0.0
    admitted_ns: int = 0
    ready_ns: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.token_ids)

    @property
    def full_capacity_tokens(self) -> int:
        """Rows the longest answer needs: its last token needs none."""
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

    @property
    def unused_rows(self) -> int:
        """Rows it may still fill."""
        return self.capacity_tokens - self.computed_tokens

    @property
    def is_outgrown(self) -> bool:
        """Whether all rows it may fill are filled, and it wants more."""
        return not self.unused_rows and self.capacity_tokens < self.full_capacity_tokens

    @property
    def is_over(self) -> bool:
        """Whether it has ended, one way or another."""
        return not TRANSITIONS[self.state]

    def wanted_capacity(self, answer_tokens: int) -> int:
        """Rows to admit it with: what is known, and room for an answer of ordinary length.

        An answer that has outgrown its room is given as much again, so that a long one is
        preempted a logarithmic number of times.
        """
        output_tokens = len(self.token_ids) - self.prompt_tokens
        wanted = len(self.token_ids) + max(answer_tokens, output_tokens, 1) - 1
        return min(wanted, self.full_capacity_tokens)

    def move(self, state: RequestState) -> None:
        """Take a transition of the table."""
        assert state in TRANSITIONS[self.state], f"request {self.number}: {self.state} -> {state}"
        self.state = state
