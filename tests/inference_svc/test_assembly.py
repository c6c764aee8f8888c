"""What settings make of an engine's parts."""

import pytest

from inference_svc import assembly
from inference_svc.assembly import Model, assemble_engine
from inference_svc.config import InferenceSettings
from inference_svc.runtime.attention.paged_attention import PagedAttention
from inference_svc.runtime.compute.decode_step import StepShape
from tests.memory_engine import loaded_model
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
def test_decode_is_captured_as_far_as_turns_reach(model, monkeypatch, graphs, working_kv, shapes):
    """Where the device can, as many turns as run at once, and their longest window."""
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


def test_a_cpu_captures_nothing(model):
    """Whatever the settings say."""
    settings = {"cache": {"mode": "recompute"}, "scheduler": {"kv_tokens": 192}}
    parts = assemble_engine(InferenceSettings.model_validate(settings), model)
    assert parts.runner.graphs is None
    parts.close()
