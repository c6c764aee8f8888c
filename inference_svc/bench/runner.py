"""One run of the bench: its model, its directories, its part, its end on Ctrl-C."""

import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import torch

from inference_svc.assembly import Model
from inference_svc.bench import decode, overflow, overlap, policies, replay, ssd_turns, turns
from inference_svc.bench.figures import Case, Report
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
from inference_svc.bench.workspace import Workspace, machine_facts, subject_of, workspace
from inference_svc.runtime.calibration.calibration import calibrate
from shared.measuring.workspace import run_until_signal

Measure = Callable[[Any, RunOptions, Workspace], Coroutine[Any, Any, tuple[Case, ...]]]


def run(part: Part, choice: ModelChoice, options: RunOptions) -> Report:
    """Measure a part; takes minutes.

    Everything it made is removed at the end, also when it is interrupted.

    Raises:
        ReportedError: it cannot be measured here.
        OSError: the directory cannot be used.
        KeyboardInterrupt: Ctrl-C, or SIGTERM.
    """
    name, metric, window, measure = _plan(part)
    started_unix_s, started_s = time.time(), time.monotonic()
    machine = machine_facts(torch.device(choice.device))
    if choice.threads:
        torch.set_num_threads(choice.threads)
    options.on_progress("loading the model")
    loaded = chosen_model(choice, window)
    model = Model(loaded, calibrate(loaded, packs_weights=True))
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
        cases = run_until_signal(lambda: measure(part, options, work))
    return replace(report, cases=cases, elapsed_s=time.monotonic() - started_s)


def _plan(part: Part) -> tuple[str, str, int, Measure]:
    """Name, metric, longest sequence, and how it is measured."""
    match part:
        case TurnsOptions(tier="ssd"):
            window = turns.window_tokens(part)
            return "turns, ssd", ssd_turns.METRIC, window, ssd_turns.measure_ssd_turns
        case TurnsOptions():
            return "turns", turns.METRIC, turns.window_tokens(part), turns.measure_turns
        case OverlapOptions():
            return "overlap", overlap.METRIC, overlap.window_tokens(part), overlap.measure_overlap
        case ServeOptions():
            return "serve", replay.METRIC, part.window_tokens, replay.measure_serve
        case PoliciesOptions():
            return "policies", policies.METRIC, part.window_tokens, policies.measure_policies
        case OverflowOptions():
            window = overflow.window_tokens(part)
            return "overflow", overflow.METRIC, window, overflow.measure_overflow
        case PositionsOptions():
            return "positions", policies.METRIC, part.window_tokens, policies.measure_positions
        case DecodeOptions():
            return "decode", decode.METRIC, decode.window_tokens(part), decode.measure_decode
