"""How settings configure an engine's parts."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inference_svc import assembly
from inference_svc.assembly import Model, assemble_engine
from inference_svc.config import InferenceSettings
from inference_svc.core.scheduling.step_plan import ON_CPU
from inference_svc.runtime.attention.paged_attention import PagedAttention
from inference_svc.runtime.calibration.compile_choice import (
    REMEMBERED_STEPS,
    STEPS,
    choose_compiling,
)
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.decode_graphs import StepShape
from inference_svc.runtime.kv.layer_tensors import token_items_of
from tests.inference_svc.runtime.eager_pieces import EAGER
from tests.memory_engine import loaded_model
from tests.models import build_chunked_model, build_shapes_model, build_windowed_model
from tests.recorded_graph import RecordedGraphs
from tests.split_attention import attend_pages


@pytest.fixture(scope="module")
def model(tiny_model):
    return Model(*loaded_model(tiny_model))


@pytest.mark.parametrize(
    ("graphs", "working_kv", "shapes"),
    [
        ("auto", "pages", [StepShape(2, 192), StepShape(1, 192)]),
        ("off", "pages", None),
        ("auto", "contiguous", None),
    ],
)
def test_captured_steps_cover_the_possible_turns(model, monkeypatch, graphs, working_kv, shapes):
    """On devices that can capture: as many turns as run at once, and their longest window."""
    monkeypatch.setattr(assembly, "capture_on", lambda _device: RecordedGraphs())
    monkeypatch.setattr(assembly, "choose_attention", lambda *_: PagedAttention(attend_pages))
    settings = {
        "model": {"graphs": graphs},
        "cache": {"mode": "recompute"},
        "scheduler": {"kv_tokens": 192, "max_running": 2, "working_kv": working_kv},
    }
    parts = assemble_engine(InferenceSettings.model_validate(settings), model)
    try:
        assert parts.window_tokens == 192
        assert (parts.runner.graphs and parts.runner.graphs.shapes) == shapes
    finally:
        parts.close()


def test_steps_are_computed_by_what_was_compiled(model, monkeypatch, tmp_path):
    """Or remembered, before the first of them; here graphs run operation by operation."""
    monkeypatch.setattr(
        assembly, "choose_compiling", lambda *chosen: choose_compiling(*chosen, compiler=EAGER)
    )
    for compiling in ("step", "auto"):
        settings = {
            "model": {"compile": compiling},
            "cache": {"mode": "recompute"},
            "server": {"state_dir": str(tmp_path)},
        }
        parts = assemble_engine(InferenceSettings.model_validate(settings), model)
        try:
            chunk = Chunk(parts.pool.new_kv(8), [5, 6, 7], want_logits=True)
            compute_thread, *_ = parts.threads
            compute_thread.submit(parts.runner.step, [chunk]).result()
            assert parts.runner.compiled.num_run in (len(STEPS) + 1, len(REMEMBERED_STEPS) + 1)
        finally:
            parts.close()


@pytest.mark.parametrize(
    ("build", "windows", "groups"),
    [
        (build_windowed_model, True, (1, 2)),
        (build_shapes_model, True, (2, 4)),
        (build_chunked_model, True, (1, 2)),
        (build_windowed_model, False, (1, 0)),
        (build_shapes_model, False, (1, 0)),
    ],
)
def test_pages_belong_to_groups_of_layers(tmp_path, build, windows, groups):
    """A third has layers without a window; a window allows more tokens in the same memory."""
    model = Model(*loaded_model(build(tmp_path)))
    num_tokens, page_tokens = 900, 16
    scheduler = {"kv_tokens": num_tokens, "working_kv": "pages", "mixed_step_tokens": 16}
    settings = {
        "cache": {"mode": "recompute", "windows": windows},
        "scheduler": scheduler | {"page_tokens": page_tokens},
    }
    parts = assemble_engine(InferenceSettings.model_validate(settings), model)
    parts.close()
    slots, pool = parts.engine.scheduler.held_slots, parts.pool
    if windows:  # of 90 tokens; a block and a step beside it
        num_rows = 90 + model.calibration.layout.block_tokens + 90
        assert slots.groups.window_pages == (num_rows - 1 + page_tokens - 1) // page_tokens + 1
    assert (slots.groups.num_full, slots.groups.num_windowed) == groups
    assert pool.groups.pages == slots.groups
    token_items = token_items_of([layer.shape for layer in model.calibration.layers])
    items = slots.num_slots * token_items_of(pool.groups.places)
    assert (num_tokens - page_tokens) * token_items < items <= num_tokens * token_items
    assert (parts.window_tokens > num_tokens) == windows
    gauges = parts.engine.gauges()
    assert gauges["pool_token_slots"] == gauges["pool_free_token_slots"]


def test_a_cpu_captures_nothing(model):
    """With any settings."""
    settings = {"cache": {"mode": "recompute"}, "scheduler": {"kv_tokens": 192}}
    parts = assemble_engine(InferenceSettings.model_validate(settings), model)
    assert parts.runner.graphs is None
    parts.close()


def test_denormal_numbers_cost_nothing(model):
    """The computing thread flushes them to zero, and so does each thread that helps it."""
    settings = {"cache": {"mode": "recompute"}, "scheduler": {"kv_tokens": 192}}
    parts = assemble_engine(InferenceSettings.model_validate(settings), model)

    def halved() -> Tensor:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            return torch.full((1 << 20,), 1e-39) * 0.5
        finally:
            torch.set_num_threads(num_threads)

    try:
        assert halved().all()
        assert not parts.threads[0].submit(halved).result().any()
        assert halved().all()  # other threads still have such numbers
    finally:
        parts.close()


def test_the_engine_has_the_devices_limits(model, monkeypatch):
    """For captured steps, and for the amount stored on the way."""
    monkeypatch.setattr(assembly, "capture_on", lambda _device: RecordedGraphs())
    monkeypatch.setattr(assembly, "choose_attention", lambda *_: PagedAttention(attend_pages))
    settings = {
        "cache": {"save_group_tokens": 16},
        "scheduler": {"kv_tokens": 16_000, "working_kv": "pages"},
    }
    # With a short window there are few graphs.
    narrow = replace(model, loaded=replace(model.loaded, context_window=192))
    parts = assemble_engine(InferenceSettings.model_validate(settings), narrow)
    try:
        assert max(shape.rows for shape in parts.runner.graphs.shapes) == ON_CPU.max_running
        block_tokens = model.calibration.layout.block_tokens
        write_slots = 2 * ON_CPU.step_tokens + ON_CPU.max_running * max(16, block_tokens)
        assert parts.engine.scheduler.write_slots.num_slots == write_slots
    finally:
        parts.close()


ON_A_CPU = """
import sys
sys.modules["triton"] = None  # as where it is not installed
from pathlib import Path
from inference_svc.assembly import Model, assemble_engine
from inference_svc.config import InferenceSettings
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.model.model_loader import load_model

loaded = load_model(Path(sys.argv[1]))
settings = InferenceSettings(cache={"mode": "recompute"}, scheduler={"kv_tokens": 512})
parts = assemble_engine(settings, Model(loaded, calibrate(loaded)))
parts.close()
print(parts.window_tokens)
"""


def test_on_a_cpu_an_engine_is_assembled_without_triton(tiny_model):
    """CPU builds of PyTorch do not bring it."""
    done = subprocess.run(
        [sys.executable, "-c", ON_A_CPU, tiny_model], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) > 0
