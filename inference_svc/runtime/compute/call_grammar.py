"""Keeps the calls of an answer to what they may be, once the model has begun them.

While the model says what it likes no token is masked: all there is to do is to look for a brace in
the text that each adds, for a call begins with that of its arguments. Whether one does is found by
the reader that shows it to the client, too. A token that begins a call, and adds to it what it may
not have, is refused before it counts: so whatever is shown as a call is one.
"""

import codecs
from collections.abc import Callable, Mapping

from inference_svc.core.tools.bound_calls import ANY_TOOL, BoundCalls
from inference_svc.core.tools.parts import Closing, OpenCall, is_open
from inference_svc.runtime.compute.answer_grammar import AnswerGrammar, Logits

_BRACE = "{"

Rests = Mapping[tuple[str, Closing], AnswerGrammar]


class CallGrammar:
    """Keeps one answer to its calls; see the module docstring.

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
