"""The options of `kvd plan`, in the order of its help; arguments.py interprets them. Pure."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvd.plan.fleet import RemoteWrite
from kvd.plan.hardware import Charge, LoadPolicy, Positions, TierMode

_ARRIVES, _ENGINE, _CAPACITY = "What arrives", "Model and engine", "Capacities"
_SERVERS, _KVD, _OUTPUT = "Several servers", "What kvd does", "What comes out"


def option(panel: str, explanation: str, *names: str, **more: Any) -> Any:
    """Return an option that the help shows in a panel."""
    return typer.Option(*names, help=explanation, rich_help_panel=panel, **more)


@dataclass(frozen=True, slots=True)
class ArrivalArguments:
    """Which sessions come, and when."""

    trace: Annotated[
        Path | None, option(_ARRIVES, "Trace to replay; published ones too: see --format.")
    ] = None
    format: Annotated[
        Literal["auto", "turns", "mooncake", "azure", "burstgpt", "sharegpt"],
        option(_ARRIVES, "turns, mooncake, azure, burstgpt, sharegpt; auto: by its first line."),
    ] = "auto"
    generate: Annotated[str, option(_ARRIVES, "Or draw sessions: sharegpt-like, agents.")] = ""
    sessions: Annotated[int, option(_ARRIVES, "Number of drawn sessions.", min=1)] = 9000
    rate: Annotated[
        float, option(_ARRIVES, "Drawn sessions, or such without times, that begin a second.")
    ] = 1.0
    seed: Annotated[int, option(_ARRIVES, "Of what is drawn.", min=0)] = 0
    arrival_rate: Annotated[float | None, option(_ARRIVES, "Sessions that begin per second.")] = (
        None
    )
    think_scale: Annotated[float, option(_ARRIVES, "Multiplies think times; 0: none.")] = 1.0
    warmup_turns: Annotated[str, option(_ARRIVES, "Not measured: number or share.")] = "20%"


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """The model and how fast it computes; None: as calibrated, or the default."""

    model: Annotated[
        str,
        option(
            _ENGINE,
            "llama-13b, -65b, -70b, falcon-40b, mistral-7b, qwen3-next-80b, or a model directory.",
        ),
    ] = "llama-13b"
    kv_bytes_per_token: Annotated[str, option(_ENGINE, "Instead of its own, e.g. 320KB.")] = ""
    state_bytes: Annotated[
        str, option(_ENGINE, "Of a state of recurrent layers, e.g. 72MiB; 0: it has none.")
    ] = ""
    window: Annotated[int, option(_ENGINE, "Context in tokens; 0: the model's.", min=0)] = 0
    slots: Annotated[
        int | None, option(_ENGINE, "Turns that run at once.", min=1, show_default="24")
    ] = None
    prefill_ms_per_token: Annotated[
        float | None, option(_ENGINE, "Of a prompt.", show_default="0.5")
    ] = None
    fixed_ms: Annotated[float | None, option(_ENGINE, "Of every prefill.", show_default="20")] = (
        None
    )
    decode_step_ms: Annotated[
        float | None, option(_ENGINE, "Of the whole batch.", show_default="20")
    ] = None
    calibration: Annotated[
        list[Path] | None,
        option(_ENGINE, "What inference-svc bench wrote as JSON; repeatable.", metavar="FILE"),
    ] = None
    load: Annotated[
        float | None, option(_ENGINE, "Make the engine so fast that this is the recompute load.")
    ] = None


@dataclass(frozen=True, slots=True)
class CapacityArguments:
    """Sizes and speeds of the tiers."""

    hbm: Annotated[str, option(_CAPACITY, "For KV of what runs; 0: only slots bound it.")] = "0"
    dram: Annotated[str, option(_CAPACITY, "Sizes to try, decimal: 128GB,256GB.")] = ""
    ssd: Annotated[str, option(_CAPACITY, "Sizes to try, decimal: 2TB,10TB.")] = ""
    capacity_share: Annotated[
        str,
        option(_CAPACITY, "Or shares of all sessions' KV.", show_default="1%,2%,5%,10%,20%,40%"),
    ] = ""
    dram_share: Annotated[str, option(_CAPACITY, "Of these, what is DRAM.")] = "1/16"
    ssd_bandwidth: Annotated[str, option(_CAPACITY, "Of reads.")] = "5GB/s"
    pcie_bandwidth: Annotated[str, option(_CAPACITY, "DRAM to HBM.")] = "25GB/s"


@dataclass(frozen=True, slots=True)
class ServerArguments:
    """How many servers there are, and what moves between them."""

    servers: Annotated[
        str, option(_SERVERS, "How many to try: 1,10,100. Sessions and their rate are of all.")
    ] = "1"
    replayed: Annotated[
        int, option(_SERVERS, "At most so many are replayed, with their share of sessions.", min=1)
    ] = 16
    routing: Annotated[
        str, option(_SERVERS, "Names, or all: random, ring (consistent hash), session.")
    ] = "session"
    remote: Annotated[
        str, option(_SERVERS, "Of each server to and from the remote store, e.g. 3GB/s.")
    ] = ""
    remote_write: Annotated[
        RemoteWrite,
        option(_SERVERS, "Stored there: all, what is evicted, or what a server holds that drains."),
    ] = "all"
    remote_wait: Annotated[
        bool,
        option(
            _SERVERS,
            "Turns wait for what is fetched where that pays; else what is not there is computed.",
            "--remote-wait/--no-remote-wait",
        ),
    ] = True
    remote_quiet: Annotated[
        str, option(_SERVERS, "How long a session is left alone before that.")
    ] = "10s"
    failures: Annotated[
        float, option(_SERVERS, "How often each is lost a day, with all that it holds.", min=0)
    ] = 0.0
    drains: Annotated[float, option(_SERVERS, "How often each is taken out a day.", min=0)] = 0.0
    away: Annotated[str, option(_SERVERS, "For how long, either way.")] = "10m"


@dataclass(frozen=True, slots=True)
class KvdArguments:
    """What kvd and the engine do by default.

    To judge a policy by what it keeps, have it "always" loaded.
    """

    policy: Annotated[
        str,
        option(
            _KVD,
            "Names, or all.",
            show_default="lru,predictive,belady; of several servers predictive",
        ),
    ] = ""
    tiers: Annotated[TierMode, option(_KVD, "Whether SSD keeps what DRAM has.")] = "inclusive"
    charge: Annotated[Charge, option(_KVD, "A session takes its bytes, or a window.")] = "packed"
    ttl: Annotated[str, option(_KVD, 'How long sessions are kept, or "never".')] = "7d"
    watermark: Annotated[str, option(_KVD, "Share of DRAM that is kept free.")] = "2%"
    load_policy: Annotated[LoadPolicy, option(_KVD, "auto: where that pays.")] = "auto"
    end_hints: Annotated[bool, option(_KVD, "Clients say when a session ends.", "--end-hints")] = (
        False
    )
    tool_hints: Annotated[
        bool,
        option(
            _KVD,
            "The engine says which tools an answer calls, and who supersedes whom.",
            "--tool-hints/--no-tool-hints",
        ),
    ] = True
    positions: Annotated[
        Positions,
        option(_KVD, "coupled: a context overflow makes what is stored useless (OF)."),
    ] = "decoupled"


@dataclass(frozen=True, slots=True)
class CostArguments:
    """Prices, who computes the plan, and where it goes."""

    prices: Annotated[Path | None, option(_OUTPUT, "TOML: gpu, dram_gb, ssd_gb of an hour.")] = None
    gpus: Annotated[int, option(_OUTPUT, "To pay for; 0: as in the paper.", min=0)] = 0
    json_to: Annotated[
        str, option(_OUTPUT, "Also a JSON document; -: only that.", "--json", metavar="FILE|-")
    ] = ""
    plot: Annotated[Path | None, option(_OUTPUT, "Also a page (.html), or a picture (.png).")] = (
        None
    )
    jobs: Annotated[int, option(_OUTPUT, "Processes; 0: all processors.", min=0)] = 0
