"""Grammar-constrained decoding: which tokens may come next in an answer, or in its tool calls.

The allowed tokens depend only on the tokens accepted so far. So a thread, where there is one, can
compute the mask while the model computes the logits (`start_mask`). A mask takes some twenty
microseconds, or two hundred for a vocabulary of 150,000 tokens. Once the grammar is complete, only
an end-of-turn token is allowed.

`AnswerGrammar` constrains a whole answer. `CallGrammar` constrains tool calls only, and each only
from where the model has begun it.

Invariant: one thread at a time uses the matcher. Every method that changes the matcher first
cancels the pending mask, so a mask always belongs to the current state, even if a step is repeated.
"""

import codecs
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from inference_svc.core.errors import InvalidGrammarError
from inference_svc.core.tools.bound_calls import ANY_TOOL, BoundCalls
from inference_svc.core.tools.parts import Closing, OpenCall, is_open
from inference_svc.runtime.worker_thread import WorkerThread

if TYPE_CHECKING:
    from concurrent.futures import Future

Logits = npt.NDArray[np.float32]  # [vocab]
Mask = npt.NDArray[np.bool_]  # [tokens in llguidance's vocabulary], True: not allowed next
_BRACE = "{"
# Parts of llguidance's messages: no token can come next; and what stands for the parser's state.
_NOTHING_FOLLOWS, _NOT_VERBOSE = "NoExtensionBias", "<non-verbose/>"


class AnswerGrammar:
    """The grammar of one answer, and the answer's position in it.

    Args:
        matcher: an llguidance matcher in its initial state.
        vocabulary: the tokenizer's vocabulary as an llguidance tokenizer.
        thread: computes masks ahead of `mask`; None: `mask` computes them itself.

    Attributes:
        is_free: whether any token may come next.
        is_in_call: whether the answer is inside a tool call that stands among free text.
    """

    is_free: ClassVar[bool] = False
    is_in_call: ClassVar[bool] = False

    def __init__(self, matcher: Any, vocabulary: Any, thread: WorkerThread | None = None) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._thread = thread
        self._pending: Future[Mask] | None = None  # the mask of the matcher's current state

    def check_begins(self) -> None:
        """Check that an answer can begin; to be called before its first use.

        Raises:
            InvalidGrammarError: see `mask`.
        """
        self._compute_mask()

    def start_mask(self) -> None:
        """Start to compute the mask that `mask` will apply; a second call does nothing."""
        if self._thread is not None and self._pending is None:
            self._pending = self._thread.submit(self._compute_mask)

    def mask(self, logits: Logits) -> None:
        """Set the logits of tokens that may not come next to minus infinity.

        Args:
            logits: [vocab], changed in place. Tokens beyond the vocabulary are masked too.

        Raises:
            InvalidGrammarError: nothing can follow, or it takes too long, or too much memory.
        """
        pending, self._pending = self._pending, None
        # A mask still queued behind other answers' masks is cancelled and computed right here,
        # in parallel to them, instead of waiting for its turn.
        masked = self._compute_mask() if pending is None or pending.cancel() else pending.result()
        num_known = min(len(logits), len(masked))
        np.copyto(logits[:num_known], -np.inf, where=masked[:num_known])
        logits[num_known:] = -np.inf

    def accept(self, token_id: int) -> bool:
        """Advance past a chosen token; return True, since masked tokens are never chosen.

        Raises:
            InvalidGrammarError: see `mask`.
        """
        self._cancel_mask()
        self._matcher.consume_token(token_id)
        self._check()
        return True

    def undo_accept(self) -> None:
        """Step back to before the token that was accepted last."""
        self._cancel_mask()
        self._matcher.rollback(1)
        self._check()

    def copy_after(self, text: str) -> "AnswerGrammar | None":
        """Return a copy advanced past a text; None: the grammar does not allow the text."""
        token_ids = self._vocabulary.tokenize_str(text)
        self._cancel_mask()
        matcher = self._matcher.deep_copy()
        if matcher.try_consume_tokens(token_ids) < len(token_ids):
            return None
        return AnswerGrammar(matcher, self._vocabulary, self._thread)

    def _compute_mask(self) -> Mask:
        """Compute the mask of the current state; llguidance mostly releases the GIL meanwhile."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=self._vocabulary.vocab_size, bitorder="little")
        return ~allowed.view(bool)

    def _cancel_mask(self) -> None:
        """Cancel the pending mask, or wait for it: afterwards no thread uses the matcher."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.cancel():
            # Waits for a mask that is being computed. Its error is dropped here: it stays in the
            # matcher, and the next use of the matcher raises it.
            pending.exception()

    def _check(self) -> None:
        if self._matcher.is_error():
            problem = one_line(self._matcher.get_error())
            if _NOTHING_FOLLOWS in problem:
                raise InvalidGrammarError(
                    "no text follows the answer's grammar", "send another grammar"
                )
            raise InvalidGrammarError(
                f"the answer's grammar failed ({problem})", "send a simpler grammar"
            )


# What may follow the beginning of a call, by the tool's name and by how the call is closed.
Continuations = Mapping[tuple[str, Closing], AnswerGrammar]


class CallGrammar:
    """Constrains the tool calls of one answer, each from where the model has begun it.

    Outside of calls no token is masked. There each token's text is only searched for a brace, since
    the arguments of every call begin with one. Whether a call has begun is then decided by the same
    reader that parses the answer for the client. If the token that begins a call also adds text
    that the call may not contain, `accept` refuses it. So everything shown as a call is a valid
    one.

    Args:
        calls: the tools that the answer may call.
        continuations: grammars of what follows the beginning of a call, as
            `BoundCalls.grammars` keys them.
        bytes_of: returns the bytes of the text that a token adds to the answer.
        begun: the beginning of the answer, where the prompt already contains it.
    """

    def __init__(
        self,
        calls: BoundCalls,
        continuations: Continuations,
        bytes_of: Callable[[int], bytes],
        begun: str = "",
    ) -> None:
        self._calls = calls
        self._continuations = continuations
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._texts = [begun]  # by token
        self._num_read = 0  # how many texts the reader has received
        self._reader = calls.reader()
        self._call: OpenCall | None = None  # the last call that the reader has found
        self._grammar: AnswerGrammar | None = None  # of the call that is open

    @property
    def is_free(self) -> bool:
        """Whether any token may come next."""
        return self._grammar is None

    @property
    def is_in_call(self) -> bool:
        """Whether the answer is inside a call."""
        return self._grammar is not None

    def start_mask(self) -> None:
        """Start to compute the mask, if a call is open; see `AnswerGrammar.start_mask`."""
        if self._grammar is not None:
            self._grammar.start_mask()

    def mask(self, logits: Logits) -> None:
        """Set the logits, [vocab], of tokens that may not come next to minus infinity.

        Raises:
            InvalidGrammarError: nothing can follow, or it takes too long, or too much memory.
        """
        if self._grammar is not None:
            self._grammar.mask(logits)

    def accept(self, token_id: int) -> bool:
        """Advance past a chosen token.

        Returns:
            Whether the token is allowed; if not, nothing has changed and another one has to be
            chosen.

        Raises:
            InvalidGrammarError: see `mask`.
        """
        before, grammar = self._decoder.getstate(), self._grammar
        text = self._decoder.decode(self._bytes_of(token_id))
        if grammar is not None:
            grammar.accept(token_id)
        self._texts.append(text)
        if grammar is None and _BRACE not in text:
            return True
        self._push_texts()
        call = self._reader.last_call
        if call is not None and call is not self._call and not self._start_call(call):
            if grammar is not None:
                grammar.undo_accept()
            self._decoder.setstate(before)
            self._texts.pop()
            # A reader cannot step back: a new one reads the answer without this token.
            self._reader, self._num_read = self._calls.reader(), 0
            self._push_texts()
            self._call = self._reader.last_call
            return False
        if is_open(call) is None:
            self._grammar = None
        return True

    def _push_texts(self) -> None:
        """Push the texts to the reader that it has not received yet."""
        self._reader.push("".join(self._texts[self._num_read :]))
        self._num_read = len(self._texts)

    def _start_call(self, call: OpenCall) -> bool:
        """Constrain a call that has begun; return whether it may begin like this."""
        of_any = self._continuations[ANY_TOOL, call.closing]
        grammar = self._continuations.get((call.name, call.closing), of_any).copy_after(call.begun)
        if grammar is None:
            return False
        self._call, self._grammar = call, grammar
        return True


def one_line(message: str) -> str:
    """Return the first 200 characters of an llguidance message, as one line."""
    return f"{' '.join(message.replace(_NOT_VERBOSE, '').split()):.200}"
