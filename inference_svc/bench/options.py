"""The options of the bench's parts, as values and on the command line. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from inference_svc.bench.option_types import (
    AnswerTokens,
    Batches,
    ComputedTokens,
    Device,
    DtypeName,
    EndingWindow,
    JsonTo,
    LoadedTokens,
    MaxRunning,
    ModelPath,
    Numbers,
    NumSessions,
    Pairs,
    PlanTrace,
    PlotTo,
    PromptTokens,
    RandomPreset,
    Scale,
    Steps,
    ThinkScale,
    Threads,
    Tier,
    Trace,
    TruncatingWindow,
    Variant,
    policies_of,
    ratios_of,
    some_numbers,
    splits_of,
)
from shared.measuring.options import TEXT, ignore_progress, one_of, some_of


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model to measure.

    Attributes:
        path: a model directory, or
        random: the name of a preset, with random weights of this seed.
        layers: number of the preset's layers; 0: all.
        threads: number of threads that compute; 0: as many as torch chooses.
    """

    path: ModelPath = None
    random: RandomPreset = ""
    layers: Annotated[int, typer.Option(min=0, help="Layers of the preset; 0: all.")] = 0
    dtype: DtypeName = "auto"
    device: Device = "cpu"
    threads: Threads = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run, for every part.

    Attributes:
        directory: the disk on which kvd's SSD tier is to be.
        on_progress: called with a line that describes the current measurement.
    """

    directory: Path
    command: tuple[str, ...] = ()
    on_progress: Callable[[str], None] = ignore_progress


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Where a run measures, and where its report goes."""

    directory: Annotated[
        Path | None, typer.Option(help="Disk of kvd's SSD tier. Default: here.", show_default=False)
    ] = None
    json_to: JsonTo = ""
    plot: PlotTo = None


Transport = Annotated[
    Literal["shm", "cuda_ipc"],
    typer.Option(
        parser=one_of("transport", "shm", "cuda_ipc"),
        metavar=TEXT,
        help="How KV travels to a GPU: shm or cuda_ipc.",
    ),
]


@dataclass(frozen=True, slots=True)
class TurnsOptions:
    """Part `turns`.

    Attributes:
        splits: (history, new) of turns of the same length (paper: Fig. 18).
        histories: lengths of histories that grow (preprint: Fig. 23), each with `new_tokens`.
        tier: where kvd has the history.
        answer_tokens: length of each answer: the time per output token comes from it.
        re_max_tokens: longer prompts are never recomputed to measure it; 0: all are.
        re_pairs: pairs of recomputed long histories, which take minutes; 0: as for the others.
        transport: the setting cache.transport.
    """

    splits: Annotated[
        tuple[tuple[int, int], ...],
        typer.Option(
            parser=splits_of, metavar=TEXT, help="history/new, comma-separated; empty: none."
        ),
    ] = ((500, 500), (600, 400), (700, 300), (800, 200), (900, 100))
    histories: Annotated[Numbers, some_numbers("Histories, each with --new tokens.")] = ()
    new_tokens: Annotated[
        int, typer.Option("--new", min=1, help="New tokens after --histories.")
    ] = 256
    tier: Annotated[
        Tier,
        typer.Option(
            parser=one_of("tier", "dram", "ssd"),
            metavar=TEXT,
            help="Where kvd has the history: dram or ssd.",
        ),
    ] = "dram"
    pairs: Pairs = 15
    answer_tokens: AnswerTokens = 8
    re_max_tokens: Annotated[
        int, typer.Option(min=0, help="Longest prompt that is recomputed; 0: any.")
    ] = 0
    re_pairs: Annotated[
        int, typer.Option(min=0, help="How often long prompts are; 0: as the others.")
    ] = 0
    transport: Transport = "shm"


@dataclass(frozen=True, slots=True)
class OverlapOptions:
    """Part `overlap`.

    Attributes:
        buffers: read buffers in layers, -1: the start gate's choice (paper: Fig. 19).
        prompts: lengths of the turns that are saved (paper: Fig. 20), with `answer_tokens` each.
        batch: number of these turns that run at once.
        only: "preload" or "saving"; "": both.
    """

    history_tokens: LoadedTokens = 1000
    new_tokens: ComputedTokens = 100
    buffers: Annotated[Numbers, some_numbers("Layers of read buffer; -1: auto.", -1)] = (
        0,
        1,
        2,
        4,
        -1,
    )
    prompts: Annotated[Numbers, some_numbers("Prompts that are saved.")] = (
        1000,
        1200,
        1400,
        1600,
    )
    answer_tokens: Annotated[
        int, typer.Option("--answer", min=2, help="Tokens of their answers.")
    ] = 20
    batch: Annotated[int, typer.Option(min=1, help="Of them that run at once.")] = 4
    only: Annotated[
        Literal["", "preload", "saving"],
        typer.Option(
            parser=one_of("half", "", "preload", "saving"),
            metavar=TEXT,
            help="preload or saving; default: both.",
        ),
    ] = ""
    pairs: Pairs = 15


@dataclass(frozen=True, slots=True)
class BuffersOptions:
    """Part `buffers`.

    Attributes:
        ratios: ratios of the time to load a layer to the time to compute it.
        layer_ms: added to computing each layer, so that noise of a shared machine weighs less.
    """

    history_tokens: LoadedTokens = 500
    new_tokens: ComputedTokens = 100
    ratios: Annotated[
        tuple[float, ...],
        typer.Option(
            parser=ratios_of, metavar=TEXT, help="Time to load a layer, by that to compute it."
        ),
    ] = (0.5, 1.0, 2.0)
    layer_ms: Annotated[
        float, typer.Option(min=0, help="Added to computing each layer: less noise.")
    ] = 0.0
    pairs: Pairs = 15


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Part `serve`.

    Attributes:
        trace: a file; None: generated sessions.
        scale, think_scale: factors of lengths and think times.
        concurrent: number of sessions open at once; when one ends, the next opens.
        window_tokens: a session ends where its context would outgrow it.
        variants: "ca": as configured by default; "kvd": without resident sessions; "re":
            recomputation.
        dram_mib: size of kvd's DRAM; 0: room for all sessions.
    """

    trace: Trace = None
    num_sessions: NumSessions = 32
    concurrent: Annotated[int, typer.Option(min=1, help="Open at once.")] = 8
    scale: Scale = 0.25
    think_scale: ThinkScale = 0.01
    window_tokens: EndingWindow = 2048
    variants: Annotated[
        tuple[Variant, ...],
        typer.Option(
            parser=some_of("variants", "ca", "kvd", "re"), metavar=TEXT, help="Of ca, kvd, re."
        ),
    ] = ("ca", "re")
    rounds: Annotated[int, typer.Option(min=1, help="Replays of each variant.")] = 1
    max_running: MaxRunning = 8
    dram_mib: Annotated[int, typer.Option(min=0, help="kvd's DRAM; 0: for all sessions.")] = 0
    seed: Annotated[int, typer.Option(help="Of generated sessions.")] = 0


@dataclass(frozen=True, slots=True)
class PoliciesOptions:
    """Part `policies`.

    Attributes:
        policies: names of kvd's eviction policies.
        trace, num_sessions, scale, think_scale, window_tokens, seed: as of `serve`.
        arrivals_per_s: mean rate at which sessions begin; 0: all at once.
        dram_share, ssd_share: sizes of the tiers, as shares of all sessions' KV at their ends.
        end_hints: whether a session's last turn is announced as the last.
        warmup_turns: number of first turns that are not counted.
        plan_trace: the sessions are written there for `kvd plan`; None: nowhere.
    """

    policies: Annotated[
        tuple[str, ...],
        typer.Option(parser=policies_of, metavar=TEXT, help="Of kvd's eviction."),
    ] = ("fifo", "lru", "lookahead", "lookahead_queue", "predictive")
    trace: Trace = None
    num_sessions: NumSessions = 32
    scale: Scale = 0.1
    think_scale: ThinkScale = 0.0
    window_tokens: EndingWindow = 1024
    arrivals_per_s: Annotated[
        float,
        typer.Option(
            "--arrival-rate", min=0, help="Sessions that begin in a second; 0: all at once."
        ),
    ] = 0.0
    dram_share: Annotated[
        float,
        typer.Option("--dram", min=0, help="DRAM, as a part of all sessions' KV at their ends."),
    ] = 0.2
    ssd_share: Annotated[float, typer.Option("--ssd", min=0, help="SSD, in the same way.")] = 0.4
    max_running: MaxRunning = 1
    end_hints: Annotated[bool, typer.Option(help="Last turns say that they are.")] = False
    warmup_turns: Annotated[int, typer.Option(min=0, help="First turns, not counted.")] = 0
    rounds: Annotated[int, typer.Option(min=1, help="Replays of each policy.")] = 1
    plan_trace: PlanTrace = None
    seed: Annotated[int, typer.Option(help="Of generated sessions, and of arrivals.")] = 0


@dataclass(frozen=True, slots=True)
class OverflowOptions:
    """Part `overflow`.

    Attributes:
        history_tokens: length of the history before the overflow, which drops half of it.
        answer_tokens: length of each answer.
    """

    history_tokens: Annotated[
        int, typer.Option("--history", min=2, help="Tokens before the overflow.")
    ] = 1792
    new_tokens: ComputedTokens = 128
    answer_tokens: AnswerTokens = 4
    pairs: Pairs = 15


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """Part `sharing`.

    Attributes:
        num_sessions: number of sessions that begin with the prompt, with the measured one.
        num_at_once: number of sessions that come at the same time with a new prompt.
        prompt_tokens: length of the shared prompt.
        new_tokens: number of tokens that each session adds.
        answer_tokens: length of the measured turn's answer.
    """

    num_sessions: NumSessions = 64
    num_at_once: Annotated[
        int, typer.Option("--at-once", min=2, help="Sessions that come at the same time.")
    ] = 8
    prompt_tokens: Annotated[
        int, typer.Option("--prompt", min=2, help="Tokens that all begin with.")
    ] = 1000
    new_tokens: Annotated[int, typer.Option("--new", min=1, help="Tokens of each one's own.")] = 50
    answer_tokens: AnswerTokens = 4
    pairs: Pairs = 15


@dataclass(frozen=True, slots=True)
class PositionsOptions:
    """Part `positions`.

    Attributes:
        trace, num_sessions, scale, seed: as of `serve`.
        window_tokens: contexts are truncated to it.
        max_running: turns in a batch, and sessions that are open at once.
        plan_trace: the trace, as of `policies`.
    """

    trace: Trace = None
    num_sessions: NumSessions = 32
    scale: Scale = 1.0
    window_tokens: TruncatingWindow = 2048
    max_running: MaxRunning = 4
    rounds: Annotated[int, typer.Option(min=1, help="Replays of each variant.")] = 1
    plan_trace: PlanTrace = None
    seed: Annotated[int, typer.Option(help="Of generated sessions.")] = 0


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Part `decode`."""

    batches: Batches = (1, 8, 24)
    history_tokens: PromptTokens = 256
    steps: Steps = 64
    pairs: Pairs = 15


@dataclass(frozen=True, slots=True)
class DraftsOptions:
    """Part `drafts`."""

    batches: Batches = (1, 8)
    history_tokens: PromptTokens = 384
    steps: Steps = 128
    draft_tokens: Annotated[int, typer.Option("--most", min=1, help="Of a draft, at most.")] = 16
    pairs: Pairs = 7


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """Part `prefill`."""

    prompts: Annotated[Numbers, some_numbers("Lengths of prompts, in tokens.")] = (512, 4096)
    pairs: Pairs = 15


@dataclass(frozen=True, slots=True)
class CopiesOptions:
    """Part `copies`.

    Attributes:
        transport: the setting cache.transport.
    """

    histories: Annotated[Numbers, some_numbers("Tokens that are copied at a time.")] = (
        2048,
        8192,
    )
    pairs: Pairs = 15
    transport: Transport = "shm"


Part = (
    TurnsOptions
    | OverlapOptions
    | BuffersOptions
    | ServeOptions
    | PoliciesOptions
    | OverflowOptions
    | SharingOptions
    | PositionsOptions
    | DecodeOptions
    | DraftsOptions
    | PrefillOptions
    | CopiesOptions
)
