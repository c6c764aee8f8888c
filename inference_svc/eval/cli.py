"""`inference-svc eval`: what a truncation costs in quality. See docs/quality.md."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from inference_svc.eval.methods import METHODS, methods_of
from inference_svc.eval.options import (
    CompressionOptions,
    Dtype,
    EvalChoice,
    PerplexityOptions,
    RetrievalOptions,
    RotationOptions,
    Truncation,
)
from inference_svc.installation import require_engine
from inference_svc.runtime.model.model_directory import check_model
from shared.config.group_help import WholeHelp
from shared.process.log import configure_logging
from shared.terminal import printing
from shared.types.errors import InvalidInputError

if TYPE_CHECKING:
    from inference_svc.eval.runner import Options


eval_app = typer.Typer(
    cls=WholeHelp,
    rich_markup_mode=None,
    help="Measure what truncating a context costs in quality, by ways to truncate.",
    no_args_is_help=True,
)

ModelDir = Annotated[Path, typer.Option("--model", help="Model directory, with a tokenizer.")]
TextFile = Annotated[Path, typer.Option("--text", help="Plain text: .txt or .txt.gz.")]
Methods = Annotated[str, typer.Option(help=f"Some of {','.join(METHODS)}.")]
Window = Annotated[int, typer.Option(min=0, help="Context window; 0: the model's.")]
Ratio = Annotated[float, typer.Option(help="Part of a full window that is dropped.")]
Sinks = Annotated[str, typer.Option(help="First tokens that always stay; auto: as served.")]
DtypeName = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or of several cuda:1.")]
Threads = Annotated[int, typer.Option(min=0, help="That compute; 0: torch's choice.")]
Json = Annotated[
    str, typer.Option("--json", metavar="FILE|-", help="Also a JSON document; -: only that.")
]


@eval_app.command()
def perplexity(
    model: ModelDir,
    text: TextFile,
    methods: Methods = "ca,ca-shift,tt,of,nkvt",
    window: Window = 0,
    ratio: Ratio = 0.5,
    reference_ratio: Annotated[
        float | None,
        typer.Option(
            help="What tt, the reference, drops; --ratio if not said.", show_default=False
        ),
    ] = None,
    sinks: Sinks = "auto",
    words: Annotated[int, typer.Option(min=0, help="Of the text, the first; 0: all.")] = 0,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    json_to: Json = "",
) -> None:
    """Perplexity of a text streamed through a window that overflows (the paper's Table 1)."""
    options = PerplexityOptions(
        text, methods_of(methods), _truncation(ratio, sinks), words, reference_ratio
    )
    _measure(options, _choice(model, window, dtype, device, threads), json_to)


@eval_app.command()
def retrieval(
    model: ModelDir,
    methods: Methods = "ca,ca-shift,tt,of,nkvt",
    window: Window = 0,
    ratio: Ratio = 0.5,
    sinks: Sinks = "auto",
    contexts: Annotated[int, typer.Option(min=1, help="Filled with records.")] = 50,
    questions: Annotated[int, typer.Option(min=1, help="About each context.")] = 8,
    overflows: Annotated[int, typer.Option(min=1, help="Of each context.")] = 1,
    seed: Annotated[int, typer.Option(help="Of records and questions.")] = 0,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    json_to: Json = "",
) -> None:
    """Records found again after an overflow (the paper's Table 2, LongEval)."""
    options = RetrievalOptions(
        methods_of(methods), _truncation(ratio, sinks), contexts, questions, overflows, seed
    )
    _measure(options, _choice(model, window, dtype, device, threads), json_to)


@eval_app.command()
def rotation(
    model: ModelDir,
    text: TextFile,
    window: Window = 0,
    ratio: Ratio = 0.125,
    moves: Annotated[int, typer.Option(min=1, help="Truncations, one after another.")] = 4,
    device: Device = "cpu",
    threads: Threads = 0,
    json_to: Json = "",
) -> None:
    """How exact the model's keys are at new positions: from before RoPE, and turned again."""
    options = RotationOptions(text, ratio, moves)
    _measure(options, _choice(model, window, "float32", device, threads), json_to)


@eval_app.command()
def compression(
    model: ModelDir,
    text: TextFile,
    policies: Annotated[str, typer.Option(help="Comma-separated.")] = "sinks_recent,snapkv,h2o",
    ratios: Annotated[str, typer.Option(help="Of tokens to keep.")] = "0.75,0.5,0.25",
    contexts: Annotated[int, typer.Option(min=1, help="Of text, and of records.")] = 40,
    context: Annotated[int, typer.Option(min=64, help="Tokens compressed at once.")] = 1024,
    following: Annotated[int, typer.Option("--next", min=1, help="Judged behind them.")] = 512,
    questions: Annotated[int, typer.Option(min=1, help="About each context.")] = 4,
    seed: Annotated[int, typer.Option(help="Of records and questions.")] = 0,
    window: Window = 0,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    json_to: Json = "",
    plot: Annotated[
        Path | None, typer.Option(help="Also a picture; needs matplotlib.", show_default=False)
    ] = None,
) -> None:
    """What compression policies cost in quality, by the part of a context that they keep."""
    options = CompressionOptions(
        text,
        tuple(name.strip() for name in policies.split(",")),
        _numbers(ratios),
        contexts,
        context,
        following,
        questions,
        seed,
        plot,
    )
    _measure(options, _choice(model, window, dtype, device, threads), json_to)


def _truncation(ratio: float, sinks: str) -> Truncation:
    """Raise InvalidInputError if the sinks are no number."""
    if sinks != "auto" and not sinks.isdecimal():
        raise InvalidInputError(f"{sinks!r} are no sinks", "give --sinks a number, or auto")
    return Truncation(ratio, None if sinks == "auto" else int(sinks))


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidInputError(
            f"{text!r} is no list of numbers", "give ratios such as 0.5,0.25"
        ) from error


def _choice(model: Path, window: int, dtype: str, device: str, threads: int) -> EvalChoice:
    if dtype not in {"auto", "float32", "bfloat16", "float16"}:
        raise InvalidInputError(
            f"no such dtype: {dtype}", "name auto, float32, bfloat16 or float16"
        )
    check_model(model)  # torch is imported next, which takes seconds
    return EvalChoice(model, cast("Dtype", dtype), device, threads, window, _say)


def _say(what: str) -> None:
    typer.echo(f"measuring: {what}", err=True)


def _measure(options: "Options", choice: EvalChoice, json_to: str) -> None:
    """Run a part, and write down what it found.

    Raises:
        ReportedError: it cannot be measured, or written.
    """
    require_engine()
    from inference_svc.eval.figures import as_document
    from inference_svc.eval.report import tables
    from inference_svc.eval.runner import run  # imports torch

    if json_to not in {"", "-"} and not Path(json_to).absolute().parent.is_dir():
        raise InvalidInputError(  # before minutes of measuring, not after
            f"{json_to} is in no directory", "name a file in a directory that exists"
        )
    configure_logging("warning", json=False)  # stdout is for the report
    report = run(options, choice)
    document = json.dumps(as_document(report), indent=2)
    if json_to == "-":
        typer.echo(document)
        return
    console = printing.console()
    for table in tables(report, console.width):
        console.print(table)
        console.print()
    if json_to:
        _write(Path(json_to), document)


def _write(path: Path, document: str) -> None:
    try:
        path.write_text(document + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(
            f"{path} cannot be written ({error.strerror})", "name another file with --json"
        ) from error
