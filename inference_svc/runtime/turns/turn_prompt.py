"""A turn's prompt: its input as token ids, and the discards of the context that make room."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from inference_svc.core.answers import GrowingAnswer, SamplingParams
from inference_svc.core.context import Context, prompt_marks
from inference_svc.core.discards import Discard, Range
from inference_svc.core.errors import EmptyTurnError, InvalidSamplingError, InvalidTurnError
from inference_svc.core.submission import ChatInput, Submission, TextInput, TokenInput, TurnInput
from inference_svc.core.template_arguments import Arguments
from inference_svc.core.transcript_format import Transcript
from inference_svc.core.truncation import TurnWindow
from inference_svc.runtime.turns.chat_text import TurnText
from inference_svc.runtime.worker_thread import WorkerThread


@dataclass(frozen=True)
class TurnLimits:
    """Limits of every turn.

    Attributes:
        window_tokens: most tokens of prompt and answer: the model's window, or the KV budget.
        vocab_size: upper bound of token ids, exclusive.
        eos_ids: ids of the tokens that end an answer.
        reserve_tokens: tokens of the answer that have room when it begins.
        compress_tokens: tokens of the shortest context that is compressed.
        mark_tokens: tokens between marks of a long prompt, see `prompt_marks`; 0: none but where
            conversations turn.
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
    """See the module docstring.

    Attributes:
        before: the session's context as the turn found it.
        ranges: ranges of it that are dropped first; merged.
        input_ids: the token ids that the turn appends.
        system_tokens: how many of these are the system message; 0 if something precedes them.
        is_text: whether the input was raw text.
        window: the turn's window.
        thought: the mark of a thought that it ends with: the answer's text begins with it; "" if
            there is none, or the answer is none of the model's own words.
        template_arguments: what its record says of them; see `TurnRecord`.
        predicted_ids: what most of the answer will likely be, as tokens.
        answer_from: where in `input_ids` the prompt for the answer begins; 0: not known.
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
        """Return the positions where other turns may go on; `every`: see `prompt_marks`."""
        num_tokens = len(self.context.token_ids)
        before = num_tokens - len(self.input_ids)
        answer_from = before + self.answer_from if self.answer_from else 0
        return prompt_marks(num_tokens, (self.context.system_tokens, answer_from), every)

    @property
    def discards(self) -> tuple[Discard, ...]:
        """The discard of `ranges`, as it is recorded."""
        return (Discard(self.ranges),) if self.ranges else ()


class MidTurnCut:
    """Chooses what is dropped when a turn has filled its window: `EngineRequest.truncate`."""

    def __init__(self, prompt: Prompt, answer: GrowingAnswer) -> None:
        self._window = prompt.window
        self._context = prompt.context
        self._answer = answer

    def __call__(self, context_ids: Sequence[int]) -> tuple[Range, ...]:
        """Return the ranges that the engine is to drop of the context: () ends the answer."""
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
        text: encodes the input; off the thread it is asked only for what is known at once.
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
            submission: of the turn.
            context: what its session has.
            began_with: the template arguments that the session began with; None: it begins now.

        Raises:
            EmptyTurnError: the input has no token.
            InvalidTurnError: a token id is off, or text is wanted where there is none.
            InvalidSamplingError: it names a token that the model has not.
            NoChatTemplateError: chat messages or text cannot be encoded.
            InputTooLongError: there is no room for the input, whatever may be dropped.
        """
        if submission.sampling.stop and not self._has_tokenizer:
            raise InvalidTurnError(
                "stop strings need a tokenizer, the model has none", "send none of them"
            )
        self._check_vocabulary(submission.sampling)
        window = self._window(submission)
        given, recorded = await self._settled(submission.input, began_with)
        input_ids = await self._encode(given, context)
        ranges = window.at_start(context, len(input_ids))
        kept = context.without(ranges)
        if ranges and ranges[-1][1] == len(context.token_ids):
            # The last answer is dropped, too: its closing, which begins the input, goes with it.
            input_ids = await self._encode(given, kept)
            window.check_fits(len(kept.token_ids), len(input_ids))
        system_tokens = 0 if kept.token_ids else await self._system_tokens(given, input_ids)
        is_text = isinstance(given, TextInput)
        thought = await self._thought(submission, input_ids)
        predicted_ids = await self._predicted(submission.prediction)
        return Prompt(
            *(context, ranges, input_ids, system_tokens, is_text, window, thought, recorded),
            predicted_ids,
            self.text.frame_tokens.last_start(input_ids) if isinstance(given, ChatInput) else 0,
        )

    async def encode(self, given: TurnInput, behind: Transcript | None = None) -> list[int]:
        """Return the tokens of an input that follows a session's turns; None: that begins one.

        Raises:
            ReportedError: it cannot be encoded; see `make`.
        """
        began_with = None if behind is None else behind.template_arguments
        settled, _ = await self._settled(given, began_with)
        return await self._encode(settled, Context() if behind is None else behind.context)

    async def framing(self, own: Arguments) -> str:
        """Return a digest of what a client's template arguments make of conversations: `Framing`.

        Returns:
            "" if it is what none make of them.
        """
        if not (own or self.text.usual):
            return ""
        return await self._thread.run(self.text.framing, own)

    async def encode_embedded(self, given: TextInput | TokenInput) -> list[int]:
        """Return the tokens of an input that is embedded; a text's as the tokenizer frames it.

        Raises:
            ReportedError: it cannot be encoded; see `make`.
        """
        if isinstance(given, TokenInput):
            token_ids = list(given.token_ids)
        else:
            token_ids = await self._thread.run(self.text.encode_framed, given.text)
        self._check_ids(token_ids)
        return token_ids

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return tokens as text, special ones by their names.

        Raises:
            InvalidTurnError: an id is off.
            NoChatTemplateError: the model has no tokenizer.
        """
        self._check_ids(token_ids)
        return await self._thread.run(self.text.decode, token_ids)

    def _check_vocabulary(self, sampling: SamplingParams) -> None:
        vocab_size = self._limits.vocab_size
        for name, token_ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
        ):
            if any(not 0 <= token_id < vocab_size for token_id in token_ids):
                raise InvalidSamplingError(
                    f"{name} has a token id outside the vocabulary", f"send ids below {vocab_size}"
                )

    def _window(self, submission: Submission) -> TurnWindow:
        return TurnWindow(
            policy=submission.overflow,
            window_tokens=self._limits.window_tokens,
            reserve_tokens=self._limits.reserve_tokens,
            max_tokens=submission.sampling.max_tokens,
            has_max_tokens=submission.has_max_tokens,
            frame_tokens=self.text.frame_tokens,
        )

    async def _settled(self, given: TurnInput, began_with: str | None) -> tuple[TurnInput, str]:
        """Return an input with all its template arguments, and what is recorded of these."""
        if not isinstance(given, ChatInput):
            return given, ""
        if not (given.arguments or began_with or self.text.usual):
            return given, ""  # as nearly all are
        settled = await self._thread.run(self.text.settle, given.arguments, began_with)
        return replace(given, arguments=settled.arguments), settled.recorded

    async def _encode(self, given: TurnInput, context: Context) -> list[int]:
        """Return the token ids to append to the context."""
        if isinstance(given, TextInput):
            token_ids = await self._thread.run(
                self.text.encode_text,
                given.text,
                opens_session=not context.token_ids,
                has_special=given.has_special,
            )
        elif isinstance(given, ChatInput):
            token_ids = await self._thread.run(
                self.text.encode_chat,
                given.as_messages(),
                context.token_ids,
                given.as_tools(),
                continues_answer=context.ends_with_answer,
                arguments=given.arguments,
                beginning=given.beginning,
                is_prompt=given.is_prompt,
            )
        else:
            token_ids = list(given.token_ids)
        if not token_ids:
            raise EmptyTurnError("the turn brings no token", "send text, messages or token ids")
        self._check_ids(token_ids)
        return token_ids

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        largest = max(token_ids, default=0)
        if largest >= self._limits.vocab_size:
            raise InvalidTurnError(
                f"token id {largest} is outside the vocabulary",
                f"send ids below {self._limits.vocab_size}",
            )

    async def _thought(self, submission: Submission, input_ids: Sequence[int]) -> str:
        """Return what an answer that is shown with its marks begins with."""
        if submission.sampling.grammar is not None or not submission.shown_marks:
            return ""
        found = await self._thread.run(self.text.thought_begun, input_ids)
        return found if found in submission.shown_marks else ""

    async def _predicted(self, prediction: str) -> Sequence[int]:
        """Return the tokens of what an answer is likely to be, as many as an answer can have."""
        if not prediction or not self._has_tokenizer:
            return ()
        predicted_ids = await self._thread.run(self.text.control.encode_plain, prediction)
        return predicted_ids[: self._limits.window_tokens]

    async def _system_tokens(self, given: TurnInput, input_ids: Sequence[int]) -> int:
        if not isinstance(given, ChatInput):
            return 0
        return await self._thread.run(
            self.text.system_tokens,
            given.as_messages(),
            input_ids,
            given.as_tools(),
            given.arguments,
        )
