"""The grammar of an answer, and how far the answer has come: which tokens may come next.

What may come next costs some ten microseconds a token. An answer ends where its grammar does: then
only an end-of-turn token may come.
"""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from inference_svc.core.errors import EngineFailedError

Logits = npt.NDArray[np.float32]  # [vocab]


class AnswerGrammar:
    """The grammar of one answer, and how far the answer has come.

    Args:
        matcher: llguidance's, at its beginning.
        vocabulary: the tokens that it knows, as llguidance has them.

    Attributes:
        is_free: whether any token may come next.
        is_in_call: whether the answer is within a call among other things that it says.
    """

    is_free: ClassVar[bool] = False
    is_in_call: ClassVar[bool] = False

    def __init__(self, matcher: Any, vocabulary: Any) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def mask(self, logits: Logits) -> None:
        """Set the logits of tokens that may not come next to minus infinity.

        Raises:
            EngineFailedError: the grammar takes too long, or too much memory.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        may_come = np.unpackbits(bits, bitorder="little")[: self._vocabulary.vocab_size].view(bool)
        num_known = min(len(logits), len(may_come))
        logits[:num_known][~may_come[:num_known]] = -np.inf
        logits[num_known:] = -np.inf

    def accept(self, token_id: int) -> bool:
        """Go on behind the token that was chosen; return whether it may come: it was not masked.

        Raises:
            EngineFailedError: see `mask`.
        """
        self._matcher.consume_token(token_id)
        self._check()
        return True

    def take_back(self) -> None:
        """Go back before the token that was accepted last."""
        self._matcher.rollback(1)
        self._check()

    def behind(self, text: str) -> "AnswerGrammar | None":
        """Return the grammar of what follows a text; None: no answer goes on so."""
        token_ids = self._vocabulary.tokenize_str(text)
        matcher = self._matcher.deep_copy()
        if matcher.try_consume_tokens(token_ids) < len(token_ids):
            return None
        return AnswerGrammar(matcher, self._vocabulary)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineFailedError(
                f"the answer's grammar failed ({short(self._matcher.get_error())})",
                "send a simpler one",
            )


def short(said: str) -> str:
    """Return a message of llguidance's in one line, as much as is of use."""
    return f"{' '.join(said.split()):.200}"
