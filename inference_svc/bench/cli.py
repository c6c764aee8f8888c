"""`inference-svc bench`: its parts as commands. See inference_svc/bench/README.md."""

import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from inference_svc.bench.cli_run import measure, numbers, splits_of
from inference_svc.bench.options import (
    DecodeOptions,
    Dtype,
    ModelChoice,
    OverflowOptions,
    OverlapOptions,
    PoliciesOptions,
    PositionsOptions,
    RunOptions,
    ServeOptions,
    Tier,
    TurnsOptions,
    Variant,
)
from inference_svc.runtime.model.model_directory import check_model
from shared.config.lazy_commands import WholeHelp
from shared.types.errors import InvalidInputError

bench_app = typer.Typer(
    cls=WholeHelp,
    rich_markup_mode=None,
    help="Measure the engine in this process, with a kvd of the bench's own.",
    no_args_is_help=True,
)

ModelDir = Annotated[
    Path | None, typer.Option("--model", help="Model directory.", show_default=False)
]
RandomName = Annotated[
    str, typer.Option("--random", help="Preset with random weights.", show_default=False)
]
Layers = Annotated[int, typer.Option(min=0, help="Layers of the preset; 0: all.")]
DtypeName = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or of several cuda:1.")]
Threads = Annotated[
    int, typer.Option(min=0, help="That compute, of every variant; 0: torch's choice.")
]
Directory = Annotated[
    Path | None, typer.Option(help="Disk of kvd's SSD tier. Default: here.", show_default=False)
]
Json = Annotated[
    str, typer.Option("--json", metavar="FILE|-", help="Also a JSON document; -: only that.")
]
Plot = Annotated[
    Path | None, typer.Option(help="Also a picture; needs matplotlib.", show_default=False)
]
Pairs = Annotated[int, typer.Option(min=1, help="Interleaved measurements of each variant.")]


@bench_app.command()
def turns(
    model: ModelDir = None,
    random: RandomName = "",
    layers: Layers = 0,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    splits: Annotated[
        str, typer.Option(help="history/new, comma-separated; empty: none.")
    ] = "500/500,600/400,700/300,800/200,900/100",
    histories: Annotated[str, typer.Option(help="Histories, each with --new tokens.")] = "",
    new: Annotated[int, typer.Option(min=1, help="New tokens after --histories.")] = 256,
    tier: Annotated[str, typer.Option(help="Where kvd has the history: dram or ssd.")] = "dram",
    pairs: Pairs = 15,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 8,
    re_max_tokens: Annotated[
        int, typer.Option(min=0, help="Longest prompt that is recomputed; 0: any.")
    ] = 0,
    re_pairs: Annotated[
        int, typer.Option(min=0, help="How often long prompts are; 0: as the others.")
    ] = 0,
    directory: Directory = None,
    json_to: Json = "",
    plot: Plot = None,
) -> None:
    """TTFT, prefill throughput and TPOT: recomputed, from kvd, and resident."""
    if tier not in {"dram", "ssd"}:
        raise InvalidInputError(f"no such tier: {tier}", "name dram or ssd")
    pairs_of_lengths, longs = splits_of(splits), numbers(histories)
    if not pairs_of_lengths and not longs:
        raise InvalidInputError("there is nothing to measure", "give --splits or --histories")
    options = TurnsOptions(
        pairs_of_lengths,
        longs,
        new,
        cast("Tier", tier),
        pairs,
        answer,
        re_max_tokens,
        re_pairs,
    )
    choice = _choice(model, random, layers, dtype, device, threads)
    measure(options, choice, _run_options(directory), json_to, plot)


@bench_app.command()
def overlap(
    model: ModelDir = None,
    random: RandomName = "",
    layers: Layers = 0,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    history: Annotated[int, typer.Option(min=1, help="Tokens that are loaded.")] = 1000,
    new: Annotated[int, typer.Option(min=1, help="Tokens that are computed.")] = 100,
    buffers: Annotated[str, typer.Option(help="Read buffers in layers; -1: all.")] = "0,1,2,4,-1",
    prompts: Annotated[str, typer.Option(help="Prompts that are saved.")] = "1000,1200,1400,1600",
    answer: Annotated[int, typer.Option(min=2, help="Tokens of their answers.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="Of them that run at once.")] = 4,
    only: Annotated[str, typer.Option(help="preload or saving; default: both.")] = "",
    pairs: Pairs = 15,
    directory: Directory = None,
    json_to: Json = "",
    plot: Plot = None,
) -> None:
    """Loading ahead by read buffer, and the price of saving."""
    if only not in {"", "preload", "saving"}:
        raise InvalidInputError(f"no such half: {only}", "name preload or saving")
    options = OverlapOptions(
        history,
        new,
        numbers(buffers, least=-1),
        numbers(prompts),
        answer,
        batch,
        pairs,
        "preload" if only == "preload" else "saving" if only else "",
    )
    choice = _choice(model, random, layers, dtype, device, threads)
    measure(options, choice, _run_options(directory), json_to, plot)


@bench_app.command()
def serve(
    model: ModelDir = None,
    random: RandomName = "",
    layers: Layers = 0,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    trace: Annotated[
        Path | None, typer.Option(help="Sessions to replay. Default: generated.")
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="How many of them.")] = 32,
    concurrent: Annotated[int, typer.Option(min=1, help="Open at once.")] = 8,
    scale: Annotated[float, typer.Option(min=0, help="Multiplies lengths.")] = 0.25,
    think_scale: Annotated[float, typer.Option(min=0, help="Multiplies think times.")] = 0.01,
    window: Annotated[int, typer.Option(min=16, help="A session ends before this context.")] = 2048,
    variants: Annotated[str, typer.Option(help="Of ca, kvd, re.")] = "ca,re",
    rounds: Annotated[int, typer.Option(min=1, help="Replays of each variant.")] = 1,
    max_running: Annotated[int, typer.Option(min=1, help="Turns in a batch.")] = 8,
    dram_mib: Annotated[int, typer.Option(min=0, help="kvd's DRAM; 0: for all sessions.")] = 0,
    seed: Annotated[int, typer.Option(help="Of generated sessions.")] = 0,
    directory: Directory = None,
    json_to: Json = "",
    plot: Plot = None,
) -> None:
    """Whole conversations, closed-loop: percentiles, throughput, busy time, hit tiers."""
    names = tuple(variants.split(","))
    if not set(names) <= {"ca", "kvd", "re"}:
        raise InvalidInputError(f"no such variants: {variants}", "name some of ca, kvd, re")
    options = ServeOptions(
        trace,
        sessions,
        concurrent,
        scale,
        think_scale,
        window,
        cast("tuple[Variant, ...]", names),
        rounds,
        max_running,
        dram_mib << 20,
        seed,
    )
    choice = _choice(model, random, layers, dtype, device, threads)
    measure(options, choice, _run_options(directory), json_to, plot)


@bench_app.command()
def policies(
    model: ModelDir = None,
    random: RandomName = "",
    layers: Layers = 0,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    names: Annotated[str, typer.Option("--policies", help="Of kvd's eviction.")] = ",".join(
        PoliciesOptions().policies
    ),
    trace: Annotated[
        Path | None, typer.Option(help="Sessions to replay. Default: generated.")
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="How many of them.")] = 32,
    scale: Annotated[float, typer.Option(min=0, help="Multiplies lengths.")] = 0.1,
    think_scale: Annotated[float, typer.Option(min=0, help="Multiplies think times.")] = 0.0,
    window: Annotated[int, typer.Option(min=16, help="A session ends before this context.")] = 1024,
    arrival_rate: Annotated[
        float, typer.Option(min=0, help="Sessions that begin in a second; 0: all at once.")
    ] = 0.0,
    dram: Annotated[
        float, typer.Option(min=0, help="DRAM, as a part of all sessions' KV at their ends.")
    ] = 0.2,
    ssd: Annotated[float, typer.Option(min=0, help="SSD, in the same way.")] = 0.4,
    max_running: Annotated[int, typer.Option(min=1, help="Turns in a batch.")] = 1,
    end_hints: Annotated[bool, typer.Option(help="Last turns say that they are.")] = False,
    warmup_turns: Annotated[int, typer.Option(min=0, help="First turns, not counted.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Replays of each policy.")] = 1,
    plan_trace: Annotated[
        Path | None,
        typer.Option(help="Write the sessions there, and say how to ask `kvd plan` the same."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of generated sessions, and of arrivals.")] = 0,
    directory: Directory = None,
    json_to: Json = "",
    plot: Plot = None,
) -> None:
    """Eviction policies, over tiers that are too small: hits, DRAM share, TTFT, queue."""
    chosen = tuple(name for name in names.split(",") if name)
    if not chosen:
        raise InvalidInputError("there is nothing to measure", "name some with --policies")
    options = PoliciesOptions(
        chosen,
        trace,
        sessions,
        scale,
        think_scale,
        window,
        arrival_rate,
        dram,
        ssd,
        max_running,
        end_hints,
        warmup_turns,
        rounds,
        plan_trace,
        seed,
    )
    choice = _choice(model, random, layers, dtype, device, threads)
    measure(options, choice, _run_options(directory), json_to, plot)


@bench_app.command()
def overflow(
    model: ModelDir = None,
    random: RandomName = "",
    layers: Layers = 0,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    history: Annotated[int, typer.Option(min=2, help="Tokens before the overflow.")] = 1792,
    new: Annotated[int, typer.Option(min=1, help="Tokens that are computed.")] = 128,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 4,
    pairs: Pairs = 15,
    directory: Directory = None,
    json_to: Json = "",
    plot: Plot = None,
) -> None:
    """TTFT of a turn whose context overflows, against the same turn in a larger window."""
    options = OverflowOptions(history, new, answer, pairs)
    choice = _choice(model, random, layers, dtype, device, threads)
    measure(options, choice, _run_options(directory), json_to, plot)


@bench_app.command()
def positions(
    model: ModelDir = None,
    random: RandomName = "",
    layers: Layers = 0,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    trace: Annotated[
        Path | None, typer.Option(help="Sessions to replay. Default: generated.")
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="How many of them.")] = 32,
    scale: Annotated[float, typer.Option(min=0, help="Multiplies lengths.")] = 1.0,
    window: Annotated[int, typer.Option(min=16, help="Contexts are truncated to it.")] = 2048,
    max_running: Annotated[int, typer.Option(min=1, help="Turns in a batch.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Replays of each variant.")] = 1,
    plan_trace: Annotated[
        Path | None,
        typer.Option(help="Write the sessions there, and say how to ask `kvd plan` the same."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of generated sessions.")] = 0,
    directory: Directory = None,
    json_to: Json = "",
    plot: Plot = None,
) -> None:
    """Hits over context overflows, with positions apart from stored keys (CA) and in them (OF)."""
    options = PositionsOptions(
        trace, sessions, scale, window, max_running, rounds, plan_trace, seed
    )
    choice = _choice(model, random, layers, dtype, device, threads)
    measure(options, choice, _run_options(directory), json_to, plot)


@bench_app.command()
def decode(
    model: ModelDir = None,
    random: RandomName = "",
    layers: Layers = 0,
    dtype: DtypeName = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,24",
    history: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 256,
    steps: Annotated[int, typer.Option(min=2, help="Decode steps that are measured.")] = 64,
    pairs: Pairs = 15,
    directory: Directory = None,
    json_to: Json = "",
    plot: Plot = None,
) -> None:
    """Decode speed by batch, against plain generate and the memory's bandwidth."""
    options = DecodeOptions(numbers(batches), history, steps, pairs)
    choice = _choice(model, random, layers, dtype, device, threads)
    measure(options, choice, _run_options(directory), json_to, plot)


def _choice(
    model: Path | None, random: str, layers: int, dtype: str, device: str, threads: int
) -> ModelChoice:
    if dtype not in {"auto", "float32", "bfloat16", "float16"}:
        raise InvalidInputError(
            f"no such dtype: {dtype}", "name auto, float32, bfloat16 or float16"
        )
    if model is not None:
        check_model(model)  # torch is imported next, which takes seconds
    return ModelChoice(model, random, layers, cast("Dtype", dtype), device, threads)


def _run_options(directory: Path | None) -> RunOptions:
    return RunOptions(directory or Path.cwd(), tuple(sys.argv), _say)


def _say(what: str) -> None:
    typer.echo(f"measuring: {what}", err=True)
