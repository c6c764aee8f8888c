"""Keeps an answer within a grammar: which tokens may come next, step by step.

A grammar is compiled against the model's vocabulary, which takes from a millisecond to a second.
What may come next costs some ten microseconds a token. An answer ends where its grammar does: then
only an end-of-turn token may come.

Between the members of a JSON document there may be MAX_BLANKS blanks at most: small models would
write blanks for ever.

*Source:* llguidance.
"""

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from inference_svc.core.errors import EngineFailedError, InvalidGrammarError
from inference_svc.core.grammar import Grammar, GrammarKind
from inference_svc.runtime.worker_thread import WorkerThread

Logits = npt.NDArray[np.float32]  # [vocab]

MAX_BLANKS = 40
_BLANKS = rf"[ \n\r\t]{{0,{MAX_BLANKS}}}"


class AnswerGrammar:
    """The grammar of one answer, and how far the answer has come.

    Args:
        matcher: llguidance's, at its beginning.
        num_tokens: number of the tokens that it knows.
    """

    def __init__(self, matcher: Any, num_tokens: int) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens

    def mask(self, logits: Logits) -> None:
        """Set the logits of tokens that may not come next to minus infinity.

        Raises:
            EngineFailedError: the grammar takes too long, or too much memory.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        may_come = np.unpackbits(bits, bitorder="little")[: self._num_tokens].view(bool)
        num_known = min(len(logits), len(may_come))
        logits[:num_known][~may_come[:num_known]] = -np.inf
        logits[num_known:] = -np.inf

    def accept(self, token_id: int) -> None:
        """Go on behind the token that was chosen.

        Raises:
            EngineFailedError: see `mask`.
        """
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineFailedError(
                f"the answer's grammar failed ({_short(self._matcher.get_error())})",
                "send a simpler one",
            )


class Grammars:
    """Compiles grammars for one model, on a thread of its own: nobody's text waits for it.

    Args:
        tokenizer: the model's; None: it has none.
        vocab_size: number of the model's token ids.
        eos_ids: ids of its end-of-turn tokens.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()
        self._thread = WorkerThread("grammars")
        self._vocabulary: Any | None = None  # read when the first grammar comes: it takes a while

    def close(self) -> None:
        """End the thread, after the call it runs."""
        self._thread.close()

    async def compiled(self, grammar: Grammar | None) -> AnswerGrammar | None:
        """Compile the grammar of an answer, on the thread; None if it has none.

        Raises:
            InvalidGrammarError: it is none, or this model cannot have any.
        """
        return None if grammar is None else await self._thread.run(self.compile, grammar)

    def compile(self, grammar: Grammar) -> AnswerGrammar:
        """Compile a grammar for one answer; any thread may.

        Raises:
            InvalidGrammarError: it is none, or this model cannot have any.
        """
        vocabulary = self._read()
        from llguidance import LLMatcher

        try:
            source = _SOURCES[grammar.kind](LLMatcher, grammar.source)
        except ValueError as error:  # the schema is no JSON
            raise _invalid(str(error)) from error
        matcher = LLMatcher(vocabulary, source, log_level=0)
        if matcher.is_error():
            raise _invalid(matcher.get_error())
        return AnswerGrammar(matcher, vocabulary.vocab_size)

    def _read(self) -> Any:
        """Return the vocabulary as llguidance has it.

        Raises:
            InvalidGrammarError: it cannot be read.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._vocabulary_of(self._tokenizer)
            return self._vocabulary

    def _vocabulary_of(self, tokenizer: Any | None) -> Any:
        if tokenizer is None or not self._eos_ids:
            missing = "tokenizer" if tokenizer is None else "end-of-turn token"
            raise InvalidGrammarError(
                f"the model has no {missing}, and no answers by a grammar", "leave the grammar out"
            )
        try:
            from llguidance.hf import from_tokenizer

            return from_tokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except ImportError as error:
            raise InvalidGrammarError(
                "llguidance is not installed at the service", "pip install llguidance"
            ) from error
        except ValueError as error:
            raise InvalidGrammarError(
                f"the model's tokenizer has no vocabulary for grammars ({_short(str(error))})",
                "leave the grammar out",
            ) from error


_SOURCES = {
    GrammarKind.JSON_SCHEMA: lambda matcher, source: matcher.grammar_from_json_schema(
        source, overrides={"whitespace_pattern": _BLANKS}
    ),
    GrammarKind.REGEX: lambda matcher, source: matcher.grammar_from_regex(source),
    GrammarKind.LARK: lambda matcher, source: matcher.grammar_from_lark(source),
}


def _invalid(said: str) -> InvalidGrammarError:
    return InvalidGrammarError(
        f"the grammar cannot be kept to ({_short(said)})", "send another one"
    )


def _short(said: str) -> str:
    return f"{' '.join(said.split()):.200}"
