"""One run of the bench: its model, its directories, its part, its end on Ctrl-C."""

import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import torch

from inference_svc.assembly import Model
from inference_svc.bench import (
    decode,
    overflow,
    overlap,
    policies,
    positions,
    saving,
    serve,
    ssd_turns,
    turns,
)
from inference_svc.bench.figures import Case, Report
from inference_svc.bench.machine import machine_facts, subject_of
from inference_svc.bench.options import (
    DecodeOptions,
    ModelChoice,
    OverflowOptions,
    OverlapOptions,
    Part,
    PoliciesOptions,
    PositionsOptions,
    RunOptions,
    ServeOptions,
    TurnsOptions,
)
from inference_svc.bench.random_model import chosen_model
from inference_svc.bench.workspace import Workspace, workspace
from inference_svc.runtime.calibration.calibration import calibrate
from shared.measuring.workspace import run_until_signal

Measure = Callable[[Workspace], Coroutine[Any, Any, tuple[Case, ...]]]


def run(part: Part, choice: ModelChoice, options: RunOptions) -> Report:
    """Measure a part; takes minutes.

    Everything it made is removed at the end, also when it is interrupted.

    Raises:
        ReportedError: it cannot be measured here.
        OSError: the directory cannot be used.
        KeyboardInterrupt: Ctrl-C, or SIGTERM.
    """
    name, metric, window, measure = _plan(part, options)
    started_unix_s, started_s = time.time(), time.monotonic()
    machine = machine_facts(torch.device(choice.device))
    if choice.threads:
        torch.set_num_threads(choice.threads)
    options.on_progress("loading the model")
    loaded = chosen_model(choice, window)
    model = Model(loaded, calibrate(loaded))
    report = Report(
        part=name,
        metric=metric,
        command=options.command,
        started_unix_s=started_unix_s,
        elapsed_s=0.0,
        subject=subject_of(model, choice),
        machine=machine,
    )
    with workspace(options.directory, model) as work:
        cases = run_until_signal(lambda: measure(work))
    return replace(report, cases=cases, elapsed_s=time.monotonic() - started_s)


def _plan(part: Part, options: RunOptions) -> tuple[str, str, int, Measure]:
    """Name, metric, longest sequence, and how it is measured."""
    match part:
        case TurnsOptions(tier="ssd"):
            window = turns.window_tokens(part)
            return (
                "turns, ssd",
                ssd_turns.METRIC,
                window,
                lambda work: ssd_turns.measure_ssd_turns(part, options, work),
            )
        case TurnsOptions():
            window = turns.window_tokens(part)
            return (
                "turns",
                turns.METRIC,
                window,
                lambda work: turns.measure_turns(part, options, work),
            )
        case OverlapOptions():
            window = overlap.window_tokens(part)
            return "overlap", overlap.METRIC, window, lambda work: _overlap(part, options, work)
        case ServeOptions():
            return (
                "serve",
                serve.METRIC,
                part.window_tokens,
                lambda work: serve.measure_serve(part, options, work),
            )
        case PoliciesOptions():
            return (
                "policies",
                policies.METRIC,
                part.window_tokens,
                lambda work: policies.measure_policies(part, options, work),
            )
        case OverflowOptions():
            return (
                "overflow",
                overflow.METRIC,
                overflow.window_tokens(part),
                lambda work: overflow.measure_overflow(part, options, work),
            )
        case PositionsOptions():
            return (
                "positions",
                positions.METRIC,
                part.window_tokens,
                lambda work: positions.measure_positions(part, options, work),
            )
        case DecodeOptions():
            window = decode.window_tokens(part)
            return (
                "decode",
                decode.METRIC,
                window,
                lambda work: decode.measure_decode(part, options, work),
            )


async def _overlap(part: OverlapOptions, options: RunOptions, work: Workspace) -> tuple[Case, ...]:
    cases: tuple[Case, ...] = ()
    if part.only != "saving":
        cases += await overlap.measure_preload(part, options, work)
    if part.only != "preload":
        cases += await saving.measure_saving(part, options, work)
    return cases
