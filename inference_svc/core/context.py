"""A session's context: the tokens that its turns and discards leave. Pure; a value.

Turns are replayed as they happened. Tokens are appended in order, input before output, and each
discard happens after the number of the turn's tokens that it records. Grafts belong to a turn's
input; the tokens behind them have the lineage of the last one.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from inference_svc.core.ranges import Range, clip, merge_ranges, num_in, position_after, without
from inference_svc.core.turn_record import COMPRESSION, Discard, TurnRecord
from shared.types.lineage import WHOLE, Lineage


@dataclass(frozen=True)
class Context:
    """The tokens of a session that the next turn attends to.

    Attributes:
        token_ids: the tokens that are left.
        computed_tokens: number of first tokens that the model was fed.
        system_tokens: number of first tokens that are the system message.
        lineage: lineage of the computed tokens: the discards and grafts that precede them.
        framed: for each token, whether it may begin a message: 1 for tokens that clients sent other
            than as raw text.
        answer_tokens: number of last tokens that are the last answer. An empty answer counts the
            token before it.
    """

    token_ids: tuple[int, ...] = ()
    computed_tokens: int = 0
    system_tokens: int = 0
    lineage: Lineage = WHOLE
    framed: bytes = b""
    answer_tokens: int = 0

    @property
    def ends_with_answer(self) -> bool:
        """Whether the last token is an answer's, so that a chat's next message has to close it."""
        return self.answer_tokens > 0

    @property
    def computed_ids(self) -> tuple[int, ...]:
        """The tokens that the model was fed."""
        return self.token_ids[: self.computed_tokens]

    def without(self, ranges: Sequence[Range]) -> "Context":
        """Return the context after a discard of merged ranges."""
        computed = clip(ranges, self.computed_tokens)
        lineage = self.lineage.after(_as_bytes(self.computed_ids), computed)
        before_answer = clip(ranges, len(self.token_ids) - self.answer_tokens)
        return Context(
            tuple(without(self.token_ids, ranges)),
            self.computed_tokens - num_in(computed),
            position_after(self.system_tokens, ranges),
            lineage,
            bytes(without(self.framed, ranges)),
            self.answer_tokens - (num_in(ranges) - num_in(before_answer)),
        )

    def with_input(
        self, token_ids: Sequence[int], *, system_tokens: int = 0, is_text: bool = False
    ) -> "Context":
        """Return the context with a turn's input.

        Args:
            token_ids: the input.
            system_tokens: number of its first tokens that are the system message; used only if the
                context is empty.
            is_text: whether it is raw text, in which no message begins.
        """
        return Context(
            (*self.token_ids, *token_ids),
            self.computed_tokens,
            self.system_tokens if self.token_ids else system_tokens,
            self.lineage,
            self.framed + bytes([not is_text]) * len(token_ids),
        )

    def with_answer(self, token_ids: Sequence[int]) -> "Context":
        """Return the context with more tokens of an answer."""
        return replace(
            self,
            token_ids=(*self.token_ids, *token_ids),
            framed=self.framed + bytes(len(token_ids)),
            answer_tokens=self.answer_tokens + len(token_ids),
        )

    def with_turn(self, turn: TurnRecord) -> "Context":
        """Return the context after another turn.

        Cost: O(tokens), once more for each discard in the turn.
        """
        replayed = _Replay(self)
        replayed.add_turn(turn)
        return replayed.context()

    def with_discard(self, discard: Discard) -> "Context":
        """Return the context after a discard between turns.

        Raises:
            InvalidDiscardError: it does not fit.
        """
        return self.without(merge_ranges(discard.ranges, len(self.token_ids)))


def replay(turns: Sequence[TurnRecord], discards: Sequence[tuple[int, Discard]] = ()) -> Context:
    """Replay a session's turns and the discards between them. Cost: the tokens of all turns.

    Args:
        turns: the session's turns, from its first on.
        discards: each with the number of turns that were complete when it happened; in order.

    Raises:
        InvalidDiscardError: a discard does not fit the context before it.
    """
    replayed = _Replay(Context())
    waiting = list(reversed(discards))
    for num_turns in range(len(turns) + 1):
        while waiting and waiting[-1][0] == num_turns:
            replayed.discard(waiting.pop()[1])
        if num_turns < len(turns):
            replayed.add_turn(turns[num_turns])
    return replayed.context()


class _Replay:
    """A context during a replay: token_ids grow in place."""

    def __init__(self, context: Context) -> None:
        self._set(context)

    def context(self) -> Context:
        return Context(
            tuple(self._token_ids),
            self._computed_tokens,
            self._system_tokens,
            self._lineage,
            bytes(self._framed),
            self._answer_tokens,
        )

    def add_turn(self, turn: TurnRecord) -> None:
        num_read = 0
        before = [discard for discard in turn.discards if not discard.after_tokens]
        for discard in before:
            self.discard(discard)
        if turn.grafts:
            self._lineage = turn.grafts[-1].lineage
        for discard in turn.discards[len(before) :]:
            num_read = self._append(turn, num_read, discard.after_tokens)
            if discard.reason.startswith(COMPRESSION):
                self._computed_tokens = len(self._token_ids) - turn.uncomputed_tokens
            else:  # an overflow while the answer was generated: its last token was not fed yet
                self._computed_tokens = len(self._token_ids) - 1
            self.discard(discard)
        self._append(turn, num_read, turn.num_tokens)
        self._computed_tokens = len(self._token_ids) - turn.uncomputed_tokens

    def discard(self, discard: Discard) -> None:
        self._set(self.context().with_discard(discard))
        if discard.lineage is not None:
            self._lineage = discard.lineage

    def _set(self, context: Context) -> None:
        self._token_ids = list(context.token_ids)
        self._computed_tokens = context.computed_tokens
        self._system_tokens = context.system_tokens
        self._lineage = context.lineage
        self._framed = bytearray(context.framed)
        self._answer_tokens = context.answer_tokens

    def _append(self, turn: TurnRecord, start: int, end: int) -> int:
        """Append the turn's tokens [start, end); return `end`."""
        if end <= start:
            return start
        if not self._token_ids:
            self._system_tokens = turn.system_tokens
        token_ids = (*turn.input_ids, *turn.output_ids)[start:end]
        num_sent = len(turn.input_ids[start:end])
        num_answered = len(token_ids) - num_sent
        self._token_ids += token_ids
        self._framed += bytes([not turn.is_text]) * num_sent + bytes(num_answered)
        self._answer_tokens = num_answered + (0 if num_sent else self._answer_tokens)
        if not turn.output_ids and end == turn.num_tokens:
            self._answer_tokens = 1
        return end


def prompt_marks(num_tokens: int, turning_points: Iterable[int], every: int) -> tuple[int, ...]:
    """Return the positions in a prompt at which state is stored, for other turns to start from.

    What is stored of some layers is valid at few positions only: a state stands for all tokens
    before a position and cannot be cut, and a window holds the last tokens before one. So they are
    stored where the next request is likely to leave this context:

        - behind the beginning of a conversation, which other conversations share;
        - before the prompt for the answer, since templates write a finished answer in other tokens
          than those it was generated with;
        - at a turn's end, which is no mark of the prompt;
        - at regular distances in a long prompt, for requests that leave it there.

    Args:
        num_tokens: number of tokens of the context, history and input.
        turning_points: positions where other requests may leave it; 0 is none.
        every: tokens between marks of a long prompt. Marks are multiples of it, so that prompts
            with a common prefix have the same marks. 0: only the turning points.
    """
    regular = range(every, num_tokens, every) if every else ()
    return tuple(sorted({mark for mark in (*turning_points, *regular) if 0 < mark < num_tokens}))


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    """Return token ids as lineages digest them: little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)
