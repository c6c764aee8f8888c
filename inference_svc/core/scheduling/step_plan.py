"""What the scheduler decides and what is reported to it: frozen values between it and the engine.

A step computes every answer under way, and prompt tokens up to a bound: a long prompt is cut, so
that it never holds up answers for longer than its share of a step takes (`plan_chunks`).

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
    """Bounds of a batch, as `SchedulerLimits` has them.

    A CPU computes a step in time that grows with its tokens, so that small steps lose little and
    keep answers smooth. A GPU takes hardly longer for thousands of prompt tokens, or dozens of
    answers, than it takes to be told of one.
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
    """Return the bounds for a device, where no setting says.

    Args:
        device_type: PyTorch's name of it, "cuda" or another.
        most_active: most requests that there is room for at once, of a model whose requests have
            states: the bounds are halved until they keep to it, but are never below a CPU's. None:
            states bound nothing.
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
        max_waiting: most requests in the queue, above which a new one is refused.
        kv_slots: token slots of sequences' KV and residents together.
        write_slots: token slots of the write ring; 0: nothing is saved.
        step_tokens: most prompt tokens computed in one step, over all requests.
        mixed_step_tokens: the same, while an answer is under way beside them.
        answer_tokens: slots for its answer that a request is first admitted with.
        keeps_residents: whether sessions keep their KV when their turn is over.
        block_tokens: of what is stored: of another session's KV no part of a block is of use.
        page_tokens: slots are pages of so many; None: a sequence's lie side by side.
        has_states: whether a sequence has a state beside its KV, which is of use behind its last
            token only: a resident is built on as a whole or not at all, and nothing is shared.
        most_residents: most sessions that keep their KV.
        attention_window: most tokens that layers with a window attend to, of which there may be no
            KV before (core/attention_window.py); 0: the model has none.
        held_rows: what such layers hold of a sequence; None: all tokens.
        page_groups: groups of layers, of which pages hold one each; the slots are theirs, too.
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
    """Feed the next `num_tokens` uncomputed tokens of a request.

    Attributes:
        sample: whether they reach its last token, so that the next one can be sampled.
        draft: tokens that are fed behind it, to see which of them come: as many more can be
            sampled as are right.
    """

    request: Request
    num_tokens: int
    sample: bool
    draft: tuple[int, ...] = ()

    @property
    def num_fed(self) -> int:
        """Number of tokens that are fed."""
        return self.num_tokens + len(self.draft)


@dataclass(frozen=True)
class Admission:
    """Give a request its memory, fill in what is stored, and call `announced`.

    Attributes:
        resident_tokens: its first tokens, of which a resident has the KV; 0: none has.
        source: whose resident that is: its session's or another's. If it is not in place, the end
            of the residents' copy is owed: of tokens to new KV, or of looking at what is shared.
        is_running: that session has no resident, but a turn that runs; where its pages are shared
            nothing is owed.
        in_place: the KV of its session's resident is the request's now.
        pages: the pages of its KV, the resident's among them; none if there are no pages.
    """

    request: Request
    resident_tokens: int = 0
    source: SessionKey | None = None
    in_place: bool = False
    is_running: bool = False
    pages: tuple[int, ...] = ()

    @property
    def is_copy(self) -> bool:
        """Whether a resident, or KV of a turn that runs, is to be copied."""
        return self.source is not None and not self.in_place and not self.pages

    @property
    def is_shared(self) -> bool:
        """Whether its KV begins with pages of another's resident."""
        is_of_resident = self.source is not None and not self.is_running
        return is_of_resident and not self.in_place and bool(self.pages)


@dataclass(frozen=True)
class Growth:
    """A running request has more pages, or others for what is written next: those of its KV."""

    request: Request
    pages: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """What to do now, in this order: preempted, overflowed, evicted, admitted, grown, chunks.

    Attributes:
        preempted: their KV are their sessions' residents now, with `computed_tokens` tokens;
            they wait again. What they have in the write ring may be saved.
        overflowed: as preempted, because their window is full. Until their context is cut they are
            not admitted, and nobody else is whose place is behind theirs: `truncated`, then
            `end_compaction` of their resident are owed.
        evicted: sessions whose resident KV is to be released before memory is given to others.
        grown: requests whose KV has more pages, or others.
        expired: requests that failed because their deadline passed; release is owed.
        stalled: requests that run, and whose next tokens find no room in the write ring: what can
            be stored of others is to be, and what cannot is to be given up.
        unsaved: requests that have waited for a ring that stands still, and run on; what they have
            there is given up.
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
        sampled: the tokens sampled from them, by request number: one, and of a chunk with a draft
            one more for each token of that which was right, unless the answer has ended before.
    """

    computed: Sequence[PlannedChunk]
    sampled: Mapping[int, Sequence[int]]


def prompt_budget(running: Sequence[Request], limits: SchedulerLimits) -> int:
    """Return how many prompt tokens a step may compute."""
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
    take at most half of the write ring, so that what one step has computed is stored while the next
    one computes. A draft takes only room that nobody's next token needs.

    Returns:
        the chunks, and who would have one if its tokens had room in the write ring.
    """
    growing = [
        request for request in running if not (request.is_outgrown or request.is_overflowing)
    ]
    decoding = [request for request in growing if request.is_decoding]
    chunks, stalled = [], []
    free = free_write_slots
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
    left = prompt_budget(running, limits)
    free = min(free, max(1, limits.write_slots // 2))
    for request in growing:
        if left and not request.is_decoding:
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
