"""Whether steps are replayed: by proof; otherwise the log has the reason."""

import pytest
import torch
from structlog.testing import capture_logs
from torch.utils._python_dispatch import _disable_current_modes

from inference_svc.runtime.attention.attention import TorchAttention
from inference_svc.runtime.calibration.graph_choice import choose_graphs
from inference_svc.runtime.compute.decode_graphs import StepShape
from tests.paged_steps import PagedSteps
from tests.recorded_graph import RecordedGraphs
from tests.split_attention import attend_pages

FAMILIES = ["llama", "gemma2"]
MORE = ["mixtral", "gpt-oss", "gpt2", "phi3", "cohere2", "smollm3", "hunyuan"]


@pytest.fixture
def paged(tiny):
    """Return a function that puts a model on pages."""

    def make(name="llama", **options):
        return PagedSteps(tiny(name).loaded, tiny(name).calibration, **options)

    return make


def chosen(steps, capture=None, name="auto", attention=None, most_rows=2):
    """Choose; return the graphs, and the line of the log."""
    capture = RecordedGraphs() if capture is None else capture
    attention = attention or steps.attention
    with capture_logs() as lines:
        graphs = choose_graphs(name, capture, *steps.model, attention, steps.memory(most_rows))
    (line,) = [line for line in lines if line["event"] == "graphs_chosen"]
    return graphs, line


@pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]
)
def test_proven_models_are_replayed(paged, name):
    """Windows, softcaps, sinks, experts, norms behind RoPE, positions that are learnt."""
    capture = RecordedGraphs()
    graphs, line = chosen(paged(name), capture, most_rows=3)
    assert graphs.shapes == [StepShape(rows, 192) for rows in (3, 2, 1)]
    assert line["log_level"] == "info"
    assert (line["graphs"], line["most_turns"], line["most_tokens"]) == (3, 3, 192)
    assert line["bytes"] == graphs.num_bytes == capture.num_bytes > 0
    assert 0 <= line["distance"] < 1e-5
    assert capture.num_replayed == 2 * 3


def test_without_graphs_or_by_choice_nothing_is_logged(paged):
    """There is nothing to be said."""
    steps = paged()
    with capture_logs() as lines:
        for name, capture in (("auto", None), ("off", RecordedGraphs())):
            assert (
                choose_graphs(name, capture, *steps.model, steps.attention, steps.memory(2)) is None
            )
    assert lines == []


def test_attention_must_be_over_pages(paged):
    """A call for each sequence cannot be captured for all."""
    graphs, line = chosen(paged(), attention=TorchAttention())
    assert (graphs, line["reason"]) == (None, "attention does not use pages")
    assert line["log_level"] == "warning"


def test_models_with_states_are_not_replayed(paged):
    """Their states are at changing addresses, not in a graph."""
    graphs, line = chosen(paged("lfm2"))
    assert (graphs, line["reason"]) == (None, "the model has states")


def remembering():
    """A kernel that copies the lengths of a step at its first call."""
    seen = {}

    def attend(query, keys, values, step, call):
        if step.tiles(1) is None:
            step.lengths = seen.setdefault(step, step.lengths.clone())
        return attend_pages(query, keys, values, step, call)

    return attend


def asking(query, keys, values, step, call):
    """A kernel that reads lengths, to skip unnecessary work."""
    step.most_length = int(step.lengths.max())
    return attend_pages(query, keys, values, step, call)


def dropping(query, keys, values, step, call):
    """A kernel that reads freed memory."""
    if step.tiles(1) is None:
        with _disable_current_modes():
            scale = torch.ones(1)
        query = query * scale
    return attend_pages(query, keys, values, step, call)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (remembering(), "differ from computed ones by"),
        (asking, "CaptureError: operation not permitted when stream is capturing"),
        (dropping, "CaptureError: replayed over memory that is gone"),
    ],
    ids=["remembering", "asking", "dropping"],
)
def test_steps_that_cannot_be_replayed_are_computed(paged, kernel, reason):
    """They use stale numbers, wait for the device, or lose their memory."""
    graphs, line = chosen(paged(kernel=kernel))
    assert graphs is None
    assert reason in line["reason"]
    assert line["graphs"] == 0


def test_a_device_that_refuses_is_one_line(paged):
    """Whatever its driver's message is."""

    def refusing(_run):
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    graphs, line = chosen(paged(), refusing)
    assert (graphs, line["reason"]) == (None, "RuntimeError: CUDA error: out of memory")


def test_a_step_that_writes_nothing_is_detected(paged):
    """Its logits alone may be right: the token attends to itself."""

    class Forgetful(RecordedGraphs):
        def __call__(self, run):
            replay = super().__call__(run)
            _, in_ring = steps.everything()

            def forgetting():
                before = [layer.clone() for layer in in_ring]
                replay()
                for layer, old in zip(in_ring, before, strict=True):
                    layer.copy_(old)

            return forgetting

    steps = paged()
    graphs, line = chosen(steps, Forgetful())
    assert graphs is None
    assert "differ from computed ones by 1.0e+00" in line["reason"]


@pytest.mark.parametrize(("num_pages", "is_proven"), [(3, False), (4, True)])
def test_a_proof_needs_pages(paged, num_pages, is_proven):
    """One for each history, and one for each sequence."""
    graphs, line = chosen(paged(num_pages=num_pages))
    assert (graphs is not None) == is_proven
    assert is_proven or line["reason"] == "ValueError: there are too few pages to prove them"
