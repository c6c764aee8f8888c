"""Decode steps that are replayed on the device equal computed ones to the bit, in any thread.

Without a device only `make test-long` runs this, with the kernel interpreted.
"""

import os
import threading

import pytest
import torch

from inference_svc.runtime.attention.paged_attention import PageCall, PageStep
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.calibration.graph_choice import choose_graphs
from inference_svc.runtime.compute.decode_graphs import StepShape
from inference_svc.runtime.cuda.graphs import capture_on
from inference_svc.runtime.cuda.page_attention import attend_pages
from inference_svc.runtime.model.model_loader import describe_model
from tests.paged_steps import PagedSteps, decode_each, kept_contents
from tests.recorded_graph import RecordedGraphs
from tests.zoo.architectures import architectures
from tests.zoo.models import build_model

IS_INTERPRETED = os.environ.get("GPU_TESTS_DEVICE", "cpu") == "cpu"
pytestmark = [pytest.mark.long] if IS_INTERPRETED else []
MODELS = ["llama", "gemma2", "gpt_oss"]
SHAPES = [StepShape(3, 48), StepShape(3, 24)]


@torch.library.custom_op("tests::attend_single_tokens", mutates_args=())
def attend_single_tokens(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    most_length: int,
    page_tokens: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    window: int,
    chunk: int,
) -> torch.Tensor:
    """Launch the kernel as a single call of torch, as a device sees it."""
    step = PageStep.of_single_tokens(
        tables, lengths, most_length=most_length, page_tokens=page_tokens
    )
    return attend_pages(query, keys, values, step, PageCall(scale, softcap, sinks, window, chunk))


def attend_in_one_call(query, keys, values, step, call):
    """Use the one-call form of the kernel where it is interpreted."""
    if step.tiles(1) is not None:
        return attend_pages(query, keys, values, step, call)
    sizes = step.most_length, step.page_tokens
    return attend_single_tokens(query, keys, values, step.tables, step.lengths, *sizes, *call)


@pytest.fixture
def capture(device):
    """Return the device's capture, or its stand-in."""
    return capture_on(device) or RecordedGraphs()


@pytest.fixture
def make(device):
    """Return a function that puts a model on pages."""
    kernel = attend_in_one_call if device.type == "cpu" else attend_pages

    def make_by_name(name, dtype, **options):
        model = build_model(architectures()[name]).to(device, dtype)
        loaded = describe_model(model, tokenizer=None, name=name, fingerprint="0" * 32)
        return PagedSteps(loaded, calibrate(loaded), kernel, **options)

    return make_by_name


def test_a_replayed_step_equals_the_computed_one(dtypes, make, capture):
    """Logits, working KV and write buffers are equal; another thread replays than captured."""
    steps = make("llama", dtypes[-1])
    replaying = steps.replaying(capture, SHAPES)
    ours, theirs = (
        [steps.sequence(list(range(11, 11 + size)), 40) for size in (22, 5, 11)] for _ in range(2)
    )
    answers = []

    def replay():
        answers.extend(decode_each(replaying, ours, [60 + n, 70 + n, 80 + n]) for n in range(4))

    thread = threading.Thread(target=replay)
    thread.start()
    thread.join()
    for n, logits in enumerate(answers):
        assert torch.equal(logits, decode_each(steps.runner, theirs, [60 + n, 70 + n, 80 + n])), n
    assert (len(answers), replaying.num_replayed) == (4, 4)
    for one, other in zip(kept_contents(ours), kept_contents(theirs), strict=True):
        assert torch.equal(one, other)
    assert capture.num_bytes > 0


@pytest.mark.parametrize("name", MODELS[:1] if IS_INTERPRETED else MODELS)
def test_calibration_accepts_models_with_graphs(dtypes, make, capture, name):
    """The check is the one that the service makes at start."""
    steps = make(name, dtypes[-1])
    graphs = choose_graphs("auto", capture, *steps.model, steps.attention, steps.memory(2, 24))
    assert graphs is not None
