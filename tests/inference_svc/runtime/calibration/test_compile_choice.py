"""The forward is compiled if that is requested: proven, or refused with the reason.

What was compiled is remembered, and taken by later starts if nothing has changed.

Graphs run operation by operation here; `make test-long` has torch's compiler make kernels of them.
"""

import shutil
from functools import partial

import pytest
import torch
from structlog.testing import capture_logs
from torch._subclasses.fake_tensor import FakeTensor

from inference_svc.runtime.calibration import remembered_forwards
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.calibration.compile_choice import (
    REMEMBERED_STEPS,
    STEPS,
    choose_compiling,
)
from inference_svc.runtime.compute import piece_compiler
from inference_svc.runtime.compute.piece_compiler import INDUCTOR
from inference_svc.runtime.cpu import product_kernel
from inference_svc.runtime.model.model_loader import describe_model
from shared.types.errors import ConfigError
from tests.inference_svc.runtime.eager_pieces import EAGER, EagerPieces
from tests.sampled import sampled_cases


@pytest.fixture
def made(build):
    """Return a function that makes a model of its own, whose first norm may do something else."""

    def make(name="llama", change=None, packing="off"):
        # Of one layer, which is traced in half the time of two.
        model = build(name, num_hidden_layers=1)
        loaded = describe_model(model, tokenizer=None, name=name, fingerprint="0" * 32)
        calibration = calibrate(loaded, packing=packing)
        if change is not None:
            norm = loaded.model.model.layers[0].input_layernorm
            forward = norm.forward
            norm.forward = lambda states: change(forward(states))
        return loaded, calibration

    return make


@pytest.fixture
def choose(tmp_path):
    """Return `choose_compiling` with a file of this test, and pieces that need no kernels."""

    def choose(name, loaded, calibration, compiler=EAGER):
        return choose_compiling(name, loaded, calibration, tmp_path / "forwards.json", compiler)

    return choose


def test_a_forward_that_gives_the_same_is_compiled(made, choose):
    """Every step of the proof runs as a graph, and the log says how many there are."""
    with capture_logs() as lines:
        compiled = choose("step", *made())
    assert compiled.num_run == len(STEPS)
    assert [line["graphs"] for line in lines if line["event"] == "forward_compiled"] == [2]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one of C++")
def test_kernels_are_proven(made, choose):
    """As torch makes them for this CPU."""
    assert choose("step", *made(), INDUCTOR).num_run == len(STEPS)
    assert choose("auto", *made(), INDUCTOR).num_run == len(REMEMBERED_STEPS)


def test_kernels_that_were_removed_are_not_made_by_auto(monkeypatch, tmp_path):
    """Which takes a minute, and turns would wait for it."""
    monkeypatch.setenv(piece_compiler.KERNEL_CACHE, str(tmp_path / "removed"))
    with pytest.raises(FileNotFoundError, match=r"kernels in .*removed were removed"):
        INDUCTOR.from_bytes(b"")


def test_off_compiles_nothing(made, choose):
    """And looks at nothing."""
    assert choose("off", *made("diffllama")) is None


def test_a_graph_that_gives_something_else_is_refused(made, choose):
    """As of a model that does something else when it is traced."""
    model = made(change=lambda states: states if isinstance(states, FakeTensor) else -states)
    with pytest.raises(ConfigError, match=r"its logits differ from those before by"):
        choose("step", *model)


def test_a_graph_that_writes_something_else_is_refused(made, choose):
    """Though its logits are right: those of turns that load what others wrote would not be."""
    loaded, calibration = made()
    attention = loaded.model.model.layers[0].self_attn
    for part, factor in ((attention.v_proj, 2.0), (attention.o_proj, 0.5)):
        part.forward = partial(traced_otherwise, part.forward, factor)
    with pytest.raises(ConfigError, match=r"its keys and values differ from those before by"):
        choose("step", loaded, calibration)


def traced_otherwise(forward, factor, states):
    return forward(states) * factor if isinstance(states, FakeTensor) else forward(states)


def test_a_forward_that_depends_on_contents_is_refused(made, choose):
    """In one line."""
    model = made(change=lambda states: states if states.sum().item() < 1e30 else -states)
    with pytest.raises(ConfigError, match="the forward is not a graph: ") as caught:
        choose("step", *model)
    assert "\n" not in caught.value.message
    assert caught.value.remedy == "set it to off"


def test_what_cannot_be_is_refused_with_the_reason(made, choose, monkeypatch):
    """Another mode; no C++ compiler."""
    with pytest.raises(ConfigError, match="mode gather"):
        choose("step", *made("diffllama"))
    monkeypatch.setattr(piece_compiler.shutil, "which", lambda _name: None)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler") as caught:
        choose("step", *made(), INDUCTOR)
    assert "install g++" in caught.value.remedy


class NoPieces(EagerPieces):
    """Compiles nothing, but has the pieces of EAGER."""

    def compile(self, _piece, _inputs):
        raise AssertionError("a remembered forward was compiled again")

    def from_bytes(self, kept):
        return EAGER.from_bytes(kept)


@pytest.mark.parametrize(
    ("family", "packing"),
    sampled_cases(["llama", "qwen2", "gemma2"], ["off", "cpp", "torch"], count=3, seed=1),
)
def test_a_later_start_takes_what_was_compiled(made, choose, monkeypatch, family, packing):
    """Whether it asks for it or not; with its own weights, some of them joined, with biases."""
    monkeypatch.setattr(product_kernel, "MIN_WEIGHTS", 1)
    first = choose("step", *made(family, packing=packing))
    for name in ("step", "auto"):
        with capture_logs() as lines:
            compiled = choose(name, *made(family, packing=packing), NoPieces())
        assert compiled.num_run == len(REMEMBERED_STEPS)
        assert len(compiled.joined) == len({id(one.joined) for one in first.joined})
        assert [line["was_proven"] for line in lines if line["event"] == "forward_compiled"]


def test_joined_weights_are_remembered(made, choose, monkeypatch):
    """So that a later start joins the same ones."""
    monkeypatch.setattr(product_kernel, "MIN_WEIGHTS", 1)
    choose("step", *made("qwen2", packing="cpp"))
    compiled = choose("auto", *made("qwen2", packing="cpp"), NoPieces())
    assert {one.joined.dim() for one in compiled.joined} == {1, 4}  # biases and packed weights


@pytest.mark.parametrize(
    ("family", "reason"), [("llama", "model.compile = step"), ("diffllama", "mode gather")]
)
def test_auto_compiles_nothing(made, choose, family, reason):
    """The log says how to have it compiled, or why it cannot be."""
    with capture_logs() as lines:
        assert choose("auto", *made(family), NoPieces()) is None
    (line,) = [line for line in lines if line["event"] == "forward_not_compiled"]
    assert reason in line["reason"]


def test_another_model_or_machine_is_compiled_anew(made, choose, monkeypatch):
    """Another packing, too: products would be other operators."""
    monkeypatch.setattr(product_kernel, "MIN_WEIGHTS", 1)
    choose("step", *made(packing="cpp"))
    assert choose("auto", *made("qwen3", packing="cpp")) is None
    assert choose("auto", *made()) is None
    monkeypatch.setattr(remembered_forwards, "processor_features", lambda: ["another"])
    assert choose("auto", *made(packing="cpp")) is None


def test_a_remembered_forward_that_gives_something_else_is_not_taken(made, choose, monkeypatch):
    """A start that asks for it compiles anew; others run operation by operation, and say why."""
    choose("step", *made())
    monkeypatch.setattr(EagerPieces, "from_bytes", lambda *_: lambda *values: [-v for v in values])
    for name, num_run in (("auto", None), ("step", len(STEPS))):
        with capture_logs() as lines:
            compiled = choose(name, *made())
        assert (compiled and compiled.num_run) == num_run
        assert "remembered_forward_not_taken" in [line["event"] for line in lines]


def test_a_remembered_forward_that_cannot_be_loaded_is_not_taken(made, choose, monkeypatch):
    """Whatever the compiler raises, as another version of it would."""
    choose("step", *made())

    def refuse(*_):
        raise KeyError("kernels")

    monkeypatch.setattr(EagerPieces, "from_bytes", refuse)
    with capture_logs() as lines:
        assert choose("auto", *made()) is None
    assert "KeyError" in lines[0]["reason"]


def test_what_has_no_name_is_not_remembered(made, choose):
    """A tensor that a model makes by itself: it is compiled, and the log says why at each start."""
    own = torch.tensor(1.0)
    with capture_logs() as lines:
        assert choose("step", *made(change=lambda states: states * own)) is not None
    (line,) = [line for line in lines if line["event"] == "forward_not_remembered"]
    assert line["reason"].startswith("UnnamedError: a tensor of []")
    assert choose("auto", *made()) is None
