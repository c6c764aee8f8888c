"""How one turn stays in its window: what is dropped before it, and while it is answered. Pure.

A context is cut where a message of its chat begins (`FrameTokens`), as the turn's overflow policy
says (`truncation.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inference_svc.core.context import Context
from inference_svc.core.discards import Range, num_in
from inference_svc.core.errors import InputTooLongError
from inference_svc.core.truncation import REJECT, OverflowPolicy, plan_truncation


@dataclass(frozen=True)
class FrameTokens:
    """Special tokens of a chat template: where its messages begin; without any there are no frames.

    A frame is a message as the template writes it: from its opening special token to the next
    one's. Special tokens are looked for in the tokens that clients sent as messages or as token
    ids. Raw text has no frames and may be cut anywhere; what a model answers begins none, whatever
    it writes.

    Attributes:
        opening: ids of tokens that begin a message.
        closing: ids of tokens that end an answer; where no token begins messages, a frame begins
            after one of these.
    """

    opening: frozenset[int] = frozenset()
    closing: frozenset[int] = frozenset()

    @property
    def ids(self) -> frozenset[int]:
        """Ids of all of them."""
        return self.opening | self.closing

    def starts(self, token_ids: Sequence[int], framed: bytes) -> list[int]:
        """Find where frames begin.

        Args:
            token_ids: the tokens of a context.
            framed: for each of them, whether it may begin a message (see `Context`).

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


RESERVE_SHARE = 4  # the reserve is at most one part in four of the window
LEAST_CUT_SHARE = 8  # where there is no way to make that room: one part in eight, mid-turn
SINKS_SHARE = 2  # sinks are at most half of the window


@dataclass(frozen=True)
class TurnWindow:
    """The window of one turn.

    Attributes:
        policy: the overflow policy.
        window_tokens: most tokens that prompt and answer may have together at any time.
        reserve_tokens: tokens of the answer that have room when it begins.
        max_tokens: most tokens of the answer.
        has_max_tokens: whether the client named them: under "reject" they must have room.
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
        """Whether nothing may be dropped, so that the answer ends where the window does."""
        return self.policy.name == REJECT

    def at_start(self, context: Context, new_tokens: int) -> tuple[Range, ...]:
        """Choose the tokens of the context that are dropped before a turn; () if all fits.

        Room for the reserve is made if it can be; room for one token must be. Where nothing is left
        that was computed over the sinks, they go, too.

        Raises:
            InputTooLongError: there is no room even without all that may be dropped.
        """
        num_tokens, wanted_tokens = len(context.token_ids), self._wanted_tokens
        most_tokens = max(self._reserve_tokens, wanted_tokens)
        excess_tokens = num_tokens + new_tokens + most_tokens - self.window_tokens
        if excess_tokens <= 0:
            return ()
        everything = self._plan_start(replace(self.policy, ratio=1.0, sink_tokens=0), context, 1)
        for room_tokens in (most_tokens, wanted_tokens):
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
        """Raise InputTooLongError unless a prompt has room as it is, and one token of the answer.

        Under "reject" all of an answer whose length the client named.
        """
        if history_tokens + new_tokens + self._wanted_tokens > self.window_tokens:
            raise self._too_long(history_tokens, new_tokens)

    def mid_turn(self, context: Context, tail_tokens: int) -> tuple[Range, ...]:
        """Choose the tokens to drop of a context whose slots are all filled; () if none may.

        It is as much as the reserve, or an eighth of the window if that is less and all there is: a
        cut costs as much as the context is long, so an answer does not resume token by token.

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
        """Return the tokens of the longest answer that fits; all, where the oldest are dropped."""
        room_tokens = self.window_tokens - prompt_tokens
        return min(self.max_tokens, room_tokens) if self.is_rigid else self.max_tokens

    @property
    def sink_tokens(self) -> int:
        """Number of first tokens of the context that stay while any that saw them does."""
        return min(self.policy.sink_tokens, self.window_tokens // SINKS_SHARE)

    @property
    def _bounded_policy(self) -> OverflowPolicy:
        return replace(self.policy, sink_tokens=self.sink_tokens)

    @property
    def _wanted_tokens(self) -> int:
        """Return how many tokens of the answer must have room, else the turn is refused."""
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
        """Choose the tokens to drop between turns: the last frame is complete, and may go, too."""
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
        room_tokens = self._wanted_tokens
        wanted = f"max_tokens {room_tokens}" if room_tokens > 1 else "1 more"
        remedy = "send a shorter turn, lower max_tokens, or open a new session"
        if self.is_rigid:
            remedy += ", or let overflow.policy be oldest"
        return InputTooLongError(
            f"history {history_tokens} + new {new_tokens} + {wanted} tokens "
            f"are more than the window of {self.window_tokens}",
            remedy,
        )
