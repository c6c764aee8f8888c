"""The command `kvd plan`: how much DRAM and SSD, answered by replaying a trace; see kvd/PLAN.md."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvd.cli.options import RuntimeDir
from kvd.cli.plan_observe import show_observation
from kvd.cli.plan_paper import show_paper
from kvd.errors import UnclearSelectionError
from shared.measuring.report import check_json, print_report, progress_bar

_ARRIVES, _ENGINE, _CAPACITY = "What arrives", "Model and engine", "Capacities"
_KVD, _OUTPUT, _INSTEAD = "What kvd does", "What comes out", "Instead of a plan"


def _option(panel: str, explanation: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=explanation, rich_help_panel=panel, **more)


def plan(
    trace: Annotated[
        Path | None, _option(_ARRIVES, "Trace to replay; published ones too: see --format.")
    ] = None,
    trace_format: Annotated[
        Literal["auto", "turns", "mooncake", "azure", "burstgpt", "sharegpt"],
        _option(
            _ARRIVES,
            "turns, mooncake, azure, burstgpt, sharegpt; auto: by its first line.",
            "--format",
        ),
    ] = "auto",
    generate: Annotated[str, _option(_ARRIVES, "Or draw sessions: sharegpt-like.")] = "",
    sessions: Annotated[int, _option(_ARRIVES, "So many are drawn.", min=1)] = 9000,
    rate: Annotated[
        float, _option(_ARRIVES, "Drawn sessions, or such without times, that begin a second.")
    ] = 1.0,
    seed: Annotated[int, _option(_ARRIVES, "Of what is drawn.", min=0)] = 0,
    arrival_rate: Annotated[
        float | None, _option(_ARRIVES, "Have so many sessions begin a second.")
    ] = None,
    think_scale: Annotated[float, _option(_ARRIVES, "Multiplies think times; 0: none.")] = 1.0,
    warmup_turns: Annotated[str, _option(_ARRIVES, "Not measured: number or share.")] = "20%",
    model: Annotated[
        str,
        _option(_ENGINE, "llama-13b, -65b, -70b, falcon-40b, mistral-7b, or a model directory."),
    ] = "llama-13b",
    kv_bytes_per_token: Annotated[str, _option(_ENGINE, "Instead of its own, e.g. 320KB.")] = "",
    window: Annotated[int, _option(_ENGINE, "Context in tokens; 0: the model's.", min=0)] = 0,
    slots: Annotated[
        int | None, _option(_ENGINE, "Turns that run at once.", min=1, show_default="24")
    ] = None,
    prefill_ms_per_token: Annotated[
        float | None, _option(_ENGINE, "Of a prompt.", show_default="0.5")
    ] = None,
    fixed_ms: Annotated[
        float | None, _option(_ENGINE, "Of every prefill.", show_default="20")
    ] = None,
    decode_step_ms: Annotated[
        float | None, _option(_ENGINE, "Of the whole batch.", show_default="20")
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        _option(_ENGINE, "What inference-svc bench wrote as JSON; repeatable.", metavar="FILE"),
    ] = None,
    load: Annotated[
        float | None, _option(_ENGINE, "Make the engine so fast that this is the recompute load.")
    ] = None,
    hbm: Annotated[str, _option(_CAPACITY, "For KV of what runs; 0: only slots bound it.")] = "0",
    dram: Annotated[str, _option(_CAPACITY, "Sizes to try, decimal: 128GB,256GB.")] = "",
    ssd: Annotated[str, _option(_CAPACITY, "Sizes to try, decimal: 2TB,10TB.")] = "",
    capacity_share: Annotated[
        str,
        _option(_CAPACITY, "Or shares of all sessions' KV.", show_default="1%,2%,5%,10%,20%,40%"),
    ] = "",
    dram_share: Annotated[str, _option(_CAPACITY, "Of these, what is DRAM.")] = "1/16",
    ssd_bandwidth: Annotated[str, _option(_CAPACITY, "Of reads.")] = "5GB/s",
    pcie_bandwidth: Annotated[str, _option(_CAPACITY, "DRAM to HBM.")] = "25GB/s",
    policy: Annotated[str, _option(_KVD, "Names, or all.")] = "lru,predictive,belady",
    tiers: Annotated[
        Literal["inclusive", "exclusive"], _option(_KVD, "Whether SSD keeps what DRAM has.")
    ] = "inclusive",
    charge: Annotated[
        Literal["packed", "window"], _option(_KVD, "A session takes its bytes, or a window.")
    ] = "packed",
    ttl: Annotated[str, _option(_KVD, 'How long sessions are kept, or "never".')] = "7d",
    watermark: Annotated[str, _option(_KVD, "Share of DRAM that is kept free.")] = "2%",
    load_policy: Annotated[
        Literal["always", "auto", "never"], _option(_KVD, "auto: if faster than computing.")
    ] = "auto",
    end_hints: Annotated[
        bool, _option(_KVD, "Clients say when a session ends.", "--end-hints")
    ] = False,
    positions: Annotated[
        Literal["decoupled", "coupled"],
        _option(_KVD, "coupled: a context overflow makes what is stored useless (OF)."),
    ] = "decoupled",
    prices: Annotated[
        Path | None, _option(_OUTPUT, "TOML: gpu, dram_gb, ssd_gb of an hour.")
    ] = None,
    gpus: Annotated[int, _option(_OUTPUT, "To pay for; 0: as in the paper.", min=0)] = 0,
    json_to: Annotated[
        str, _option(_OUTPUT, "Also a JSON document; -: only that.", "--json", metavar="FILE|-")
    ] = "",
    plot: Annotated[
        Path | None, _option(_OUTPUT, "Also a page (.html), or a picture (.png).")
    ] = None,
    jobs: Annotated[int, _option(_OUTPUT, "Processes; 0: all processors.", min=0)] = 0,
    paper: Annotated[
        bool, _option(_INSTEAD, "The paper's experiments, beside its numbers.", "--paper")
    ] = False,
    quick: Annotated[
        bool, _option(_INSTEAD, "--paper with a twentieth of it; says less.", "--quick")
    ] = False,
    observe: Annotated[
        bool, _option(_INSTEAD, "What larger tiers would bring a running kvd.", "--observe")
    ] = False,
    runtime_dir: RuntimeDir = None,
) -> None:
    """Replay a trace: hits, times and cost by policy and capacity. How much DRAM and SSD?"""
    # Only this command needs these.
    from kvd.plan import arguments as given
    from kvd.plan.planning import make_plan
    from kvd.plan.plots import check_plot
    from kvd.plan.plots import plot as write_plot
    from kvd.plan.report import as_document, tables
    from kvd.plan.sizes import rate_of

    if paper or observe:
        _check_alone(paper, observe, trace, bool(generate), plot)
    if paper:
        show_paper(seed=seed, is_quick=quick, num_workers=jobs, json_to=json_to)
        return
    if observe:
        rate_s = rate_of(ssd_bandwidth, "--ssd-bandwidth")
        show_observation(runtime_dir, ssd_bytes_per_s=rate_s, json_to=json_to)
        return
    if plot is not None:
        check_plot(plot)
    check_json(json_to)
    request = given.request_of(
        given.ArrivalArguments(
            trace,
            generate,
            sessions,
            rate,
            seed,
            arrival_rate,
            think_scale,
            warmup_turns,
            trace_format,
        ),
        given.EngineArguments(
            model,
            kv_bytes_per_token,
            window,
            slots,
            prefill_ms_per_token,
            fixed_ms,
            decode_step_ms,
            tuple(calibration or ()),
            load,
        ),
        given.CapacityArguments(
            hbm, dram, ssd, capacity_share, dram_share, ssd_bandwidth, pcie_bandwidth
        ),
        given.KvdArguments(
            policy, tiers, charge, ttl, watermark, load_policy, end_hints, positions
        ),
        given.CostArguments(prices, gpus, jobs),
        tuple(sys.argv),
    )
    with progress_bar("replaying", request.num_replays * request.workload.num_turns) as tell:
        report = make_plan(request, tell)
    print_report(as_document(report), lambda _: tables(report), json_to)
    if plot is not None:
        write_plot(report, plot)


def _check_alone(*parts: object) -> None:
    """Raise UnclearSelectionError if more than one thing is asked for."""
    if sum(map(bool, parts)) > 1:
        raise UnclearSelectionError(
            "--paper and --observe stand alone",
            "leave out --trace, --generate and --plot, or plan without them",
        )
