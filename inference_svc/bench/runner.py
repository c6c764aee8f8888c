"""One run of the bench: makes model and directories, runs a part, cleans up, also on Ctrl-C."""

import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from inference_svc.assembly import Model
from inference_svc.bench import (
    buffers,
    copies,
    decode,
    drafts,
    overflow,
    overlap,
    policies,
    prefill,
    replay,
    sharing,
    ssd_turns,
    turns,
)
from inference_svc.bench.figures import Case, Report
from inference_svc.bench.options import (
    BuffersOptions,
    CopiesOptions,
    DecodeOptions,
    DraftsOptions,
    ModelChoice,
    OverflowOptions,
    OverlapOptions,
    Part,
    PoliciesOptions,
    PositionsOptions,
    PrefillOptions,
    RunOptions,
    ServeOptions,
    SharingOptions,
    TurnsOptions,
)
from inference_svc.bench.random_model import chosen_model
from inference_svc.bench.workspace import Workspace, machine_facts, subject_of, workspace
from inference_svc.runtime.calibration.calibration import calibrate
from shared.measuring.workspace import run_until_signal

Measure = Callable[[Any, RunOptions, Workspace], Coroutine[Any, Any, tuple[Case, ...]]]


def run(part: Part, choice: ModelChoice, options: RunOptions) -> Report:
    """Measure a part; takes minutes.

    Everything that it made is removed at the end, also when it is interrupted.

    Raises:
        ReportedError: it cannot be measured here.
        OSError: the directory cannot be used.
        KeyboardInterrupt: Ctrl-C, or SIGTERM.
    """
    plan = _plan(part)
    started_unix_s, started_s = time.time(), time.monotonic()
    machine = machine_facts(torch.device(choice.device))
    if choice.threads:
        torch.set_num_threads(choice.threads)
    options.on_progress("loading the model")
    loaded = chosen_model(choice, plan.window_tokens(part))
    model = Model(loaded, calibrate(loaded, packing="auto"))
    report = Report(
        part=plan.name,
        metric=plan.metric,
        command=options.command,
        started_unix_s=started_unix_s,
        elapsed_s=0.0,
        subject=subject_of(model, choice),
        machine=machine,
    )
    with workspace(options.directory, model) as work:
        cases = run_until_signal(lambda: plan.measure(part, options, work))
    return replace(report, cases=cases, elapsed_s=time.monotonic() - started_s)


class _PartPlan(NamedTuple):
    """A part's name, metric, longest sequence, and the function that measures it."""

    name: str
    metric: str
    window_tokens: Callable[[Any], int]
    measure: Measure


def _window_of(part: Any) -> int:
    window: int = part.window_tokens
    return window


_PARTS: dict[type[Part], _PartPlan] = {
    TurnsOptions: _PartPlan("turns", turns.METRIC, turns.window_tokens, turns.measure_turns),
    OverlapOptions: _PartPlan(
        "overlap", overlap.METRIC, overlap.window_tokens, overlap.measure_overlap
    ),
    BuffersOptions: _PartPlan(
        "buffers", buffers.METRIC, buffers.window_tokens, buffers.measure_buffers
    ),
    ServeOptions: _PartPlan("serve", replay.METRIC, _window_of, replay.measure_serve),
    PoliciesOptions: _PartPlan("policies", policies.METRIC, _window_of, policies.measure_policies),
    OverflowOptions: _PartPlan(
        "overflow", overflow.METRIC, overflow.window_tokens, overflow.measure_overflow
    ),
    SharingOptions: _PartPlan(
        "sharing", sharing.METRIC, sharing.window_tokens, sharing.measure_sharing
    ),
    PositionsOptions: _PartPlan(
        "positions", policies.METRIC, _window_of, policies.measure_positions
    ),
    DecodeOptions: _PartPlan("decode", decode.METRIC, decode.window_tokens, decode.measure_decode),
    DraftsOptions: _PartPlan("drafts", decode.METRIC, drafts.window_tokens, drafts.measure_drafts),
    PrefillOptions: _PartPlan(
        "prefill", prefill.METRIC, prefill.window_tokens, prefill.measure_prefill
    ),
    CopiesOptions: _PartPlan("copies", copies.METRIC, copies.window_tokens, copies.measure_copies),
}
_SSD_TURNS = _PartPlan(
    "turns, ssd", ssd_turns.METRIC, turns.window_tokens, ssd_turns.measure_ssd_turns
)


def _plan(part: Part) -> _PartPlan:
    """Return how a part is measured."""
    is_on_ssd = isinstance(part, TurnsOptions) and part.tier == "ssd"
    return _SSD_TURNS if is_on_ssd else _PARTS[type(part)]
