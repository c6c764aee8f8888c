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
from inference_svc.core.ranges import Range
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
    """Parse "ca,tt,nkvt" as `names_of` does."""
    return tuple(cast("Method", name) for name in names_of(text, METHODS, "method"))


def positions_of(method: Method) -> Positions:
    """Return the kind of positions that a method's calibration needs."""
    if method in {"ca", "ca-shift"}:
        return "decoupled"
    return "naive" if method == "nkvt" else "auto"


def sinks_of(text: str) -> int | None:
    """Parse a number of first tokens, or "auto", which is None.

    Raises:
        InvalidInputError: the value is neither.
    """
    if text != "auto" and not text.isdecimal():
        raise InvalidInputError(
            f"{text!r} is not a number of sinks", "give --sinks a number, or auto"
        )
    return None if text == "auto" else int(text)


def ratios_of(text: str) -> tuple[float, ...]:
    """Parse "0.5,0.25".

    Raises:
        InvalidInputError: something else is there.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidInputError(
            f"{text!r} is not a list of numbers", "write it as 0.5,0.25"
        ) from error


def policies_of(text: str) -> tuple[str, ...]:
    """Parse "snapkv,h2o"; the policies' registry checks the names."""
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
        on_progress: called with a line that describes the current measurement.
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
    """Where a run's report goes."""

    json_to: JsonTo = ""


@dataclass(frozen=True, slots=True)
class Truncation:
    """What is dropped when the window is full.

    Attributes:
        ratio: share of the window that is dropped, the oldest tokens.
        sink_tokens: tokens at the context's start that stay; None: the model's sinks.
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
        num_words: number of the text's first words that are used; 0: all.
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
        num_questions: number of questions about each context.
        num_overflows: number of truncations of each, the last one by the question.
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
        text: the text whose first tokens fill the window.
        ratio: part of the window that each truncation drops.
        num_moves: number of truncations, one after another.
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
        text: a text file whose pieces are compressed and then continued.
        policies: names of compression policies.
        ratios: shares of the tokens to keep, for each policy.
        num_contexts: number of pieces of the text, and of contexts of records.
        context_tokens: number of tokens that are compressed at once.
        next_tokens: number of tokens of the text that are judged behind them.
        num_questions: questions about each context of records, asked before and after compression.
        plot: file for a plot; None: none.
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
        text: a text file whose pieces are edited and then continued; None: no text.
        conversations: a file of conversations to edit likewise. With neither: the demo's
            conversations.
        modes: how tokens behind an edit are treated; "exact" is first.
        kinds: kinds of edits; each piece of text, and each conversation of records, gets each.
        num_contexts: number of pieces of text, and of conversations of records.
        context_tokens: number of tokens before the edit.
        next_tokens: number of tokens of the text that are judged behind them.
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
    """Return a truncation with a number of sinks: the model's, if it has none."""
    if truncation.sink_tokens is not None:
        return truncation
    return replace(truncation, sink_tokens=model_sinks)


def dropped(truncation: Truncation, num_tokens: int) -> tuple[Range, ...]:
    """Return the oldest part of a context of `num_tokens`, behind the sinks."""
    sinks = truncation.sink_tokens or 0
    return ((sinks, sinks + int(truncation.ratio * num_tokens)),)


def check_truncation(truncation: Truncation, window_tokens: int) -> None:
    """Raise if a truncation would drop nothing or everything.

    Raises:
        InvalidInputError: a value is invalid; the message names it.
    """
    if not 0 < truncation.ratio < 1:
        raise InvalidInputError(
            f"a truncation that drops {truncation.ratio:g} of the window is not possible",
            "give a --ratio between 0 and 1",
        )
    (start, end) = dropped(truncation, window_tokens)[0]
    if end >= window_tokens or start >= end:
        raise InvalidInputError(
            f"with {start} sink tokens and a ratio of {truncation.ratio:g}, a window of "
            f"{window_tokens} tokens has nothing to drop or nothing to keep",
            "give a larger --window, fewer --sinks or another --ratio",
        )
