"""The options of `inference-svc eval`, as values and on the command line. Pure.

Owns the ways to truncate a context that are compared, and which tokens an overflow drops.

*Source:* CachedAttention, USENIX ATC'24, §4.3.4 (OF) and §4.3.5 (CA, TT, NKVT).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from inference_svc.bench.option_types import Device, DtypeName, JsonTo, PlotTo
from inference_svc.core.discards import Range
from inference_svc.eval.edits import (
    KINDS,
    LEAST_CONTEXT_TOKENS,
    MODES_HELP,
    Kind,
    MeasuredMode,
    kinds_of,
    modes_of,
)
from shared.measuring.options import TEXT, ignore_progress, names_of
from shared.types.errors import InvalidInputError

Method = Literal["ca", "ca-shift", "tt", "of", "nkvt"]
Positions = Literal["auto", "decoupled", "naive"]

METHODS: dict[Method, str] = {
    "ca": "kept KV is kept; keys are stored before RoPE, and embedded at their new positions",
    "ca-shift": "the same for a resident context: keys after RoPE are turned to new positions",
    "tt": "kept tokens are recomputed, all of them",
    "of": "keys are stored after RoPE: kept tokens from the first dropped one on are recomputed",
    "nkvt": "kept KV is kept as it is: keys have their old positions, new tokens the next slot",
}
REFERENCE: Method = "tt"
"""What the others are compared with: nothing in it is left over from dropped tokens."""


def methods_of(text: str) -> tuple[Method, ...]:
    """Read "ca,tt,nkvt" as `names_of` does."""
    return tuple(cast("Method", name) for name in names_of(text, METHODS, "method"))


def positions_of(method: Method) -> Positions:
    """Return how a model has to be calibrated for a method."""
    if method in {"ca", "ca-shift"}:
        return "decoupled"
    return "naive" if method == "nkvt" else "auto"


def sinks_of(text: str) -> int | None:
    """Read a number of first tokens, or "auto", which is None.

    Raises:
        InvalidInputError: the value is neither.
    """
    if text != "auto" and not text.isdecimal():
        raise InvalidInputError(f"{text!r} are no sinks", "give --sinks a number, or auto")
    return None if text == "auto" else int(text)


def ratios_of(text: str) -> tuple[float, ...]:
    """Read "0.5,0.25".

    Raises:
        InvalidInputError: something else is there.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidInputError(
            f"{text!r} is no list of numbers", "give ratios such as 0.5,0.25"
        ) from error


def policies_of(text: str) -> tuple[str, ...]:
    """Read "snapkv,h2o"; whether there are such policies says their registry."""
    return tuple(name.strip() for name in text.split(","))


Methods = Annotated[
    tuple[Method, ...],
    typer.Option(parser=methods_of, metavar=TEXT, help=f"Some of {','.join(METHODS)}."),
]
TextFile = Annotated[Path, typer.Option("--text", help="Plain text: .txt or .txt.gz.")]
Seed = Annotated[int, typer.Option(help="Of records and questions.")]
RATIO_HELP = "Part of a full window that is dropped."
ALL_METHODS: tuple[Method, ...] = tuple(METHODS)
USUAL_MODES = "exact,keep,heal:4,heal:16,heal:64,naive"


@dataclass(frozen=True, slots=True)
class EvalChoice:
    """The model to measure.

    Attributes:
        path: a model directory with a tokenizer.
        window_tokens: the context window; 0: the model's.
        threads: number of threads that compute; 0: as many as torch chooses.
        on_progress: called with a line that says what is being measured.
    """

    path: Annotated[Path, typer.Option("--model", help="Model directory, with a tokenizer.")]
    dtype: DtypeName = "auto"
    device: Device = "cpu"
    threads: Annotated[int, typer.Option(min=0, help="That compute; 0: torch's choice.")] = 0
    window_tokens: Annotated[
        int, typer.Option("--window", min=0, help="Context window; 0: the model's.")
    ] = 0
    on_progress: Callable[[str], None] = ignore_progress


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Where what a run finds goes."""

    json_to: JsonTo = ""


@dataclass(frozen=True, slots=True)
class Truncation:
    """What is dropped when the window is full.

    Attributes:
        ratio: part of the window that goes, the oldest tokens.
        sink_tokens: tokens at the context's start that stay; None: as many as the model leans on.
    """

    ratio: Annotated[float, typer.Option(help=RATIO_HELP)] = 0.5
    sink_tokens: Annotated[
        int | None,
        typer.Option(
            "--sinks",
            parser=sinks_of,
            metavar=TEXT,
            help="First tokens that always stay; auto: as served.",
        ),
    ] = field(default=None, metadata={"text": "auto"})


@dataclass(frozen=True, slots=True)
class PerplexityOptions:
    """Part `perplexity`.

    Attributes:
        text: a file, gzip-compressed if its name ends in .gz.
        num_words: number of words, the first of the text; 0: all.
        reference_ratio: of the window, what the reference, token truncation, drops; None: as much
            as the others.
    """

    text: TextFile
    methods: Methods = ALL_METHODS
    truncation: Truncation = Truncation()
    num_words: Annotated[
        int, typer.Option("--words", min=0, help="Of the text, the first; 0: all.")
    ] = 0
    reference_ratio: Annotated[
        float | None,
        typer.Option(
            help="What tt, the reference, drops; --ratio if not said.", show_default=False
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class RetrievalOptions:
    """Part `retrieval`.

    Attributes:
        num_contexts: number of contexts that are filled with records.
        num_questions: about each, each asked of the same context.
        num_overflows: truncations of each, the last one by the question.
    """

    methods: Methods = ALL_METHODS
    truncation: Truncation = Truncation()
    num_contexts: Annotated[int, typer.Option("--contexts", min=1, help="Filled with records.")] = (
        50
    )
    num_questions: Annotated[
        int, typer.Option("--questions", min=1, help="About each context.")
    ] = 8
    num_overflows: Annotated[int, typer.Option("--overflows", min=1, help="Of each context.")] = 1
    seed: Seed = 0


@dataclass(frozen=True, slots=True)
class RotationOptions:
    """Part `rotation`.

    Attributes:
        text: keys are those of its first tokens, as many as the window holds.
        ratio: part of the window that each truncation drops.
        num_moves: truncations, one after another.
    """

    text: TextFile
    ratio: Annotated[float, typer.Option(help=RATIO_HELP)] = 0.125
    num_moves: Annotated[
        int, typer.Option("--moves", min=1, help="Truncations, one after another.")
    ] = 4


@dataclass(frozen=True, slots=True)
class CompressionOptions:
    """Part `compression`.

    Attributes:
        text: pieces of it are compressed and then gone on with.
        policies: names of compression policies.
        ratios: parts of the tokens to keep, for each policy.
        num_contexts: pieces of the text, and contexts of records.
        context_tokens: number of tokens that are compressed at once.
        next_tokens: tokens of the text that are judged behind them.
        num_questions: about each context of records, each asked before and after the compression.
        plot: file for a picture; None: none.
    """

    text: TextFile
    policies: Annotated[
        tuple[str, ...], typer.Option(parser=policies_of, metavar=TEXT, help="Comma-separated.")
    ] = ("sinks_recent", "snapkv", "h2o")
    ratios: Annotated[
        tuple[float, ...], typer.Option(parser=ratios_of, metavar=TEXT, help="Of tokens to keep.")
    ] = (0.75, 0.5, 0.25)
    num_contexts: Annotated[
        int, typer.Option("--contexts", min=1, help="Of text, and of records.")
    ] = 40
    context_tokens: Annotated[
        int, typer.Option("--context", min=64, help="Tokens compressed at once.")
    ] = 1024
    next_tokens: Annotated[int, typer.Option("--next", min=1, help="Judged behind them.")] = 512
    num_questions: Annotated[
        int, typer.Option("--questions", min=1, help="About each context.")
    ] = 4
    seed: Seed = 0
    plot: PlotTo = None


@dataclass(frozen=True, slots=True)
class EditsOptions:
    """Part `edits`.

    Attributes:
        text: pieces of it are edited and then gone on with; None: not of a text.
        conversations: the same of what is said in them; neither: in those of the demo.
        modes: what is done about the tokens behind an edit, "exact" first.
        kinds: of edits; each piece of text, and each conversation of records, is edited by each.
        num_contexts: pieces of text, and conversations of records.
        context_tokens: number of tokens before the edit.
        next_tokens: tokens of the text that are judged behind them.
    """

    text: Annotated[
        Path | None, typer.Option("--text", help="Plain text: .txt or .txt.gz.", show_default=False)
    ] = None
    conversations: Annotated[
        Path | None,
        typer.Option(help="ShareGPT's JSON, or .json.gz; else the demo's.", show_default=False),
    ] = None
    modes: Annotated[
        tuple[MeasuredMode, ...], typer.Option(parser=modes_of, metavar=TEXT, help=MODES_HELP)
    ] = field(default=modes_of(USUAL_MODES), metadata={"text": USUAL_MODES})
    kinds: Annotated[
        tuple[Kind, ...],
        typer.Option(parser=kinds_of, metavar=TEXT, help=f"Of edits, some of {','.join(KINDS)}."),
    ] = tuple(KINDS)
    num_contexts: Annotated[
        int, typer.Option("--contexts", min=1, help="Of text, and of records.")
    ] = 100
    context_tokens: Annotated[
        int, typer.Option("--context", min=LEAST_CONTEXT_TOKENS, help="Tokens before the edit.")
    ] = 512
    next_tokens: Annotated[int, typer.Option("--next", min=1, help="Judged behind them.")] = 64
    seed: Annotated[int, typer.Option(help="Of edits, records and questions.")] = 0


Options = PerplexityOptions | RetrievalOptions | RotationOptions | CompressionOptions | EditsOptions


def with_sinks(truncation: Truncation, model_sinks: int) -> Truncation:
    """Return a truncation that says how many sinks stay: if it does not, those of the model."""
    if truncation.sink_tokens is not None:
        return truncation
    return replace(truncation, sink_tokens=model_sinks)


def dropped(truncation: Truncation, num_tokens: int) -> tuple[Range, ...]:
    """Return the oldest part of a context of `num_tokens`, after what stays in any case."""
    sinks = truncation.sink_tokens or 0
    return ((sinks, sinks + int(truncation.ratio * num_tokens)),)


def check_truncation(truncation: Truncation, window_tokens: int) -> None:
    """Refuse a truncation that drops nothing, or leaves nothing.

    Raises:
        InvalidInputError: a value cannot be; its message names it.
    """
    if not 0 < truncation.ratio < 1:
        raise InvalidInputError(
            f"a truncation of {truncation.ratio:g} of the window is none",
            "give --ratio between 0 and 1",
        )
    (start, end) = dropped(truncation, window_tokens)[0]
    if end >= window_tokens or start >= end:
        raise InvalidInputError(
            f"{start} sink tokens and a ratio of {truncation.ratio:g} leave a window of "
            f"{window_tokens} tokens nothing to drop or nothing to keep",
            "give a larger --window, fewer --sinks or another --ratio",
        )
