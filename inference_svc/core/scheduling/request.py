"""One turn as the scheduler sees it: token ids, how many of them have KV, and a state.

    WAITING ──admit──► LOADING ──announce──► READY ──start──► RUNNING ──finish──► FINISHED
     │  ▲                 │                   │                  │
     │  └──── restart ────┴── preempt, restart┴─────── overflow ─┤
     └─────────────────── cancel: CANCELLED, fail: FAILED ───────┘  (from LOADING and READY, too)

Invariants:
    1. the state moves along TRANSITIONS only;
    2. computed_tokens <= capacity_tokens <= window_tokens: an answer's last token is never fed;
    3. token_ids only grows, but for `discard`, while it waits: what is left keeps its order, and
       the last token, which is to be fed next, always stays;
    4. num_sampled only grows, whatever is discarded: max_tokens bounds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from inference_svc.core.discards import Range, kept_runs, num_in, without
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey

NO_WINDOW = 1 << 62  # rows; more than there will ever be


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

    After a discard all counts but num_sampled are of what is left.

    Attributes:
        number: unique while the engine runs; of equals, the lower one is served first.
        key: the session.
        token_ids: the prompt, then the sampled tokens.
        max_tokens: upper bound of the answer's length.
        window_tokens: rows it may ever fill: the model's window, or what the engine has.
        history_tokens: how many of the prompt's tokens the session had before this turn.
        priority: higher ones are served first.
        deadline_ns: when it fails if it is not finished; None: never.
        lineage: which discards its context comes after; None: not named, for engines without
            discards. Only KV of the same one is of use to it.
        computed_tokens: how many of token_ids have KV in the request's KV. From a preemption
            until the next load is announced: how many its session's resident was left with,
            and are not discarded.
        loaded_tokens: how many were found rather than computed, when it was first admitted.
        capacity_tokens: rows it may fill, set at each admission; its KV has as many or more.
        num_sampled: tokens of the answer so far.
        num_preemptions: how often it was sent back to the queue with its KV kept.
        num_overflows: how often it was sent there because its window was full.
        start_tag: the waiting queue's; see there.
        arrived_ns, admitted_ns, ready_ns, started_ns, first_token_ns, finished_ns: 0 until
            it happens for the first time.
    """

    number: int
    key: SessionKey
    token_ids: list[int]
    max_tokens: int
    arrived_ns: int
    window_tokens: int = NO_WINDOW
    history_tokens: int = 0
    priority: int = 0
    deadline_ns: int | None = None
    lineage: Lineage | None = None
    state: RequestState = RequestState.WAITING
    computed_tokens: int = 0
    loaded_tokens: int = 0
    capacity_tokens: int = 0
    num_sampled: int = 0
    num_preemptions: int = 0
    num_overflows: int = 0
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
        """Rows the longest answer needs, as far as the window has them: its last token needs none.

        With a full window the context is cut before the answer goes on.
        """
        left = self.max_tokens - self.num_sampled
        return min(len(self.token_ids) + left - 1, self.window_tokens)

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens that still have to be fed before the next one can be sampled."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def output_ids(self) -> list[int]:
        """The sampled tokens that are still there."""
        return self.token_ids[self.prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is computed and a sampled token waits to be fed."""
        return self.uncomputed_tokens == 1 and self.num_sampled > 0

    @property
    def unused_rows(self) -> int:
        """Rows it may still fill."""
        return self.capacity_tokens - self.computed_tokens

    @property
    def is_outgrown(self) -> bool:
        """Whether all rows it may fill are filled, and it wants more, which the window has."""
        return not self.unused_rows and self.capacity_tokens < self.full_capacity_tokens

    @property
    def is_overflowing(self) -> bool:
        """Whether it runs, its window is full, and it wants more."""
        is_full = self.computed_tokens == self.window_tokens
        is_running = self.state is RequestState.RUNNING
        return is_running and is_full and self.num_sampled < self.max_tokens

    @property
    def is_back(self) -> bool:
        """Whether it was sent back to the queue with something kept."""
        return self.num_preemptions + self.num_overflows > 0

    @property
    def is_over(self) -> bool:
        """Whether it has ended, one way or another."""
        return not TRANSITIONS[self.state]

    def wanted_capacity(self, answer_tokens: int) -> int:
        """Rows to admit it with: what is known, and room for an answer of ordinary length.

        An answer that has outgrown its room is given as much again, so that a long one is
        preempted a logarithmic number of times.
        """
        wanted = len(self.token_ids) + max(answer_tokens, self.num_sampled, 1) - 1
        return min(wanted, self.full_capacity_tokens)

    def append(self, token_id: int) -> None:
        """Take the token that was sampled."""
        self.token_ids.append(token_id)
        self.num_sampled += 1

    def discard(self, ranges: Sequence[Range]) -> None:
        """Drop tokens of its context; `computed_tokens` counts those that are left, too.

        Args:
            ranges: merged, without the last token.
        """
        assert self.state is RequestState.WAITING, "nobody computes on what is dropped"
        assert not ranges or ranges[-1][1] < len(self.token_ids), "the last token is fed next"
        self.prompt_tokens = num_in(kept_runs(ranges, self.prompt_tokens))
        self.history_tokens = num_in(kept_runs(ranges, self.history_tokens))
        self.computed_tokens = num_in(kept_runs(ranges, self.computed_tokens))
        self.token_ids = without(self.token_ids, ranges)

    def move(self, state: RequestState) -> None:
        """Take a transition of the table."""
        assert state in TRANSITIONS[self.state], f"request {self.number}: {self.state} -> {state}"
        self.state = state
