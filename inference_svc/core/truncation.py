"""Which tokens of a context are dropped when its window is full: the overflow policies. Pure.

    oldest        the oldest part is dropped
    half, sinks   the same, by older names
    reject        nothing is: the turn is refused, or its answer ends where the window does

One range goes at a time, as long as `ratio` of what may go; longer if that is not enough. The
system message stays, and where there are chat frames the range ends where one begins, unless the
policy says otherwise. So do the sinks, the first tokens of the context, whatever they are part of:
KV that was computed over them is worth little without them in many models.

*Source:* token truncation: CachedAttention, USENIX ATC'24, §3.4; sinks: StreamingLLM, ICLR 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from inference_svc.core.discards import Range
from inference_svc.core.errors import InvalidTurnError

OLDEST, HALF, SINKS, REJECT = "oldest", "half", "sinks", "reject"
OVERFLOW_POLICIES = (OLDEST, HALF, SINKS, REJECT)
RECOMPUTED_RATIO = 0.5  # the paper's: what is kept is computed again, so that cuts are to be rare
KEPT_RATIO = 0.125  # what is kept costs nothing: little at a time, so that much is there to be read
USUAL_SINKS = 4  # that most models with attention sinks need
MAX_SINK_TOKENS = 65536


@dataclass(frozen=True)
class OverflowPolicy:
    """See the module docstring.

    Attributes:
        name: the policy's name.
        ratio: part of the droppable tokens that is dropped at once, in (0, 1].
        sink_tokens: number of first tokens that stay; a system message counts. A turn keeps at most
            half of its window (`TurnWindow`).
        split_frames: whether messages of a chat may be cut anywhere.
        drop_system: whether the system message may be dropped, too.
    """

    name: str = OLDEST
    ratio: float = RECOMPUTED_RATIO
    sink_tokens: int = USUAL_SINKS
    split_frames: bool = False
    drop_system: bool = False

    def check(self) -> None:
        """Raise InvalidTurnError that lists every value that cannot be."""
        problems = []
        if self.name not in OVERFLOW_POLICIES:
            problems.append(
                f"overflow.policy {self.name!r} is none of {', '.join(OVERFLOW_POLICIES)}"
            )
        if not 0 < self.ratio <= 1:
            problems.append(f"overflow.ratio {self.ratio:g} is not in (0, 1]")
        if not 0 <= self.sink_tokens <= MAX_SINK_TOKENS:
            problems.append(
                f"overflow.sink_tokens {self.sink_tokens} is more than {MAX_SINK_TOKENS}"
            )
        if problems:
            raise InvalidTurnError("; ".join(problems), "correct these values, or leave them out")


def plan_truncation(
    policy: OverflowPolicy,
    *,
    droppable_tokens: int,
    system_tokens: int,
    frame_starts: Sequence[int],
    excess_tokens: int,
) -> tuple[Range, ...]:
    """Choose the tokens of a context that are dropped.

    Args:
        policy: the turn's overflow policy.
        droppable_tokens: number of first tokens, system message included; those after them stay.
        system_tokens: number of first tokens that are the system message.
        frame_starts: positions where frames begin, ascending; [] if there are none.
        excess_tokens: least number of tokens to drop; more than 0.

    Returns:
        One range; () if the droppable tokens are not enough.
    """
    if policy.name == REJECT:
        return ()
    first = max(policy.sink_tokens, 0 if policy.drop_system else system_tokens)
    cuts: Sequence[int] = range(first, droppable_tokens + 1)
    if frame_starts and not policy.split_frames:
        begins = {first, system_tokens, *frame_starts}
        cuts = sorted(cut for cut in begins if first <= cut <= droppable_tokens)
    if not cuts:
        return ()
    start = cuts[0]
    ends = [cut for cut in cuts if cut >= start + excess_tokens]
    if not ends:
        return ()
    target = start + ceil(policy.ratio * (droppable_tokens - start))
    return ((start, min(ends, key=lambda end: (abs(end - target), -end))),)
