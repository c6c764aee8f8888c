"""The types of the bench's options, with their parsers for the command line."""

from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shared.measuring.options import TEXT, BadListError, numbers, one_of

Tier = Literal["dram", "ssd"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Variant = Literal["ca", "kvd", "re"]


def splits_of(text: str) -> tuple[tuple[int, int], ...]:
    """Parse "500/500,900/100".

    Raises:
        BadListError: something else is there, or a length is not above zero.
    """
    try:
        pairs = [part.split("/") for part in text.split(",") if part.strip()]
        found = tuple((int(history), int(new)) for history, new in pairs)
    except ValueError as error:
        raise BadListError(f"{text!r} is not a list of splits", "write it as 900/100") from error
    if any(min(split) < 1 for split in found):
        raise BadListError(f"{text!r} contains a length below 1", "write it as 900/100")
    return found


def ratios_of(text: str) -> tuple[float, ...]:
    """Parse "0.5,1,2".

    Raises:
        BadListError: something else is there, or a ratio is not above zero.
    """
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise BadListError(f"{text!r} is not a list of ratios", "write it as 0.5,1,2") from error
    if not all(0 < ratio < inf for ratio in found):
        raise BadListError(f"{text!r} contains a ratio that is not above 0", "give ratios above 0")
    return found


def policies_of(text: str) -> tuple[str, ...]:
    """Parse "lru,fifo"; the kvd that is started checks the names."""
    return tuple(name for name in text.split(",") if name)


def some_numbers(help_: str, least: int = 1) -> Any:
    """Make the option of a list of whole numbers, each at least `least`."""
    return typer.Option(parser=lambda text: numbers(text, least), metavar=TEXT, help=help_)


Numbers = tuple[int, ...]
DtypeName = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        parser=one_of("dtype", "auto", "float32", "bfloat16", "float16"),
        metavar=TEXT,
        help="auto, float32, bfloat16, float16.",
    ),
]
ModelPath = Annotated[
    Path | None, typer.Option("--model", help="Model directory.", show_default=False)
]
RandomPreset = Annotated[str, typer.Option(help="Preset with random weights.", show_default=False)]
Threads = Annotated[
    int, typer.Option(min=0, help="That compute, of every variant; 0: torch's choice.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or of several cuda:1.")]
JsonTo = Annotated[
    str, typer.Option("--json", metavar="FILE|-", help="Also a JSON document; -: only that.")
]
PlotTo = Annotated[
    Path | None,
    typer.Option("--plot", help="Also a picture; needs matplotlib.", show_default=False),
]
Pairs = Annotated[int, typer.Option(min=1, help="Interleaved measurements of each variant.")]
Batches = Annotated[Numbers, some_numbers("Batch sizes.")]
PromptTokens = Annotated[int, typer.Option("--history", min=1, help="Tokens of each prompt.")]
Steps = Annotated[int, typer.Option(min=2, help="Decode steps that are measured.")]
AnswerTokens = Annotated[int, typer.Option("--answer", min=1, help="Tokens of each answer.")]
LoadedTokens = Annotated[int, typer.Option("--history", min=1, help="Tokens that are loaded.")]
ComputedTokens = Annotated[int, typer.Option("--new", min=1, help="Tokens that are computed.")]
Trace = Annotated[Path | None, typer.Option(help="Sessions to replay. Default: generated.")]
NumSessions = Annotated[int, typer.Option("--sessions", min=1, help="How many of them.")]
Scale = Annotated[float, typer.Option(min=0, help="Multiplies lengths.")]
ThinkScale = Annotated[float, typer.Option(min=0, help="Multiplies think times.")]
EndingWindow = Annotated[
    int, typer.Option("--window", min=16, help="A session ends before this context.")
]
TruncatingWindow = Annotated[
    int, typer.Option("--window", min=16, help="Contexts are truncated to it.")
]
MaxRunning = Annotated[int, typer.Option(min=1, help="Turns in a batch.")]
PlanTrace = Annotated[
    Path | None,
    typer.Option(help="Write the sessions there, and say how to ask `kvd plan` the same."),
]
