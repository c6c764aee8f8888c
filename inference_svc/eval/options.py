"""What a run of `inference-svc eval` is told. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from inference_svc.eval.methods import Method

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def _say_nothing(_what: str) -> None:
    """Report progress to nobody."""


@dataclass(frozen=True, slots=True)
class EvalChoice:
    """The model to measure.

    Attributes:
        path: a model directory with a tokenizer.
        window_tokens: the context window; 0: the model's.
        threads: that compute; 0: as many as torch chooses.
        on_progress: told what is being measured.
    """

    path: Path
    dtype: Dtype = "auto"
    device: str = "cpu"
    threads: int = 0
    window_tokens: int = 0
    on_progress: Callable[[str], None] = field(default=_say_nothing)


@dataclass(frozen=True, slots=True)
class Truncation:
    """What is dropped when the window is full.

    Attributes:
        ratio: of the window, the oldest tokens.
        sink_tokens: at the context's start, which stay; None: as many as the model leans on.
    """

    ratio: float = 0.5
    sink_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PerplexityOptions:
    """Part `perplexity`.

    Attributes:
        text: a file, gzip-compressed if its name ends in .gz.
        num_words: of the text, the first ones; 0: all.
        reference_ratio: of the window, what the reference, token truncation, drops; None: as much
            as the others.
    """

    text: Path
    methods: tuple[Method, ...]
    truncation: Truncation = Truncation()
    num_words: int = 0
    reference_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class RetrievalOptions:
    """Part `retrieval`.

    Attributes:
        num_contexts: that are filled with records.
        num_questions: about each, each asked of the same context.
        num_overflows: truncations of each, the last one by the question.
    """

    methods: tuple[Method, ...]
    truncation: Truncation = Truncation()
    num_contexts: int = 50
    num_questions: int = 8
    num_overflows: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RotationOptions:
    """Part `rotation`.

    Attributes:
        text: keys are those of its first tokens, as many as the window holds.
        ratio: of the window, what each truncation drops.
        num_moves: truncations, one after another.
    """

    text: Path
    ratio: float = 0.125
    num_moves: int = 4


@dataclass(frozen=True, slots=True)
class CompressionOptions:
    """Part `compression`.

    Attributes:
        text: pieces of it are compressed and then gone on with.
        policies: names of compression policies.
        ratios: of the tokens to keep, for each policy.
        num_contexts: pieces of the text, and contexts of records.
        context_tokens: that are compressed at once.
        next_tokens: of the text, that are judged behind them.
        num_questions: about each context of records, each asked before and after the compression.
        plot: file for a picture; None: none.
    """

    text: Path
    policies: tuple[str, ...]
    ratios: tuple[float, ...]
    num_contexts: int = 40
    context_tokens: int = 1024
    next_tokens: int = 512
    num_questions: int = 4
    seed: int = 0
    plot: Path | None = None
