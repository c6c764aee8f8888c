"""The grammar of an answer, or of its calls, and how far it has come: which tokens may come next.

What may come next depends on the tokens that were accepted alone: with a thread for it, it is found
while the model computes (`start_mask`). It costs some twenty microseconds a token; of a vocabulary
of 150,000 tokens, two hundred. An answer ends where its grammar does: then only an end-of-turn
token may come.

Calls are kept to what they may be once the model has begun them (`CallGrammar`).

Invariant: the matcher is used by one thread at a time. Whatever changes it first takes back the
mask that was begun: a mask is never that of another state, however often a step is repeated.
"""

import codecs
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from inference_svc.core.errors import EngineFailedError
from inference_svc.core.tools.bound_calls import ANY_TOOL, BoundCalls
from inference_svc.core.tools.parts import Closing, OpenCall, is_open
from inference_svc.runtime.worker_thread import WorkerThread

if TYPE_CHECKING:
    from concurrent.futures import Future

Logits = npt.NDArray[np.float32]  # [vocab]
Mask = npt.NDArray[np.bool_]  # [tokens that the vocabulary knows], true: may not come next
_BRACE = "{"


class AnswerGrammar:
    """The grammar of one answer, and how far the answer has come.

    Args:
        matcher: llguidance's, at its beginning.
        vocabulary: the tokens that it knows, as llguidance has them.
        thread: finds masks that are begun; None: they are found when they are wanted.

    Attributes:
        is_free: whether any token may come next.
        is_in_call: whether the answer is within a call among other things that it says.
    """

    is_free: ClassVar[bool] = False
    is_in_call: ClassVar[bool] = False

    def __init__(self, matcher: Any, vocabulary: Any, thread: WorkerThread | None = None) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._thread = thread
        self._begun: Future[Mask] | None = None  # of what may come next, in the matcher's state

    def start_mask(self) -> None:
        """Begin to find which tokens may come next; `mask` has it then. Does nothing twice."""
        if self._thread is not None and self._begun is None:
            self._begun = self._thread.begin(self._find_mask)

    def mask(self, logits: Logits) -> None:
        """Set the logits of tokens that may not come next to minus infinity.

        Raises:
            EngineFailedError: the grammar takes too long, or too much memory.
        """
        begun, self._begun = self._begun, None
        # One that still waits for its thread is found here, beside those before it.
        masked = self._find_mask() if begun is None or begun.cancel() else begun.result()
        num_known = min(len(logits), len(masked))
        np.copyto(logits[:num_known], -np.inf, where=masked[:num_known])
        logits[num_known:] = -np.inf

    def accept(self, token_id: int) -> bool:
        """Go on behind the token that was chosen; return whether it may come: it was not masked.

        Raises:
            EngineFailedError: see `mask`.
        """
        self._end_mask()
        self._matcher.consume_token(token_id)
        self._check()
        return True

    def take_back(self) -> None:
        """Go back before the token that was accepted last."""
        self._end_mask()
        self._matcher.rollback(1)
        self._check()

    def behind(self, text: str) -> "AnswerGrammar | None":
        """Return the grammar of what follows a text; None: no answer goes on so."""
        token_ids = self._vocabulary.tokenize_str(text)
        self._end_mask()
        matcher = self._matcher.deep_copy()
        if matcher.try_consume_tokens(token_ids) < len(token_ids):
            return None
        return AnswerGrammar(matcher, self._vocabulary, self._thread)

    def _find_mask(self) -> Mask:
        """Find which tokens may not come next, on either thread: mostly without Python's lock."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        may_come = np.unpackbits(bits, count=self._vocabulary.vocab_size, bitorder="little")
        return ~may_come.view(bool)

    def _end_mask(self) -> None:
        """Take back the mask that was begun, if nobody had it: no thread uses the matcher then."""
        begun, self._begun = self._begun, None
        if begun is not None and not begun.cancel():
            begun.exception()  # waits; whoever uses the matcher next is told

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineFailedError(
                f"the answer's grammar failed ({short(self._matcher.get_error())})",
                "send a simpler one",
            )


Rests = Mapping[tuple[str, Closing], AnswerGrammar]


class CallGrammar:
    """Keeps the calls of one answer to what they may be, once the model has begun them.

    While the model says what it likes no token is masked: all there is to do is to look for a brace
    in the text that each adds, for a call begins with that of its arguments. Whether one does is
    found by the reader that shows it to the client, too. A token that begins a call, and adds to it
    what it may not have, is refused before it counts: so whatever is shown as a call is one.

    Args:
        calls: those that it may have.
        rests: what may follow the beginning of a call: see `BoundCalls.grammars`.
        bytes_of: returns the bytes of the text that a token adds.
        begun: text that the prompt has written of the answer.
    """

    def __init__(
        self, calls: BoundCalls, rests: Rests, bytes_of: Callable[[int], bytes], begun: str = ""
    ) -> None:
        self._calls = calls
        self._rests = rests
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._said = [begun]
        self._num_read = 0  # of these, by the reader
        self._reader = calls.reader()
        self._call: OpenCall | None = None  # the last one that was found
        self._rest: AnswerGrammar | None = None  # of the call that is open

    @property
    def is_free(self) -> bool:
        """Whether any token may come next."""
        return self._rest is None

    @property
    def is_in_call(self) -> bool:
        """Whether the answer is within a call."""
        return self._rest is not None

    def start_mask(self) -> None:
        """Begin to find which tokens may come next, where not any may."""
        if self._rest is not None:
            self._rest.start_mask()

    def mask(self, logits: Logits) -> None:
        """Set the logits of tokens that may not come next to minus infinity.

        Raises:
            EngineFailedError: the grammar takes too long, or too much memory.
        """
        if self._rest is not None:
            self._rest.mask(logits)

    def accept(self, token_id: int) -> bool:
        """Go on behind the token that was chosen; return whether it may come.

        Raises:
            EngineFailedError: see `mask`.
        """
        before, rest = self._decoder.getstate(), self._rest
        text = self._decoder.decode(self._bytes_of(token_id))
        if rest is not None:
            rest.accept(token_id)
        self._said.append(text)
        if rest is None and _BRACE not in text:
            return True
        self._read()
        call = self._reader.last_call
        if call is not None and call is not self._call and not self._begin(call):
            if rest is not None:
                rest.take_back()
            self._decoder.setstate(before)
            self._said.pop()
            self._reader, self._num_read = self._calls.reader(), 0
            self._read()
            self._call = self._reader.last_call
            return False
        if is_open(call) is None:
            self._rest = None
        return True

    def _read(self) -> None:
        """Have the reader read what was said since it last did."""
        self._reader.push("".join(self._said[self._num_read :]))
        self._num_read = len(self._said)

    def _begin(self, call: OpenCall) -> bool:
        """Begin a call; return whether it may begin so."""
        of_any = self._rests[ANY_TOOL, call.closing]
        rest = self._rests.get((call.name, call.closing), of_any).behind(call.begun)
        if rest is None:
            return False
        self._call, self._rest = call, rest
        return True


def short(said: str) -> str:
    """Return a message of llguidance's in one line, as much as is of use."""
    return f"{' '.join(said.split()):.200}"
