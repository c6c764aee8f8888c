"""Layers are compiled if that is asked for: proven, or refused with the reason.

The compiler sees the same for a backend that makes no kernels; `make test-long` has torch's own.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inference_svc.runtime.calibration import compile_choice
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.calibration.compile_choice import (
    choose_compiling,
    layers_of,
    undo_compiling,
    unexpected_breaks,
)
from inference_svc.runtime.model.model_loader import describe_model
from inference_svc.runtime.model.packed_linear import PackedLinear
from shared.types.errors import ConfigError


@pytest.fixture
def made(build):
    """Return a function that gives a model of its own, which is left as it was."""
    models = []

    def make(name):
        loaded = describe_model(build(name), tokenizer=None, name=name, fingerprint="0" * 32)
        models.append(loaded.model)
        return loaded, calibrate(loaded)

    yield make
    for model in models:
        undo_compiling(model)
    torch._dynamo.reset()


def is_compiled(loaded):
    return [layer._compiled_call_impl is not None for layer in layers_of(loaded.model)]


@pytest.mark.parametrize(
    "name",
    [
        "opt",  # whose layers take least to look through
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("llama", "gemma2", "gpt-neox", "qwen3-next")
        ),
    ],
)
def test_layers_are_compiled_between_our_hooks(made, name, monkeypatch):
    """No graph ends but there, answers are the same, and nothing is compiled while it serves."""
    loaded, calibration = made(name)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(choose_compiling, "layers", loaded, calibration, "eager").result()
        assert is_compiled(loaded) == [True, True]
        assert unexpected_breaks() == []
        num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert num_graphs > 0
        made("llama")  # which installs the hooks again
        monkeypatch.setattr(compile_choice, "STEPS", ((11, 4), (1, 1), (0, 1), (1, 0), (6, 1)))
        before = thread.submit(compile_choice._logits, loaded, calibration).result()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs
    undo_compiling(loaded.model)
    assert is_compiled(loaded) == [False, False]
    assert torch.allclose(before, compile_choice._logits(loaded, calibration), atol=1e-5)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one of C++")
def test_kernels_answer_as_before(made):
    """As torch makes them for this CPU."""
    choose_compiling("layers", *made("llama"))


def test_off_compiles_nothing(made):
    """And looks at nothing."""
    loaded, calibration = made("llama")
    choose_compiling("off", loaded, calibration)
    assert is_compiled(loaded) == [False, False]


def test_what_answers_otherwise_is_refused(made, monkeypatch):
    """And undone."""
    loaded, calibration = made("llama")
    logits = iter([torch.zeros(3, 5), torch.ones(3, 5)])
    monkeypatch.setattr(compile_choice, "_logits", lambda *_: next(logits))
    with pytest.raises(ConfigError, match="differ from those before by"):
        choose_compiling("layers", loaded, calibration, "eager")
    assert is_compiled(loaded) == [False, False]


@pytest.mark.long
def test_a_layer_that_the_compiler_cannot_see_through_is_refused(made, monkeypatch):
    """As one that prints, or asks for numbers."""
    monkeypatch.setattr(compile_choice, "STEPS", ((3, 0),))
    loaded, calibration = made("llama")
    norm = layers_of(loaded.model)[0].input_layernorm
    forward = norm.forward
    norm.forward = lambda states: forward(states) if states.sum().item() < 1e30 else states
    with pytest.raises(ConfigError, match="cannot trace a layer") as caught:
        choose_compiling("layers", loaded, calibration, "eager")
    assert "\n" not in caught.value.message
    assert is_compiled(loaded) == [False, False]


def test_what_cannot_be_is_refused_with_the_reason(made, monkeypatch):
    """Another mode, packed weights, no C++ compiler."""
    gathered = made("diffllama")
    with pytest.raises(ConfigError, match="mode gather"):
        choose_compiling("layers", *gathered)
    loaded, calibration = made("llama")
    monkeypatch.setattr(compile_choice.shutil, "which", lambda _name: None)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler") as caught:
        choose_compiling("layers", loaded, calibration)
    assert "install g++" in caught.value.remedy
    layer = layers_of(loaded.model)[0]
    layer.mlp.up_proj = PackedLinear(layer.mlp.up_proj)
    with pytest.raises(ConfigError, match="weights are packed"):
        choose_compiling("layers", loaded, calibration)
