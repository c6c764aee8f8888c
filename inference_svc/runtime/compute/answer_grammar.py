"""The grammar of an answer, and how far the answer has come: which tokens may come next.

What may come next depends on the tokens that were accepted alone: with a thread for it, it is found
while the model computes (`start_mask`). It costs some twenty microseconds a token; of a vocabulary
of 150,000 tokens, two hundred. An answer ends where its grammar does: then only an end-of-turn
token may come.

Invariant: the matcher is used by one thread at a time. Whatever changes it first takes back the
mask that was begun: a mask is never that of another state, however often a step is repeated.
"""

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from inference_svc.core.errors import EngineFailedError
from inference_svc.runtime.worker_thread import WorkerThread

if TYPE_CHECKING:
    from concurrent.futures import Future

Logits = npt.NDArray[np.float32]  # [vocab]
Mask = npt.NDArray[np.bool_]  # [tokens that the vocabulary knows], true: may not come next


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


def short(said: str) -> str:
    """Return a message of llguidance's in one line, as much as is of use."""
    return f"{' '.join(said.split()):.200}"
