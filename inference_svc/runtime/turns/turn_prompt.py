"""A turn's prompt: its input as token ids, and the discards of the context that make room."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from inference_svc.core.answers import GrowingAnswer, SamplingParams
from inference_svc.core.context import Context, prompt_marks
from inference_svc.core.errors import (
    EmptyTurnError,
    InputTooLongError,
    InvalidSamplingError,
    InvalidTurnError,
)
from inference_svc.core.ranges import Range
from inference_svc.core.submission import ChatInput, Submission, TextInput, TokenInput, TurnInput
from inference_svc.core.template_arguments import Arguments
from inference_svc.core.transcript_format import Transcript
from inference_svc.core.truncation import TurnWindow
from inference_svc.core.turn_record import Discard
from inference_svc.runtime.turns.chat_text import TurnText
from inference_svc.runtime.worker_thread import WorkerThread

# Characters, per token of the window, of a text that is counted before it is encoded. Tokens of
# most texts have 2 to 5, so hardly any text that fits is encoded twice.
COUNTED_CHARACTERS = 8
PIECE_CHARACTERS = 65536  # counted at once: a tenth of a second or two


@dataclass(frozen=True)
class TurnLimits:
    """Limits of every turn.

    Attributes:
        window_tokens: most tokens of prompt and answer: the model's window, or the KV budget.
        vocab_size: upper bound of token ids, exclusive.
        eos_ids: ids of the tokens that end an answer.
        reserve_tokens: number of the answer's tokens for which there must be room when it begins.
        compress_tokens: tokens of the shortest context that is compressed.
        mark_tokens: tokens between marks of a long prompt, see `prompt_marks`; 0: marks only
            behind the system message and before the answer.
        has_states: whether the model has a state, which is stored at these marks.
    """

    window_tokens: int
    vocab_size: int
    eos_ids: frozenset[int]
    reserve_tokens: int = 256
    compress_tokens: int = 256
    mark_tokens: int = 0
    has_states: bool = False


@dataclass(frozen=True)
class Prompt:
    """The prompt of one turn: the session's context, what is dropped of it, and the turn's input.

    Attributes:
        before: the session's context before the turn.
        ranges: ranges of `before` that are dropped first; merged.
        input_ids: the token ids that the turn appends.
        system_tokens: how many of these are the system message; 0 if other tokens precede them.
        is_text: whether the input was raw text.
        window: the turn's window.
        thought: the opening mark of a thought with which the prompt ends, so that the answer's text
            begins with it; "" if there is none, or the answer follows a grammar.
        template_arguments: the chat template's arguments as they are recorded; see `TurnRecord`.
        predicted_ids: the client's prediction of most of the answer, as tokens.
        answer_from: position in `input_ids` where the prompt for the answer begins; 0: not known.
    """

    before: Context
    ranges: tuple[Range, ...]
    input_ids: list[int]
    system_tokens: int
    is_text: bool
    window: TurnWindow
    thought: str = ""
    template_arguments: str = ""
    predicted_ids: Sequence[int] = ()
    answer_from: int = 0

    @cached_property
    def context(self) -> Context:
        """The context that the answer continues: what is left of the session's, and the input."""
        return self.before.without(self.ranges).with_input(
            self.input_ids, system_tokens=self.system_tokens, is_text=self.is_text
        )

    def marks(self, every: int) -> tuple[int, ...]:
        """Return the positions from which later turns may continue; `every`: see `prompt_marks`."""
        num_tokens = len(self.context.token_ids)
        before = num_tokens - len(self.input_ids)
        answer_from = before + self.answer_from if self.answer_from else 0
        return prompt_marks(num_tokens, (self.context.system_tokens, answer_from), every)

    @property
    def discards(self) -> tuple[Discard, ...]:
        """The discard of `ranges`, as it is recorded."""
        return (Discard(self.ranges),) if self.ranges else ()


class MidTurnCut:
    """Chooses the ranges to drop when a turn has filled its window: `EngineRequest.truncate`.

    Args:
        prompt: the turn's prompt.
        answer: the turn's answer so far.
    """

    def __init__(self, prompt: Prompt, answer: GrowingAnswer) -> None:
        self._window = prompt.window
        self._context = prompt.context
        self._answer = answer

    def __call__(self, context_ids: Sequence[int]) -> tuple[Range, ...]:
        """Return the ranges of the context that the engine has to drop; () ends the answer."""
        new_ids = context_ids[len(self._context.token_ids) :]
        context = self._context.with_answer(new_ids)
        ranges = self._window.mid_turn(context, max(1, self._answer.num_held))
        self._context = context.without(ranges)
        return ranges


class PromptMaker:
    """Makes the prompts of turns; encodes on a thread.

    Args:
        text: encodes the input.
        text_thread: the thread that it encodes on.
        limits: the limits of every turn.
        has_tokenizer: whether answers have text.

    Attributes:
        text: encodes the input; off its thread only what needs no encoding is asked of it.
    """

    def __init__(
        self, text: TurnText, text_thread: WorkerThread, limits: TurnLimits, *, has_tokenizer: bool
    ) -> None:
        self.text = text
        self._thread = text_thread
        self._limits = limits
        self._has_tokenizer = has_tokenizer

    async def make(
        self, submission: Submission, context: Context, began_with: str | None = None
    ) -> Prompt:
        """Make the prompt of a turn that continues a context.

        Args:
            submission: the turn's submission.
            context: the session's context.
            began_with: the template arguments that the session began with, as recorded; None: it
                begins with this turn.

        Raises:
            EmptyTurnError: the input has no token.
            InvalidTurnError: a token id is outside the vocabulary, or there are stop strings and
                no tokenizer.
            InvalidSamplingError: the sampling parameters name a token outside the vocabulary.
            NoChatTemplateError: chat messages or text cannot be encoded.
            InputTooLongError: there is no room for the input, even if all that may go is dropped.
        """
        if submission.sampling.stop and not self._has_tokenizer:
            raise InvalidTurnError(
                "stop strings need a tokenizer, which the model does not have",
                "send no stop strings",
            )
        self._check_vocabulary(submission.sampling)
        window = self._window(submission)
        await self.check_length(submission.input)
        turn_input, recorded = await self._settle_arguments(submission.input, began_with)
        input_ids = await self._encode(turn_input, context)
        ranges = window.at_start(context, len(input_ids))
        kept = context.without(ranges)
        if ranges and ranges[-1][1] == len(context.token_ids):
            # The last answer is dropped, too: its closing, with which the input began, must go.
            input_ids = await self._encode(turn_input, kept)
            window.check_fits(len(kept.token_ids), len(input_ids))
        system_tokens = 0 if kept.token_ids else await self._system_tokens(turn_input, input_ids)
        is_text = isinstance(turn_input, TextInput)
        thought = await self._find_thought(submission, input_ids)
        predicted_ids = await self._encode_prediction(submission.prediction)
        return Prompt(
            *(context, ranges, input_ids, system_tokens, is_text, window, thought, recorded),
            predicted_ids,
            self.text.frame_tokens.last_start(input_ids)
            if isinstance(turn_input, ChatInput)
            else 0,
        )

    async def check_length(self, turn_input: TurnInput) -> None:
        """Check that an input, if it is long, does not fill the window by itself.

        Encoding takes a second for some hundred thousand characters, in which no other turn is
        encoded. A text that is refused all the same shall not take as long as its client likes: it
        is counted in pieces, between which others are encoded, until it is known to be too long.

        Raises:
            InputTooLongError: its beginning alone has more tokens than the window.
        """
        if isinstance(turn_input, TokenInput) or not self._has_tokenizer:
            return
        window_tokens = self._limits.window_tokens
        most, text = COUNTED_CHARACTERS * window_tokens, "\n".join(turn_input.whole_texts)
        if len(text) <= most:
            return
        has_special = isinstance(turn_input, TextInput) and turn_input.has_special
        size, num_tokens = min(PIECE_CHARACTERS, most), 0
        for start in range(0, len(text), size):
            num_tokens += await self._thread.run(
                self.text.num_tokens, text[start : start + size], has_special=has_special
            )
            # Less than all that was counted: the pieces' ends are cut, and may have other tokens.
            if num_tokens > window_tokens * 5 // 4:
                raise InputTooLongError(
                    f"the first {min(start + size, len(text))} characters of the input alone are "
                    f"{num_tokens} tokens, more than the window of {window_tokens}",
                    "send a shorter one",
                )

    async def encode(self, turn_input: TurnInput, behind: Transcript | None = None) -> list[int]:
        """Return the tokens of an input.

        Args:
            turn_input: the input.
            behind: the session whose turns it follows; None: it begins a session.

        Raises:
            ReportedError: it cannot be encoded; see `make`.
        """
        await self.check_length(turn_input)
        began_with = None if behind is None else behind.template_arguments
        settled, _ = await self._settle_arguments(turn_input, began_with)
        return await self._encode(settled, Context() if behind is None else behind.context)

    async def framing(self, own: Arguments) -> str:
        """Return a digest of how template arguments change conversations; see `Framing`.

        Args:
            own: the client's arguments.

        Returns:
            The digest; "" if they change nothing.
        """
        if not (own or self.text.usual):
            return ""
        return await self._thread.run(self.text.framing, own)

    async def encode_embedded(self, text_or_tokens: TextInput | TokenInput) -> list[int]:
        """Return the tokens of an input to embed; a text gets the tokenizer's special tokens.

        Raises:
            ReportedError: it cannot be encoded; see `make`.
        """
        if isinstance(text_or_tokens, TokenInput):
            token_ids = list(text_or_tokens.token_ids)
        else:
            token_ids = await self._thread.run(self.text.encode_framed, text_or_tokens.text)
        self._check_ids(token_ids)
        return token_ids

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return tokens as text, special ones by their names.

        Raises:
            InvalidTurnError: an id is outside the vocabulary.
            NoChatTemplateError: the model has no tokenizer.
        """
        self._check_ids(token_ids)
        return await self._thread.run(self.text.decode, token_ids)

    def _check_vocabulary(self, sampling: SamplingParams) -> None:
        """Raise an InvalidSamplingError if parameters name tokens outside the vocabulary."""
        vocab_size = self._limits.vocab_size
        for name, token_ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
        ):
            if any(not 0 <= token_id < vocab_size for token_id in token_ids):
                raise InvalidSamplingError(
                    f"{name} contains a token id outside the vocabulary",
                    f"send ids below {vocab_size}",
                )

    def _window(self, submission: Submission) -> TurnWindow:
        """Return the window of a turn, with its overflow policy."""
        return TurnWindow(
            policy=submission.overflow,
            window_tokens=self._limits.window_tokens,
            reserve_tokens=self._limits.reserve_tokens,
            max_tokens=submission.sampling.max_tokens,
            has_max_tokens=submission.has_max_tokens,
            frame_tokens=self.text.frame_tokens,
        )

    async def _settle_arguments(
        self, turn_input: TurnInput, began_with: str | None
    ) -> tuple[TurnInput, str]:
        """Return an input with all its template arguments, and these as they are recorded."""
        if not isinstance(turn_input, ChatInput):
            return turn_input, ""
        if not (turn_input.arguments or began_with or self.text.usual):
            return turn_input, ""  # the usual case: no arguments at all, and no call to the thread
        settled = await self._thread.run(self.text.settle, turn_input.arguments, began_with)
        return replace(turn_input, arguments=settled.arguments), settled.recorded

    async def _encode(self, turn_input: TurnInput, context: Context) -> list[int]:
        """Return the token ids to append to the context."""
        if isinstance(turn_input, TextInput):
            token_ids = await self._thread.run(
                self.text.encode_text,
                turn_input.text,
                opens_session=not context.token_ids,
                has_special=turn_input.has_special,
            )
        elif isinstance(turn_input, ChatInput):
            token_ids = await self._thread.run(
                self.text.encode_chat,
                turn_input.as_messages(),
                context.token_ids,
                turn_input.as_tools(),
                continues_answer=context.ends_with_answer,
                arguments=turn_input.arguments,
                beginning=turn_input.beginning,
                is_prompt=turn_input.is_prompt,
            )
        else:
            token_ids = list(turn_input.token_ids)
        if not token_ids:
            raise EmptyTurnError("the turn adds no token", "send text, messages or token ids")
        self._check_ids(token_ids)
        return token_ids

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        """Raise an InvalidTurnError if a token id is outside the vocabulary."""
        largest = max(token_ids, default=0)
        if largest >= self._limits.vocab_size:
            raise InvalidTurnError(
                f"token id {largest} is outside the vocabulary",
                f"send ids below {self._limits.vocab_size}",
            )

    async def _find_thought(self, submission: Submission, input_ids: Sequence[int]) -> str:
        """Return the opening mark of a thought that the prompt begins, if the answer shows it."""
        if submission.sampling.grammar is not None or not submission.shown_marks:
            return ""
        found = await self._thread.run(self.text.thought_begun, input_ids)
        return found if found in submission.shown_marks else ""

    async def _encode_prediction(self, prediction: str) -> Sequence[int]:
        """Return the tokens of a predicted answer, at most as many as an answer can have."""
        if not prediction or not self._has_tokenizer:
            return ()
        most = self._limits.window_tokens
        beginning = prediction[: COUNTED_CHARACTERS * most]  # few answers are longer
        predicted_ids = await self._thread.run(self.text.control.encode_plain, beginning)
        return predicted_ids[:most]

    async def _system_tokens(self, turn_input: TurnInput, input_ids: Sequence[int]) -> int:
        """Count the tokens of the system message that an input begins with."""
        if not isinstance(turn_input, ChatInput):
            return 0
        return await self._thread.run(
            self.text.system_tokens,
            turn_input.as_messages(),
            input_ids,
            turn_input.as_tools(),
            turn_input.arguments,
        )
