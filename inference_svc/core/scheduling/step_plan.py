"""The scheduler's decisions and the results reported to it: frozen values shared with the engine.

A step computes the next token of every answer under way, and prompt tokens up to a bound. A long
prompt is cut into chunks, so that it never delays answers by more than its share of a step takes
(`plan_chunks`).

*Source:* iteration-level scheduling: Orca (OSDI'22); prompt chunks beside decodes: Sarathi-Serve
(OSDI'24).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from inference_svc.core.attention_window import HeldRows
from inference_svc.core.scheduling.page_groups import PLAIN, PageGroups
from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.residents import MOST_RESIDENTS
from shared.types.session_key import SessionKey

Drafts = Mapping[int, Sequence[int]]  # by request number: tokens that are guessed to come next
NO_DRAFTS: Drafts = {}


@dataclass(frozen=True)
class BatchBounds:
    """Bounds of a batch; `SchedulerLimits` explains them.

    A CPU computes a step in time that grows with its tokens, so that small steps lose little and
    keep answers smooth. A GPU needs hardly more time for thousands of prompt tokens, or dozens of
    answers, than for the launch of a step with one.
    """

    max_running: int
    max_loading: int
    step_tokens: int
    mixed_step_tokens: int

    @property
    def num_active(self) -> int:
        """Most requests that are admitted at once."""
        return self.max_running + self.max_loading


ON_CPU = BatchBounds(max_running=8, max_loading=4, step_tokens=512, mixed_step_tokens=128)
ON_GPU = BatchBounds(max_running=64, max_loading=8, step_tokens=4096, mixed_step_tokens=1024)


def usual_bounds(device_type: str, most_active: int | None = None) -> BatchBounds:
    """Return the bounds for a device, for use where the settings have none.

    Args:
        device_type: PyTorch's name of it, "cuda" or another.
        most_active: most requests that there is room for at once, for a model whose requests have
            states. The bounds are halved until they keep to it, but never fall below a CPU's. None:
            states are no bound.
    """
    bounds = ON_GPU if device_type == "cuda" else ON_CPU
    while most_active is not None and most_active < bounds.num_active > ON_CPU.num_active:
        bounds = replace(
            bounds,
            max_running=max(bounds.max_running // 2, ON_CPU.max_running),
            max_loading=max(bounds.max_loading // 2, ON_CPU.max_loading),
        )
    return bounds


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of the scheduler, in requests, token slots or tokens.

    Attributes:
        max_running: most requests in a step.
        max_loading: most requests that load, or are loaded and wait for the batch.
        max_waiting: most requests in the queue; beyond it a new one is refused.
        kv_slots: token slots of sequences' KV and residents together.
        write_slots: token slots of the write ring; 0: nothing is saved.
        step_tokens: most prompt tokens computed in one step, over all requests.
        mixed_step_tokens: the same, for steps that also decode an answer.
        answer_tokens: slots for its answer that a request is first admitted with.
        keeps_residents: whether sessions keep their KV when their turn is over.
        block_tokens: tokens of a stored block: another session's KV is reused in whole blocks.
        page_tokens: token slots of a page; None: a sequence's slots are contiguous.
        has_states: whether a sequence has a recurrent state beside its KV. It is valid behind the
            last token only, so that a resident is reused as a whole or not at all, and nothing is
            shared.
        most_residents: most sessions that keep their KV.
        attention_window: most tokens that layers with a window attend to; tokens before it may lack
            KV in these layers (core/attention_window.py). 0: the model has no such layers.
        held_rows: what such layers hold of a sequence; None: all tokens.
        page_groups: groups of layers that have pages of their own; a slot is then one group's.
    """

    max_running: int
    max_loading: int
    max_waiting: int
    kv_slots: int
    write_slots: int
    step_tokens: int
    mixed_step_tokens: int
    answer_tokens: int
    keeps_residents: bool
    block_tokens: int = 1
    page_tokens: int | None = None
    has_states: bool = False
    most_residents: int = MOST_RESIDENTS
    attention_window: int = 0
    held_rows: HeldRows | None = None
    page_groups: PageGroups = PLAIN

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens of one request in a step."""
        rows = self.held_rows
        return self.step_tokens if rows is None else min(self.step_tokens, rows.step_tokens)


@dataclass(frozen=True)
class PlannedChunk:
    """The next `num_tokens` uncomputed tokens of a request, to be computed in this step.

    Attributes:
        request: the request.
        num_tokens: number of its tokens to compute.
        sample: whether they reach its last token, so that the next one can be sampled.
        draft: guessed tokens that are fed behind it, to verify them: as many additional tokens can
            be sampled as are right.
    """

    request: Request
    num_tokens: int
    sample: bool
    draft: tuple[int, ...] = ()

    @property
    def num_fed(self) -> int:
        """Number of tokens that are fed, drafted ones included."""
        return self.num_tokens + len(self.draft)


@dataclass(frozen=True)
class Admission:
    """A request to give memory to; then fill in its stored KV, and call `Scheduler.announce`.

    Attributes:
        request: the request.
        resident_tokens: number of its first tokens whose KV the source has; 0: there is no source.
        source: the session of the resident that has it: the request's own or another one. If it is
            not in place, the engine owes `Residents.end_copy`: after copying tokens to the new KV,
            or after looking at the shared pages.
        is_running: whether the source is not a resident, but a running turn of that session. Where
            its pages are shared, nothing is owed.
        in_place: whether the KV of the session's resident is the request's now.
        pages: the pages of its KV, the resident's included; empty if slots are not paged.
    """

    request: Request
    resident_tokens: int = 0
    source: SessionKey | None = None
    in_place: bool = False
    is_running: bool = False
    pages: tuple[int, ...] = ()

    @property
    def is_copy(self) -> bool:
        """Whether KV of a resident or a running turn is to be copied."""
        return self.source is not None and not self.in_place and not self.pages

    @property
    def is_shared(self) -> bool:
        """Whether its KV begins with pages of another session's resident."""
        is_of_resident = self.source is not None and not self.is_running
        return is_of_resident and not self.in_place and bool(self.pages)


@dataclass(frozen=True)
class Growth:
    """The new page list of a running request that got more pages, or others for its next tokens."""

    request: Request
    pages: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """What to do now, in this order: preempted, overflowed, evicted, admitted, grown, chunks.

    Attributes:
        chunks: the chunks to compute.
        admitted: requests to give memory to, and to load or copy history for.
        preempted: requests that wait again. Their KV are their sessions' residents now, with
            `computed_tokens` tokens. Their tokens in the write ring may be saved.
        overflowed: as preempted, because their window is full. Until its context is cut, such a
            request is not admitted, nor is any behind it: `truncate` and `end_compaction` of its
            resident are owed.
        evicted: sessions whose resident KV is to be released before memory is given to others.
        grown: requests whose KV has more pages, or other ones.
        expired: requests that failed because their deadline passed; `release_kv` is owed.
        stalled: running requests whose next tokens find no room in the write ring. The engine
            should store what it can of other requests' tokens there, and give up what it cannot.
        unsaved: requests that have waited for a ring that stands still, and continue without being
            saved; their tokens in the ring are given up.
        wake_ns: time of the next `schedule` even if nothing happens; None: not needed.
    """

    chunks: tuple[PlannedChunk, ...] = ()
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Request, ...] = ()
    overflowed: tuple[Request, ...] = ()
    evicted: tuple[SessionKey, ...] = ()
    grown: tuple[Growth, ...] = ()
    expired: tuple[Request, ...] = ()
    stalled: tuple[Request, ...] = ()
    unsaved: tuple[Request, ...] = ()
    wake_ns: int | None = None


@dataclass(frozen=True)
class StepResult:
    """The results of a plan's chunks.

    Attributes:
        computed: the chunks that succeeded.
        sampled: the tokens sampled from them, by request number: one token, and for a chunk with a
            draft one more for each right token of the draft, unless the answer ends before.
    """

    computed: Sequence[PlannedChunk]
    sampled: Mapping[int, Sequence[int]]


def prompt_budget(running: Sequence[Request], limits: SchedulerLimits) -> int:
    """Return how many prompt tokens a step may compute beside these running requests."""
    is_mixed = any(request.is_decoding for request in running)
    return limits.mixed_step_tokens if is_mixed else limits.step_tokens


def plan_chunks(
    running: Sequence[Request],
    limits: SchedulerLimits,
    free_write_slots: int,
    drafts: Drafts = NO_DRAFTS,
) -> tuple[tuple[PlannedChunk, ...], tuple[Request, ...]]:
    """Choose the chunks of a step; prompts are served in the order of `running`.

    A prompt's chunk ends at its request's next mark, if that comes first. Prompts that are saved
    take at most half of the write ring, so that the tokens of one step are stored while the next
    step computes. A draft takes only room that no request needs for its next token.

    Args:
        running: the requests in the batch.
        limits: the bounds of a step.
        free_write_slots: number of free slots of the write ring.
        drafts: by request number, guessed tokens that may be fed too.

    Returns:
        The chunks, and the requests that have none only because the write ring has no room.
    """
    growing = [
        request for request in running if not (request.has_outgrown_slots or request.is_overflowing)
    ]
    decoding = [request for request in growing if request.is_decoding]
    prompts = [request for request in growing if not request.is_decoding]
    chunks, stalled = [], []
    free = free_write_slots
    # Slots for drafts: those that no decoding request needs for its next token.
    spare = free - sum(request.is_saved for request in decoding)
    for request in decoding:
        if request.is_saved and not free:
            stalled.append(request)
            continue
        room = request.unused_slots - 1
        if request.is_saved:
            room = min(room, max(0, spare))
        draft = tuple(drafts.get(request.number, ())[:room])
        chunks.append(PlannedChunk(request, 1, sample=True, draft=draft))
        if request.is_saved:
            free -= 1 + len(draft)
            spare -= len(draft)
    left = prompt_budget(running, limits) if prompts else 0
    free = min(free, max(1, limits.write_slots // 2))
    for request in prompts:
        if left:
            num_tokens = min(left, request.chunk_tokens, limits.chunk_tokens)
            if request.is_saved:
                num_tokens = min(num_tokens, free)
                free -= num_tokens
            if not num_tokens:
                stalled.append(request)
                continue
            sample = num_tokens == request.uncomputed_tokens
            chunks.append(PlannedChunk(request, num_tokens, sample))
            left -= num_tokens
    assert all(c.num_fed <= c.request.unused_slots for c in chunks), "an answer is too long"
    return tuple(chunks), tuple(stalled)
