"""How one turn stays in its window: what goes before it begins, and while it is answered. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inference_svc.core.chat_frames import FrameTokens
from inference_svc.core.context import Context
from inference_svc.core.discards import Range, num_in
from inference_svc.core.errors import InputTooLongError
from inference_svc.core.truncation import REJECT, OverflowPolicy, plan_truncation

RESERVE_SHARE = 4  # the reserve is at most one part in four of the window
LEAST_CUT_SHARE = 8  # where there is no way to make that room: one part in eight, mid-turn
SINKS_SHARE = 2  # "sinks" keeps at most half of the window


@dataclass(frozen=True)
class TurnWindow:
    """The window of one turn.

    Attributes:
        window_tokens: that prompt and answer may have together at any time.
        reserve_tokens: of the answer, that are to have room when it begins.
        max_tokens: of the answer.
        has_max_tokens: the client named them: under "reject" they must have room.
        frame_tokens: of the model's chat template.
    """

    policy: OverflowPolicy
    window_tokens: int
    reserve_tokens: int
    max_tokens: int
    has_max_tokens: bool
    frame_tokens: FrameTokens

    @property
    def is_rigid(self) -> bool:
        """Whether nothing may go, so that the answer ends where the window does."""
        return self.policy.name == REJECT

    def at_start(self, context: Context, new_tokens: int) -> tuple[Range, ...]:
        """Choose what goes of the context before a turn; () if all fits.

        Room for the reserve is made if it can be; room for one token must be.

        Raises:
            InputTooLongError: there is no room even without all that may go.
        """
        prompt_tokens = len(context.token_ids) + new_tokens
        for room_tokens in (max(self._reserve_tokens, self._wanted_tokens), self._wanted_tokens):
            excess_tokens = prompt_tokens + room_tokens - self.window_tokens
            if excess_tokens <= 0:
                return ()
            ranges = self._plan_start(context, excess_tokens)
            if ranges:
                return ranges
        num_dropped = num_in(self._plan_start(context, 1, ratio=1.0))
        raise self._too_long(len(context.token_ids) - num_dropped, new_tokens)

    def check_fits(self, history_tokens: int, new_tokens: int) -> None:
        """Raise InputTooLongError unless a prompt has room as it is, and one token of the answer.

        Under "reject" all of an answer whose length the client named.
        """
        if history_tokens + new_tokens + self._wanted_tokens > self.window_tokens:
            raise self._too_long(history_tokens, new_tokens)

    def mid_turn(self, context: Context, tail_tokens: int) -> tuple[Range, ...]:
        """Choose what goes of a context whose rows are all filled; () if nothing may.

        It is as much as the reserve, or an eighth of the window if that is less and all there is: a
        cut costs as much as the context is long, so an answer does not go on token by token.

        Args:
            context: what is left of the session, with the turn's input and its answer so far.
            tail_tokens: last ones, that must stay: not computed, or not yet shown.
        """
        num_tokens = len(context.token_ids)
        starts = self.frame_tokens.starts(context.token_ids, context.framed)
        least_tokens = max(1, self.window_tokens // LEAST_CUT_SHARE)
        for room_tokens in (self._reserve_tokens, min(self._reserve_tokens, least_tokens)):
            excess_tokens = max(1, num_tokens - 1 + room_tokens - self.window_tokens)
            ranges = self._plan(context, num_tokens - tail_tokens, starts, excess_tokens)
            if ranges:
                return ranges
        return ()

    def answer_tokens(self, prompt_tokens: int) -> int:
        """The longest answer to a prompt that fits: where nothing may go, what is left of it."""
        room_tokens = self.window_tokens - prompt_tokens
        return min(self.max_tokens, room_tokens) if self.is_rigid else self.max_tokens

    @property
    def _wanted_tokens(self) -> int:
        """Of the answer, without room for which the turn is refused."""
        return self.max_tokens if self.is_rigid and self.has_max_tokens else 1

    @property
    def _reserve_tokens(self) -> int:
        if self.is_rigid:
            return 1
        most = max(1, self.window_tokens // RESERVE_SHARE)
        return min(self.reserve_tokens, self.max_tokens, most)

    def _plan_start(
        self, context: Context, excess_tokens: int, ratio: float | None = None
    ) -> tuple[Range, ...]:
        """Between turns the last frame is complete: it may go as well."""
        num_tokens = len(context.token_ids)
        starts = self.frame_tokens.starts(context.token_ids, context.framed)
        ends = [num_tokens] if starts else []
        return self._plan(context, num_tokens, [*starts, *ends], excess_tokens, ratio)

    def _plan(
        self,
        context: Context,
        droppable_tokens: int,
        frame_starts: Sequence[int],
        excess_tokens: int,
        ratio: float | None = None,
    ) -> tuple[Range, ...]:
        policy = self.policy
        most_sinks = self.window_tokens // SINKS_SHARE
        return plan_truncation(
            replace(
                policy,
                ratio=policy.ratio if ratio is None else ratio,
                sink_tokens=min(policy.sink_tokens, most_sinks),
            ),
            droppable_tokens=droppable_tokens,
            system_tokens=context.system_tokens,
            frame_starts=frame_starts,
            excess_tokens=excess_tokens,
        )

    def _too_long(self, history_tokens: int, new_tokens: int) -> InputTooLongError:
        room_tokens = self._wanted_tokens
        wanted = f"max_tokens {room_tokens}" if room_tokens > 1 else "1 more"
        remedy = "send a shorter turn, lower max_tokens, or open a new session"
        if self.is_rigid:
            remedy += ", or let overflow.policy be half"
        return InputTooLongError(
            f"history {history_tokens} + new {new_tokens} + {wanted} tokens "
            f"are more than the window of {self.window_tokens}",
            remedy,
        )
