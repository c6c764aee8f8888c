"""Compiles grammars against a model's vocabulary, which takes from a millisecond to a second.

Between the members of a JSON document there may be few blanks (`BLANKS`): small models would
write blanks for ever.

*Source:* llguidance.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from inference_svc.core.errors import InvalidGrammarError
from inference_svc.core.grammar import Grammar, GrammarKind
from inference_svc.core.tools.bound_calls import BoundCalls
from inference_svc.core.tools.parts import BLANKS
from inference_svc.runtime.compute.answer_grammar import AnswerGrammar, CallGrammar, short
from inference_svc.runtime.worker_thread import WorkerThread

MAX_KEPT = 256  # compiled grammars of calls: agents offer the same tools with every turn
# Masks of fewer tokens are found when they are wanted: of 4096, another thread took 5 % more CPU
# time a token, and no answer came sooner. Of these it takes less (bench/README.md, "decode").
OVERLAP_TOKENS = 32_768


class Grammars:
    """Compiles grammars for one model, on a thread of its own: nobody's text waits for it.

    Args:
        tokenizer: the model's; None: it has none.
        vocab_size: number of the model's token ids.
        eos_ids: ids of its end-of-turn tokens.
        overlap_tokens: masks of vocabularies as large as this are found while the model computes.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        vocab_size: int,
        eos_ids: frozenset[int],
        overlap_tokens: int = OVERLAP_TOKENS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()
        self._thread = WorkerThread("grammars")
        # Another one: a step would wait for what is compiled.
        self._mask_thread = WorkerThread("masks") if vocab_size >= overlap_tokens else None
        self._vocabulary: Any | None = None  # read when the first grammar comes: it takes a while
        self._rests: OrderedDict[str, AnswerGrammar] = OrderedDict()  # by source, used last last

    def close(self) -> None:
        """End the threads, after the calls they run."""
        self._thread.close()
        if self._mask_thread is not None:
            self._mask_thread.close()

    async def compiled(self, grammar: Grammar | None) -> AnswerGrammar | None:
        """Compile the grammar of an answer, on the thread; None if it has none.

        Raises:
            InvalidGrammarError: it is none, or this model cannot have any.
        """
        return None if grammar is None else await self._thread.run(self.compile, grammar)

    @cached_property
    def problem(self) -> str:
        """Why this model cannot have any; "" if it can. Reads the vocabulary; any thread may."""
        try:
            self._read()
        except InvalidGrammarError as error:
            return str(error)
        return ""

    async def bound(
        self, calls: BoundCalls | None, marks: Mapping[int, str], begun: str
    ) -> CallGrammar | None:
        """Compile the grammars of an answer's calls, on the thread; None if it may have none.

        Args:
            calls: what it may call; None: nothing.
            marks: special tokens that its text has, by their ids.
            begun: text that the prompt has written of the answer.

        Raises:
            InvalidGrammarError: the schema of a strict tool is none, or too long; or this model
                cannot have any.
        """
        return None if calls is None else await self._thread.run(self.bind, calls, marks, begun)

    def bind(self, calls: BoundCalls, marks: Mapping[int, str], begun: str = "") -> CallGrammar:
        """Compile the grammars of an answer's calls; see `bound`. Any thread may."""
        special = {mark: token_id for token_id, mark in marks.items()}
        rests = {which: self._kept(grammar) for which, grammar in calls.grammars(special)}
        return CallGrammar(calls, rests, self._bytes_of(marks), begun)

    def _kept(self, grammar: Grammar) -> AnswerGrammar:
        """Return a compiled grammar that is only to be copied."""
        with self._lock:
            found = self._rests.get(grammar.source)
        if found is None:
            grammar.check()
            found = self.compile(grammar)
        with self._lock:
            self._rests[grammar.source] = found
            self._rests.move_to_end(grammar.source)
            if len(self._rests) > MAX_KEPT:
                self._rests.popitem(last=False)
        return found

    def _bytes_of(self, marks: Mapping[int, str]) -> Callable[[int], bytes]:
        """Return what tells the bytes of the text that a token adds to an answer.

        Args:
            marks: special tokens that it has; others are not shown.
        """
        vocabulary, tokenizer = self._read(), self._tokenizer
        assert tokenizer is not None, "it has a vocabulary"  # noqa: S101
        num_tokens = len(tokenizer)
        shown = {token_id: mark.encode() for token_id, mark in marks.items()}
        hidden = frozenset(tokenizer.all_special_ids) - shown.keys()

        def bytes_of(token_id: int) -> bytes:
            if token_id in shown:
                return shown[token_id]
            is_shown = token_id < num_tokens and token_id not in hidden
            found: bytes = vocabulary.decode_bytes([token_id]) if is_shown else b""
            return found

        return bytes_of

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
        return AnswerGrammar(matcher, vocabulary, self._mask_thread)

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
                f"the model's tokenizer has no vocabulary for grammars ({short(str(error))})",
                "leave the grammar out",
            ) from error


_SOURCES = {
    GrammarKind.JSON_SCHEMA: lambda matcher, source: matcher.grammar_from_json_schema(
        source, overrides={"whitespace_pattern": BLANKS}
    ),
    GrammarKind.REGEX: lambda matcher, source: matcher.grammar_from_regex(source),
    GrammarKind.LARK: lambda matcher, source: matcher.grammar_from_lark(source),
}


def _invalid(said: str) -> InvalidGrammarError:
    return InvalidGrammarError(f"the grammar cannot be kept to ({short(said)})", "send another one")
