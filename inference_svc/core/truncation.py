"""Truncation: which tokens of a context are dropped when its window is full. Pure.

This happens before a turn or in the middle of it. The overflow policy says how a turn stays in its
window (`TurnWindow`):

    oldest        the oldest part is dropped
    half, sinks   older names of the same policy
    reject        nothing is dropped: the turn is refused, or its answer ends with the window

One range is dropped at a time. It is as long as `ratio` of all that may be dropped, or longer if
that is not enough. The system message stays. Where there are chat frames (`FrameTokens`), the range
ends where a frame begins, unless the policy says otherwise. The sinks, the first tokens of the
context, stay whatever they are part of: in many models KV that was computed over them is worth
little without them.

*Source:* token truncation: CachedAttention, USENIX ATC'24, §3.4; sinks: StreamingLLM, ICLR 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from inference_svc.core.context import Context
from inference_svc.core.errors import InputTooLongError, InvalidTurnError
from inference_svc.core.ranges import Range, num_in

OLDEST, HALF, SINKS, REJECT = "oldest", "half", "sinks", "reject"
OVERFLOW_POLICIES = (OLDEST, HALF, SINKS, REJECT)
RECOMPUTED_RATIO = 0.5  # the paper's: the kept tokens are computed again, so cuts should be rare
KEPT_RATIO = 0.125  # KV that is kept costs nothing: small cuts leave the model more to read
USUAL_SINKS = 4  # enough for most models with attention sinks
MAX_SINK_TOKENS = 65536
RESERVE_SHARE = 4  # the reserve is at most a quarter of the window
LEAST_CUT_SHARE = 8  # if the reserve cannot be had in mid-turn: room for an eighth of the window
SINKS_SHARE = 2  # sinks are at most half of the window


@dataclass(frozen=True)
class OverflowPolicy:
    """How a turn drops tokens when its window is full.

    Attributes:
        name: the policy's name.
        ratio: share of the droppable tokens that is dropped at once, in (0, 1].
        sink_tokens: number of first tokens that stay, those of a system message included. A turn
            keeps at most half of its window (`TurnWindow`).
        split_frames: whether messages of a chat may be cut anywhere.
        drop_system: whether the system message may be dropped, too.
    """

    name: str = OLDEST
    ratio: float = RECOMPUTED_RATIO
    sink_tokens: int = USUAL_SINKS
    split_frames: bool = False
    drop_system: bool = False

    def check(self) -> None:
        """Raise InvalidTurnError with a list of all invalid values."""
        problems = []
        if self.name not in OVERFLOW_POLICIES:
            problems.append(
                f"overflow.policy {self.name!r} is not one of {', '.join(OVERFLOW_POLICIES)}"
            )
        if not 0 < self.ratio <= 1:
            problems.append(f"overflow.ratio {self.ratio:g} is not in (0, 1]")
        if not 0 <= self.sink_tokens <= MAX_SINK_TOKENS:
            problems.append(
                f"overflow.sink_tokens {self.sink_tokens} is not between 0 and {MAX_SINK_TOKENS}"
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
        droppable_tokens: number of first tokens, system message included; the tokens behind them
            stay.
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


@dataclass(frozen=True)
class FrameTokens:
    """Special tokens of a chat template that delimit its messages; without any there are no frames.

    A frame is a message as the template writes it: from its opening special token to the next
    message's. Frames are found only in tokens that clients sent as messages or as token ids. Raw
    text has no frames and may be cut anywhere. A model's answer never begins a frame, whatever it
    contains.

    Attributes:
        opening: ids of tokens that begin a message.
        closing: ids of tokens that end an answer. If no token begins messages, a frame begins after
            each of these.
    """

    opening: frozenset[int] = frozenset()
    closing: frozenset[int] = frozenset()

    @property
    def ids(self) -> frozenset[int]:
        """Ids of all frame tokens."""
        return self.opening | self.closing

    def starts(self, token_ids: Sequence[int], framed: bytes) -> list[int]:
        """Find the positions where frames begin.

        Args:
            token_ids: the tokens of a context.
            framed: for each token, whether it may begin a message (see `Context`).

        Returns:
            Positions, ascending; [] if there are no frames.
        """
        if self.opening:
            found = enumerate(zip(token_ids, framed, strict=True))
            return [at for at, (token, may) in found if may and token in self.opening]
        if not any(framed):
            return []
        return [at + 1 for at, token in enumerate(token_ids) if token in self.closing]

    def last_start(self, token_ids: Sequence[int]) -> int:
        """Return where the last frame of a rendered chat begins; 0 if there are no frames."""
        starts = self.starts(token_ids, b"\1" * len(token_ids))
        return starts[-1] if starts else 0


@dataclass(frozen=True)
class TurnWindow:
    """The window of one turn, and what is dropped for the turn to stay in it.

    Attributes:
        policy: the overflow policy.
        window_tokens: most tokens that prompt and answer may have together at any time.
        reserve_tokens: tokens of the answer to have room for when it begins.
        max_tokens: most tokens of the answer.
        has_max_tokens: whether the client set them: under "reject" all of them must have room.
        frame_tokens: frame tokens of the model's chat template.
    """

    policy: OverflowPolicy
    window_tokens: int
    reserve_tokens: int
    max_tokens: int
    has_max_tokens: bool
    frame_tokens: FrameTokens

    @property
    def is_rigid(self) -> bool:
        """Whether nothing may be dropped, so that the answer ends with the window."""
        return self.policy.name == REJECT

    def at_start(self, context: Context, new_tokens: int) -> tuple[Range, ...]:
        """Choose the tokens of the context that are dropped before a turn; () if everything fits.

        Room for the reserve is made if possible, room for one token is required. If no token would
        be left that was computed over the sinks, they are dropped, too.

        Raises:
            InputTooLongError: there is no room even without all that may be dropped.
        """
        num_tokens, required_tokens = len(context.token_ids), self._required_tokens
        most_tokens = max(self._reserve_tokens, required_tokens)
        excess_tokens = num_tokens + new_tokens + most_tokens - self.window_tokens
        if excess_tokens <= 0:
            return ()
        everything = self._plan_start(replace(self.policy, ratio=1.0, sink_tokens=0), context, 1)
        for room_tokens in (most_tokens, required_tokens):
            excess_tokens = num_tokens + new_tokens + room_tokens - self.window_tokens
            if excess_tokens <= 0:
                return ()
            ranges = self._plan_start(self._bounded_policy, context, excess_tokens)
            if ranges:
                return everything if ranges[-1][1] == num_tokens else ranges
        if num_in(everything) >= excess_tokens:
            return everything
        raise self._too_long(num_tokens - num_in(everything), new_tokens)

    def check_fits(self, history_tokens: int, new_tokens: int) -> None:
        """Raise InputTooLongError unless a prompt fits as it is, with one token of the answer.

        Under "reject" an answer whose length the client set must fit as a whole.
        """
        if history_tokens + new_tokens + self._required_tokens > self.window_tokens:
            raise self._too_long(history_tokens, new_tokens)

    def mid_turn(self, context: Context, tail_tokens: int) -> tuple[Range, ...]:
        """Choose the tokens to drop from a context that fills all its slots; () if none may be.

        Room is made for the reserve. If that is impossible, for an eighth of the window, if that is
        less. A cut costs time in proportion to the context, so that an answer should not resume
        token by token.

        Args:
            context: what is left of the session, with the turn's input and its answer so far.
            tail_tokens: number of last tokens that must stay: not computed, or not yet shown.
        """
        num_tokens = len(context.token_ids)
        starts = self.frame_tokens.starts(context.token_ids, context.framed)
        least_tokens = max(1, self.window_tokens // LEAST_CUT_SHARE)
        for room_tokens in (self._reserve_tokens, min(self._reserve_tokens, least_tokens)):
            excess_tokens = max(1, num_tokens - 1 + room_tokens - self.window_tokens)
            ranges = plan_truncation(
                self._bounded_policy,
                droppable_tokens=num_tokens - tail_tokens,
                system_tokens=context.system_tokens,
                frame_starts=starts,
                excess_tokens=excess_tokens,
            )
            if ranges:
                return ranges
        return ()

    def answer_tokens(self, prompt_tokens: int) -> int:
        """Return the length of the longest answer that fits, in tokens.

        If the oldest tokens may be dropped, that is `max_tokens`.
        """
        room_tokens = self.window_tokens - prompt_tokens
        return min(self.max_tokens, room_tokens) if self.is_rigid else self.max_tokens

    @property
    def sink_tokens(self) -> int:
        """Number of first tokens that stay while any token computed over them stays."""
        return min(self.policy.sink_tokens, self.window_tokens // SINKS_SHARE)

    @property
    def _bounded_policy(self) -> OverflowPolicy:
        return replace(self.policy, sink_tokens=self.sink_tokens)

    @property
    def _required_tokens(self) -> int:
        """Number of the answer's tokens that must have room; otherwise the turn is refused."""
        return self.max_tokens if self.is_rigid and self.has_max_tokens else 1

    @property
    def _reserve_tokens(self) -> int:
        if self.is_rigid:
            return 1
        most = max(1, self.window_tokens // RESERVE_SHARE)
        return min(self.reserve_tokens, self.max_tokens, most)

    def _plan_start(
        self, policy: OverflowPolicy, context: Context, excess_tokens: int
    ) -> tuple[Range, ...]:
        """Choose the tokens to drop between turns, when the last frame is complete.

        That frame may be dropped, too.
        """
        num_tokens = len(context.token_ids)
        starts = self.frame_tokens.starts(context.token_ids, context.framed)
        return plan_truncation(
            policy,
            droppable_tokens=num_tokens,
            system_tokens=context.system_tokens,
            frame_starts=[*starts, num_tokens] if starts else [],
            excess_tokens=excess_tokens,
        )

    def _too_long(self, history_tokens: int, new_tokens: int) -> InputTooLongError:
        room_tokens = self._required_tokens
        wanted = f"max_tokens {room_tokens}" if room_tokens > 1 else "1 more"
        remedy = "send a shorter turn, lower max_tokens, or begin a new session"
        if self.is_rigid:
            remedy += ", or set overflow.policy to oldest"
        return InputTooLongError(
            f"{history_tokens} tokens of history, {new_tokens} new ones and {wanted} exceed "
            f"the window of {self.window_tokens} tokens",
            remedy,
        )
