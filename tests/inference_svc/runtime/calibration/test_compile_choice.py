"""The forward is compiled if that is requested: proven, or refused with the reason.

Graphs run operation by operation here; `make test-long` has torch's compiler make kernels of them.
"""

import shutil
from functools import partial

import pytest
from structlog.testing import capture_logs
from torch._subclasses.fake_tensor import FakeTensor

from inference_svc.runtime.calibration import compile_choice
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.calibration.compile_choice import STEPS, choose_compiling
from inference_svc.runtime.model.model_loader import describe_model
from shared.types.errors import ConfigError


@pytest.fixture
def made(build):
    """Return a function that makes a model of its own, whose first norm may do something else."""

    def make(name="llama", change=None):
        loaded = describe_model(build(name), tokenizer=None, name=name, fingerprint="0" * 32)
        calibration = calibrate(loaded)
        if change is not None:
            norm = loaded.model.model.layers[0].input_layernorm
            forward = norm.forward
            norm.forward = lambda states: change(forward(states))
        return loaded, calibration

    return make


def test_a_forward_that_gives_the_same_is_compiled(made):
    """Every step of the proof runs as a graph, and the log says how many there are."""
    with capture_logs() as lines:
        compiled = choose_compiling("step", *made(), "eager")
    assert compiled.num_run == len(STEPS)
    assert [line["graphs"] for line in lines if line["event"] == "forward_compiled"] == [2]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one of C++")
def test_kernels_are_proven(made):
    """As torch makes them for this CPU."""
    assert choose_compiling("step", *made()).num_run == len(STEPS)


def test_off_compiles_nothing(made):
    """And looks at nothing."""
    assert choose_compiling("off", *made("diffllama")) is None


def test_a_graph_that_gives_something_else_is_refused(made):
    """As of a model that does something else when it is traced."""
    model = made(change=lambda states: states if isinstance(states, FakeTensor) else -states)
    with pytest.raises(ConfigError, match=r"its logits differ from those before by"):
        choose_compiling("step", *model, "eager")


def test_a_graph_that_writes_something_else_is_refused(made):
    """Though its logits are right: those of turns that load what others wrote would not be."""
    loaded, calibration = made()
    attention = loaded.model.model.layers[1].self_attn
    for part, factor in ((attention.v_proj, 2.0), (attention.o_proj, 0.5)):
        part.forward = partial(traced_otherwise, part.forward, factor)
    with pytest.raises(ConfigError, match=r"its keys and values differ from those before by"):
        choose_compiling("step", loaded, calibration, "eager")


def traced_otherwise(forward, factor, states):
    return forward(states) * factor if isinstance(states, FakeTensor) else forward(states)


def test_a_forward_that_depends_on_contents_is_refused(made):
    """In one line."""
    model = made(change=lambda states: states if states.sum().item() < 1e30 else -states)
    with pytest.raises(ConfigError, match="the forward is not a graph: ") as caught:
        choose_compiling("step", *model, "eager")
    assert "\n" not in caught.value.message
    assert caught.value.remedy == "set it to off"


def test_what_cannot_be_is_refused_with_the_reason(made, monkeypatch):
    """Another mode; no C++ compiler."""
    with pytest.raises(ConfigError, match="mode gather"):
        choose_compiling("step", *made("diffllama"))
    monkeypatch.setattr(compile_choice.shutil, "which", lambda _name: None)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler") as caught:
        choose_compiling("step", *made())
    assert "install g++" in caught.value.remedy
