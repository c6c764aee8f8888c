"""One run of the bench: its model, its directories, its part, its end on Ctrl-C."""

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

    Everything it made is removed at the end, also when it is interrupted.

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
    model = Model(loaded, calibrate(loaded, packs_weights=True))
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


class _Measured(NamedTuple):
    """A part's name, metric, longest sequence, and how it is measured."""

    name: str
    metric: str
    window_tokens: Callable[[Any], int]
    measure: Measure


def _window_of(part: Any) -> int:
    window: int = part.window_tokens
    return window


_PARTS: dict[type[Part], _Measured] = {
    TurnsOptions: _Measured("turns", turns.METRIC, turns.window_tokens, turns.measure_turns),
    OverlapOptions: _Measured(
        "overlap", overlap.METRIC, overlap.window_tokens, overlap.measure_overlap
    ),
    BuffersOptions: _Measured(
        "buffers", buffers.METRIC, buffers.window_tokens, buffers.measure_buffers
    ),
    ServeOptions: _Measured("serve", replay.METRIC, _window_of, replay.measure_serve),
    PoliciesOptions: _Measured("policies", policies.METRIC, _window_of, policies.measure_policies),
    OverflowOptions: _Measured(
        "overflow", overflow.METRIC, overflow.window_tokens, overflow.measure_overflow
    ),
    SharingOptions: _Measured(
        "sharing", sharing.METRIC, sharing.window_tokens, sharing.measure_sharing
    ),
    PositionsOptions: _Measured(
        "positions", policies.METRIC, _window_of, policies.measure_positions
    ),
    DecodeOptions: _Measured("decode", decode.METRIC, decode.window_tokens, decode.measure_decode),
    DraftsOptions: _Measured("drafts", decode.METRIC, drafts.window_tokens, drafts.measure_drafts),
    PrefillOptions: _Measured(
        "prefill", prefill.METRIC, prefill.window_tokens, prefill.measure_prefill
    ),
    CopiesOptions: _Measured("copies", copies.METRIC, copies.window_tokens, copies.measure_copies),
}
_SSD_TURNS = _Measured(
    "turns, ssd", ssd_turns.METRIC, turns.window_tokens, ssd_turns.measure_ssd_turns
)


def _plan(part: Part) -> _Measured:
    """How a part is measured."""
    is_on_ssd = isinstance(part, TurnsOptions) and part.tier == "ssd"
    return _SSD_TURNS if is_on_ssd else _PARTS[type(part)]
