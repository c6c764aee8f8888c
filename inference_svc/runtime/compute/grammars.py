"""Grammar compilation against a model's vocabulary: takes from a millisecond to a second.

JSON grammars allow only a few blanks between members (`BLANKS`): small models would otherwise
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
from inference_svc.runtime.compute.answer_grammar import AnswerGrammar, CallGrammar, one_line
from inference_svc.runtime.worker_thread import WorkerThread

MAX_CACHED = 256  # compiled grammars of calls: agents offer the same tools with every turn
# Vocabulary size from which masks are computed on a thread. Smaller masks are computed when they
# are needed: with 4096 tokens, the thread took 5 % more CPU time per token, and no answer came
# sooner. From this size on the thread saves time (bench/README.md, "decode").
OVERLAP_TOKENS = 32_768


class Grammars:
    """The grammars of one model, compiled on a thread of their own so that no stream stalls.

    Args:
        tokenizer: the model's tokenizer; None: it has none.
        vocab_size: number of the model's token ids.
        eos_ids: ids of its end-of-turn tokens.
        overlap_tokens: vocabulary size from which masks are computed while the model computes.
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
        # Not the same thread: a step's masks would wait for a grammar that is being compiled.
        self._mask_thread = WorkerThread("masks") if vocab_size >= overlap_tokens else None
        self._vocabulary: Any | None = None  # loaded with the first grammar, since that is slow
        # Grammars of calls by source, the least recently used first.
        self._cache: OrderedDict[str, AnswerGrammar] = OrderedDict()

    def close(self) -> None:
        """End the threads, once the calls that they run are finished."""
        self._thread.close()
        if self._mask_thread is not None:
            self._mask_thread.close()

    async def compile_on_thread(self, grammar: Grammar | None) -> AnswerGrammar | None:
        """Compile the grammar of an answer on the thread; None if the answer has no grammar.

        Raises:
            InvalidGrammarError: the grammar is malformed, or this model supports no grammars.
        """
        return None if grammar is None else await self._thread.run(self.compile, grammar)

    @cached_property
    def problem(self) -> str:
        """Why this model supports no grammars; "" if it does.

        Loads the vocabulary, which takes a while; any thread may call it.
        """
        try:
            self._load_vocabulary()
        except InvalidGrammarError as error:
            return str(error)
        return ""

    async def compile_calls_on_thread(
        self, calls: BoundCalls | None, marks: Mapping[int, str], begun: str
    ) -> CallGrammar | None:
        """Compile the grammars of an answer's calls on the thread; None without calls.

        Args:
            calls: the tools that the answer may call; None: it is not constrained.
            marks: special tokens that are part of the answer's text, by their ids.
            begun: the beginning of the answer, where the prompt already contains it.

        Raises:
            InvalidGrammarError: the schema of a strict tool is malformed or too long; or this model
                supports no grammars.
        """
        return (
            None
            if calls is None
            else await self._thread.run(self.compile_calls, calls, marks, begun)
        )

    def compile_calls(
        self, calls: BoundCalls, marks: Mapping[int, str], begun: str = ""
    ) -> CallGrammar:
        """Compile the grammars of calls on any thread; see `compile_calls_on_thread`."""
        special = {mark: token_id for token_id, mark in marks.items()}
        continuations = {which: self._cached(grammar) for which, grammar in calls.grammars(special)}
        return CallGrammar(calls, continuations, self._bytes_of(marks), begun)

    def _cached(self, grammar: Grammar) -> AnswerGrammar:
        """Return a compiled grammar from the cache; the caller copies it and never advances it."""
        with self._lock:
            found = self._cache.get(grammar.source)
        if found is None:
            grammar.check()
            found = self.compile(grammar)
        with self._lock:
            self._cache[grammar.source] = found
            self._cache.move_to_end(grammar.source)
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return found

    def _bytes_of(self, marks: Mapping[int, str]) -> Callable[[int], bytes]:
        """Return a function from a token's id to the bytes that it adds to an answer's text.

        Args:
            marks: special tokens that are part of the text; all others add nothing.
        """
        vocabulary, tokenizer = self._load_vocabulary(), self._tokenizer
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
        """Compile a grammar for one answer; any thread may call it.

        Raises:
            InvalidGrammarError: the grammar is malformed, no text follows it, or this model
                supports no grammars.
        """
        vocabulary = self._load_vocabulary()
        from llguidance import LLMatcher, LLParserLimits  # optional: see `_vocabulary_of`

        try:
            source = _SOURCES[grammar.kind](LLMatcher, grammar.source)
        except ValueError as error:  # the schema is not JSON
            raise _invalid(str(error)) from error
        # Verbose errors show the parser's state, and with it text of the answer.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise _invalid(matcher.get_error())
        compiled = AnswerGrammar(matcher, vocabulary, self._mask_thread)
        compiled.check_begins()
        return compiled

    def _load_vocabulary(self) -> Any:
        """Return the llguidance tokenizer, which the first call makes.

        Raises:
            InvalidGrammarError: it cannot be made of this model's tokenizer.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._vocabulary_of(self._tokenizer)
            return self._vocabulary

    def _vocabulary_of(self, tokenizer: Any | None) -> Any:
        if tokenizer is None or not self._eos_ids:
            missing = "tokenizer" if tokenizer is None else "end-of-turn token"
            raise InvalidGrammarError(
                f"the model has no {missing}, so answers cannot follow a grammar",
                "leave the grammar out",
            )
        try:
            from llguidance.hf import from_tokenizer

            return from_tokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except ImportError as error:
            raise InvalidGrammarError(
                "llguidance is not installed, so answers cannot follow a grammar",
                "install it in the service's environment: pip install llguidance",
            ) from error
        except ValueError as error:
            raise InvalidGrammarError(
                "grammars cannot use the vocabulary of the model's tokenizer "
                f"({one_line(str(error))})",
                "leave the grammar out",
            ) from error


_SOURCES = {
    GrammarKind.JSON_SCHEMA: lambda matcher, source: matcher.grammar_from_json_schema(
        source, overrides={"whitespace_pattern": BLANKS}
    ),
    GrammarKind.REGEX: lambda matcher, source: matcher.grammar_from_regex(source),
    GrammarKind.LARK: lambda matcher, source: matcher.grammar_from_lark(source),
}


def _invalid(message: str) -> InvalidGrammarError:
    return InvalidGrammarError(
        f"the grammar is not valid ({one_line(message)})", "send another grammar"
    )
