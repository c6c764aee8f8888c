"""What a run of the bench is told. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Tier = Literal["dram", "ssd"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def _say_nothing(_what: str) -> None:
    """Report progress to nobody."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model to measure.

    Attributes:
        path: a model directory, or
        random: the name of a preset, with random weights of this seed.
        layers: of the preset; 0: all.
        threads: that compute; 0: as many as torch chooses.
    """

    path: Path | None = None
    random: str = ""
    layers: int = 0
    dtype: Dtype = "auto"
    device: str = "cpu"
    threads: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What every part needs.

    Attributes:
        directory: the disk on which kvd's SSD tier is to be.
        on_progress: told what is being measured.
    """

    directory: Path
    command: tuple[str, ...] = ()
    on_progress: Callable[[str], None] = field(default=_say_nothing)


@dataclass(frozen=True, slots=True)
class TurnsOptions:
    """Part `turns`.

    Attributes:
        splits: (history, new) of turns of the same length (paper: Fig. 18).
        histories: that grow (preprint: Fig. 23), each with `new_tokens`.
        tier: where kvd has the history.
        answer_tokens: of each turn: the time per output token comes from them.
        re_max_tokens: longer prompts are never recomputed to measure it; 0: all are.
        re_pairs: of recomputed long histories, which take minutes; 0: as many as of the others.
    """

    splits: tuple[tuple[int, int], ...]
    histories: tuple[int, ...]
    new_tokens: int = 256
    tier: Tier = "dram"
    pairs: int = 15
    answer_tokens: int = 8
    re_max_tokens: int = 0
    re_pairs: int = 0


@dataclass(frozen=True, slots=True)
class OverlapOptions:
    """Part `overlap`.

    Attributes:
        buffers: read buffers in layers, -1: all (paper: Fig. 19).
        prompts: lengths of the turns that are saved (paper: Fig. 20), with `answer_tokens` each.
        batch: of these turns that run at once.
    """

    history_tokens: int = 1000
    new_tokens: int = 100
    buffers: tuple[int, ...] = (0, 1, 2, 4, -1)
    prompts: tuple[int, ...] = (1000, 1200, 1400, 1600)
    answer_tokens: int = 20
    batch: int = 4
    pairs: int = 15
    only: Literal["", "preload", "saving"] = ""


Variant = Literal["ca", "kvd", "re"]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Part `serve`.

    Attributes:
        trace: a file; None: generated sessions.
        scale, think_scale: by which lengths and think times are multiplied.
        concurrent: sessions that are open at once; when one ends, the next opens.
        window_tokens: a session ends where its context would outgrow it.
        variants: "ca": as configured by default; "kvd": without resident sessions; "re":
            recomputation.
    """

    trace: Path | None = None
    num_sessions: int = 32
    concurrent: int = 8
    scale: float = 0.25
    think_scale: float = 0.01
    window_tokens: int = 2048
    variants: tuple[Variant, ...] = ("ca", "re")
    rounds: int = 1
    max_running: int = 8
    dram_bytes: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PoliciesOptions:
    """Part `policies`.

    Attributes:
        policies: of kvd's eviction.
        trace, num_sessions, scale, think_scale, window_tokens, seed: as of `serve`.
        arrivals_per_s: sessions that begin, in the mean; 0: all at once.
        dram_share, ssd_share: sizes of the tiers, of the KV of all sessions at their ends.
        end_hints: a session's last turn says that it is the last.
        warmup_turns: the first to arrive, which are not counted.
        plan_trace: the sessions are written there for `kvd plan`; None: nowhere.
    """

    policies: tuple[str, ...] = ("fifo", "lru", "lookahead", "lookahead_queue", "predictive")
    trace: Path | None = None
    num_sessions: int = 32
    scale: float = 0.1
    think_scale: float = 0.0
    window_tokens: int = 1024
    arrivals_per_s: float = 0.0
    dram_share: float = 0.2
    ssd_share: float = 0.4
    max_running: int = 1
    end_hints: bool = False
    warmup_turns: int = 0
    rounds: int = 1
    plan_trace: Path | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class OverflowOptions:
    """Part `overflow`.

    Attributes:
        history_tokens: before the overflow, which drops half of them.
        answer_tokens: of each turn.
    """

    history_tokens: int = 1792
    new_tokens: int = 128
    answer_tokens: int = 4
    pairs: int = 15


@dataclass(frozen=True, slots=True)
class PositionsOptions:
    """Part `positions`.

    Attributes:
        trace, num_sessions, scale, seed: as of `serve`.
        window_tokens: contexts are truncated to it.
        max_running: turns in a batch, and sessions that are open at once.
        plan_trace: as of `policies`.
    """

    trace: Path | None = None
    num_sessions: int = 32
    scale: float = 1.0
    window_tokens: int = 2048
    max_running: int = 4
    rounds: int = 1
    plan_trace: Path | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Part `decode`."""

    batches: tuple[int, ...] = (1, 8, 24)
    history_tokens: int = 256
    steps: int = 64
    pairs: int = 15
