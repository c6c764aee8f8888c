"""A turn as the scheduler sees it: its token ids, how many of them have KV, and a state.

The table REQUEST_MOVES is the life of a request; inference_svc/README.md has it as a drawing.

Invariants:
    1. the state changes along REQUEST_MOVES only;
    2. computed_tokens <= capacity_tokens <= window_tokens: an answer's last token is never fed;
    3. token_ids only grows, except by `discard` while the request waits. What is left then keeps
       its order, and the last token, which is to be fed next, always stays;
    4. num_sampled only grows, whatever is discarded: max_tokens bounds it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from inference_svc.core.ranges import Range, kept_runs, num_in, without
from inference_svc.core.scheduling.prefix_index import PrefixIndex
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey
from shared.types.transitions import Transitions

NO_WINDOW = 1 << 62  # slots; more than there will ever be


class RequestState(Enum):
    """The states of a request."""

    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class RequestEvent(StrEnum):
    """The events that change a request's state.

    Attributes:
        ADMIT: it got slots; its history may be loaded.
        ANNOUNCE: the number of its history's tokens that will have KV is certain.
        START: it joins the batch.
        PREEMPT: another request takes its place, or it has outgrown its slots; its computed KV
            stays.
        OVERFLOW: its window is full; its context is cut before it is admitted again.
        RESTART: its load failed or is impossible; nothing is kept.
        FINISH: its answer is complete.
        CANCEL: its client disconnected or stopped it.
        FAIL: it cannot be answered, or its deadline passed.
    """

    ADMIT = "admit"
    ANNOUNCE = "announce"
    START = "start"
    PREEMPT = "preempt"
    OVERFLOW = "overflow"
    RESTART = "restart"
    FINISH = "finish"
    CANCEL = "cancel"
    FAIL = "fail"


_STOPS: dict[str, RequestState] = {
    RequestEvent.CANCEL: RequestState.CANCELLED,
    RequestEvent.FAIL: RequestState.FAILED,
}
REQUEST_MOVES = Transitions(
    {
        RequestState.WAITING: {RequestEvent.ADMIT: RequestState.LOADING, **_STOPS},
        RequestState.LOADING: {
            RequestEvent.ANNOUNCE: RequestState.READY,
            RequestEvent.RESTART: RequestState.WAITING,
            **_STOPS,
        },
        RequestState.READY: {
            RequestEvent.START: RequestState.RUNNING,
            RequestEvent.PREEMPT: RequestState.WAITING,
            RequestEvent.RESTART: RequestState.WAITING,
            **_STOPS,
        },
        RequestState.RUNNING: {
            RequestEvent.FINISH: RequestState.FINISHED,
            RequestEvent.PREEMPT: RequestState.WAITING,
            RequestEvent.OVERFLOW: RequestState.WAITING,
            RequestEvent.RESTART: RequestState.WAITING,
            **_STOPS,
        },
        RequestState.FINISHED: {},
        RequestState.CANCELLED: {},
        RequestState.FAILED: {},
    }
)


_ADMITTED = frozenset({RequestState.LOADING, RequestState.READY, RequestState.RUNNING})


@dataclass(eq=False)
class Request:
    """A turn's prompt (history and new tokens), then its answer's tokens as they are sampled.

    After a discard all counts except num_sampled refer to the tokens that are left.

    Attributes:
        number: unique while the engine runs; of equal requests, the lower number is served first.
        key: the session's key.
        token_ids: the prompt, then the sampled tokens.
        max_tokens: most tokens of the answer.
        window_tokens: most tokens it may ever have KV of: the model's window, or the engine's room.
        history_tokens: number of the prompt's tokens that the session had before this turn.
        priority: higher priorities are served first.
        deadline_ns: time at which it fails unless it is finished; None: never.
        lineage: the discards that precede its context. Only KV of the same lineage can be reused.
            None: not named, for engines without discards.
        may_share: whether KV that another session has of the same tokens may be reused.
        is_stored: whether it is a turn of a session that a store knows and saves; otherwise its KV
            is lost when it ends.
        marks: positions at which a chunk ends, ascending: the state at each of them is to be
            stored.
        computed_tokens: how many of token_ids have KV in the request's KV. From a preemption until
            the next load is announced: how many its session's resident got and still has.
        loaded_tokens: how many were found rather than computed, when it was first admitted.
        boundary: position of a token at which a stored block begins, from which blocks are counted;
            set when its load is announced.
        whole_until: where the first stored block begins that is partial and has others behind it.
            Only its session can store blocks behind that one. None: no such block is known.
        window_from: first token with KV in layers with a window; set at each admission, when its
            load is announced, and before a step. See core/attention_window.py.
        capacity_tokens: tokens it may have KV of, set at each admission; its slots hold as many or
            more.
        num_sampled: number of the answer's tokens so far.
        num_preemptions: number of times it returned to the queue with its KV kept.
        num_overflows: number of times it returned there because its window was full.
        start_tag: its place in the waiting queue's virtual time; see `waiting_queue.py`.
        is_saved: whether its new KV takes slots of the write ring until that is stored.
        buffer_layers: number of its history's layers that the start gate required before it first
            joined the batch. None: it has not joined, or all layers were there.
        arrived_ns, admitted_ns, ready_ns, started_ns, first_token_ns, finished_ns: times; 0 until
            the event happens for the first time.
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
    may_share: bool = True
    is_stored: bool = True
    marks: tuple[int, ...] = ()
    state: RequestState = RequestState.WAITING
    computed_tokens: int = 0
    loaded_tokens: int = 0
    boundary: int = 0
    whole_until: int | None = None
    window_from: int = 0
    capacity_tokens: int = 0
    num_sampled: int = 0
    num_preemptions: int = 0
    num_overflows: int = 0
    start_tag: float = 0.0
    is_saved: bool = False
    buffer_layers: float | None = None
    admitted_ns: int = 0
    ready_ns: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.token_ids)

    @property
    def scope(self) -> tuple[str, str, Lineage | None]:
        """The values that have to be equal for equal tokens to have equal KV."""
        return self.key.tenant, self.key.model, self.lineage

    @property
    def full_capacity_tokens(self) -> int:
        """Tokens with KV of the longest possible answer, bounded by the window.

        The last token of an answer needs no KV. With a full window the context is cut before the
        answer resumes.
        """
        left = self.max_tokens - self.num_sampled
        return min(len(self.token_ids) + left - 1, self.window_tokens)

    @property
    def uncomputed_tokens(self) -> int:
        """Number of tokens that have to be fed before the next one can be sampled."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of its next chunk: up to the next mark, or to the last token."""
        end = next((mark for mark in self.marks if mark > self.computed_tokens), None)
        return self.uncomputed_tokens if end is None else end - self.computed_tokens

    @property
    def output_ids(self) -> list[int]:
        """The sampled tokens that are still there."""
        return self.token_ids[self.prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is computed, and a sampled token is to be fed next."""
        return self.uncomputed_tokens == 1 and self.num_sampled > 0

    @property
    def unused_slots(self) -> int:
        """Number of tokens that it still has room for."""
        return self.capacity_tokens - self.computed_tokens

    @property
    def has_outgrown_slots(self) -> bool:
        """Whether all its slots are filled, and it needs more, for which the window has room."""
        return not self.unused_slots and self.capacity_tokens < self.full_capacity_tokens

    @property
    def is_overflowing(self) -> bool:
        """Whether it runs, its window is full, and it needs more."""
        is_full = self.computed_tokens == self.window_tokens
        is_running = self.state is RequestState.RUNNING
        return is_running and is_full and self.num_sampled < self.max_tokens

    @property
    def has_returned(self) -> bool:
        """Whether it has returned to the queue with KV kept."""
        return self.num_preemptions + self.num_overflows > 0

    @property
    def is_over(self) -> bool:
        """Whether it has finished, was cancelled, or failed."""
        return REQUEST_MOVES.is_final(self.state)

    def capacity_to_admit(self, answer_tokens: int) -> int:
        """Return the number of tokens to admit it with: its tokens and an answer of usual length.

        An answer that has outgrown its room gets twice as much, so that a long answer is preempted
        a logarithmic number of times.
        """
        wanted = len(self.token_ids) + max(answer_tokens, self.num_sampled, 1) - 1
        return min(wanted, self.full_capacity_tokens)

    def append(self, token_id: int) -> None:
        """Append a sampled token."""
        self.token_ids.append(token_id)
        self.num_sampled += 1

    def discard(self, ranges: Sequence[Range]) -> None:
        """Drop tokens of its context; `computed_tokens` is reduced accordingly.

        Args:
            ranges: merged ranges, without the last token.
        """
        assert self.state is RequestState.WAITING, "nobody computes on what is dropped"
        assert not ranges or ranges[-1][1] < len(self.token_ids), "the last token is fed next"
        self.prompt_tokens = num_in(kept_runs(ranges, self.prompt_tokens))
        self.history_tokens = num_in(kept_runs(ranges, self.history_tokens))
        self.computed_tokens = num_in(kept_runs(ranges, self.computed_tokens))
        if self.whole_until is not None:
            self.whole_until = num_in(kept_runs(ranges, self.whole_until))
        self.marks = tuple(num_in(kept_runs(ranges, mark)) for mark in self.marks)
        self.token_ids = without(self.token_ids, ranges)

    def note_block_end(self, num_tokens: int, block_tokens: int) -> None:
        """Record that a stored block ends behind so many tokens, whether it is full or not."""
        part = (num_tokens - self.boundary) % block_tokens
        if part and self.whole_until is None:
            self.whole_until = num_tokens - part

    def move(self, event: RequestEvent) -> None:
        """Change the state by an event, which REQUEST_MOVES has to allow in this state."""
        self.state = REQUEST_MOVES.after(self.state, event)


class ActiveRequests:
    """Requests that are admitted and not over: LOADING, READY or RUNNING.

    There are few of them, so that every method may look at all. Invariants (`check`): 1. there are
    no others; 2. a session has at most one; 3. none has computed more tokens than it has slots for,
    nor has slots for more than its window; 4. the index of prefixes holds the tokens they were
    admitted with. It also holds those of finished requests, until their KV is kept or released.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}  # by number, in order of admission
        self._finished: dict[int, Request] = {}  # by number; their KV is still in place
        self._prefixes: PrefixIndex[int] = PrefixIndex()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Add a request that is being admitted."""
        self._requests[request.number] = request
        self._prefixes.put(request.number, request.scope, request.token_ids)

    def remove(self, request: Request) -> None:
        """Remove a request; if it is finished, its KV can be shared until `forget_kv`."""
        del self._requests[request.number]
        if request.state is RequestState.FINISHED:
            self._finished[request.number] = request
        else:
            self._prefixes.take(request.number)

    def forget_kv(self, request: Request) -> None:
        """Record that the KV of a request that is over became a resident or was released."""
        if self._finished.pop(request.number, None) is not None:
            self._prefixes.take(request.number)

    def has_session(self, key: SessionKey) -> bool:
        """Return whether a session has an active request."""
        return any(request.key == key for request in self)

    def longest_prefix(
        self, request: Request, is_usable: Callable[[Request], bool] = lambda _: True
    ) -> tuple[Request, int] | None:
        """Find the request that has, or will have, the KV of most of a request's first tokens.

        Args:
            request: the request.
            is_usable: whether a request may be the result.

        Returns:
            The request that was admitted first among the best, and the number of tokens: at most
            all but one. None: no request shares a token.
        """
        found = self._prefixes.longest(
            request.scope, request.token_ids[:-1], lambda number: is_usable(self._by(number))
        )
        return None if found is None else (self._by(found[0]), found[1])

    def in_state(self, *states: RequestState) -> list[Request]:
        """List the requests in one of these states: highest priority first, then by admission."""
        found = [request for request in self if request.state in states]
        return sorted(found, key=lambda request: -request.priority)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert all(request.state in _ADMITTED for request in self)
        assert len(self) == len({request.key for request in self})
        assert len(self) + len(self._finished) == len(self._prefixes)
        self._prefixes.check()
        for request in self:
            assert request.computed_tokens <= request.capacity_tokens <= request.window_tokens

    def _by(self, number: int) -> Request:
        return self._requests.get(number) or self._finished[number]
