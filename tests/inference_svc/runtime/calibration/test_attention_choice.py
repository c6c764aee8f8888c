"""The choice of attention: a named one is proven or refused, "auto" falls back."""

from dataclasses import replace

import pytest
import torch

from inference_svc.runtime.attention.attention import TorchAttention
from inference_svc.runtime.attention.paged_attention import PagedAttention
from inference_svc.runtime.calibration import attention_choice, kernels
from inference_svc.runtime.calibration.attention_choice import choose_attention
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.cpu.cpu_attention import CpuAttention
from inference_svc.runtime.kv.layer_groups import LayerGroups
from inference_svc.runtime.model.model_loader import describe_model
from shared.types.errors import ConfigError
from tests.held_windows import OnPages
from tests.split_attention import attend_pages
from tests.zoo.architectures import architectures
from tests.zoo.models import build_model


@pytest.fixture(scope="module")
def llama():
    """A tiny Llama and its calibration."""
    loaded = load_tiny_model("llama")
    return loaded, calibrate(loaded)


def load_tiny_model(name):
    """Load a tiny model."""
    model = build_model(architectures()[name])
    return describe_model(model, tokenizer=None, name=name, fingerprint="0" * 32)


def groups_of(calibration):
    """Return pages of 16 tokens of all layers."""
    return LayerGroups.plain([layer.shape for layer in calibration.layers], 16)


def wrong(*args):
    """Attend, and be a hundredth off."""
    return attend_pages(*args) * 1.01


def failing(*_):
    """Fail as a compiler does."""
    raise RuntimeError("no such instruction\nin line 7")


def test_the_portable_one_needs_no_proof(llama):
    """By name, whether or not there are kernels."""
    for on_pages in (None, groups_of(llama[1])):
        assert isinstance(choose_attention("torch", *llama, on_pages), TorchAttention)


def test_a_cpu_takes_its_own_kernel(llama):
    """Over contiguous KV and over pages, if it is proven; Triton's interpreter is not taken."""
    for on_pages in (None, groups_of(llama[1])):
        assert isinstance(choose_attention("auto", *llama, on_pages), CpuAttention)


def test_a_kernel_for_cpus_that_cannot_serve_is_not_taken(llama, monkeypatch):
    """Named, the reason is an error in one line; else torch serves."""
    loaded, calibration = llama
    refused = {
        "mode gather": (loaded, replace(calibration, mode="gather")),
        "does not take float16": (replace(loaded, dtype=torch.float16), calibration),
        "device meta is not a CPU": (replace(loaded, device=torch.device("meta")), calibration),
    }
    for reason, model in refused.items():
        with pytest.raises(ConfigError, match=reason):
            choose_attention("cpp", *model, None)
        assert isinstance(choose_attention("auto", *model, None), TorchAttention)
    monkeypatch.setattr(attention_choice, "why_wrong", lambda *_: "the kernel is 3 off")
    with pytest.raises(ConfigError, match="cpp cannot be used: the kernel is 3 off"):
        choose_attention("cpp", *llama, None)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(ConfigError, match="/nowhere/c"):
        choose_attention("cpp", *llama, None)
    assert isinstance(choose_attention("auto", *llama, None), TorchAttention)


def test_a_cpu_has_no_kernels(llama, monkeypatch):
    """Except with Triton's interpreter, which must not be used by accident."""
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="cpu is not a GPU"):
        choose_attention("triton", *llama, groups_of(llama[1]))


# tests/gpu has gpt_oss, and none with states.
FAMILIES = ["qwen3_next", "mamba", "gemma2", "llama", "gemma3_text", "phi3", "cohere2"]
FAMILIES += ["hunyuan_v1_dense"]


@pytest.mark.parametrize(
    "name", [FAMILIES[0], *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES[1:])]
)
def test_a_kernel_with_torchs_results_is_used(name):
    """Windows, softcaps, sinks, layers of several shapes, states."""
    loaded = load_tiny_model(name)
    calibration = calibrate(loaded)
    chosen = choose_attention("triton", loaded, calibration, groups_of(calibration))
    assert isinstance(chosen, PagedAttention)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [(wrong, "differ from those of torch by"), (failing, "no such instruction: set")],
)
def test_an_unproven_kernel_is_not_used(llama, monkeypatch, kernel, reason):
    """If it was named it is an error in one line; else the portable one is used."""
    monkeypatch.setattr(attention_choice, "_paged_attention", lambda: PagedAttention(kernel))
    with pytest.raises(ConfigError, match=reason) as caught:
        choose_attention("triton", *llama, groups_of(llama[1]))
    assert "\n" not in caught.value.message
    monkeypatch.setattr(attention_choice, "is_gpu", lambda _device: True)
    assert isinstance(choose_attention("auto", *llama, groups_of(llama[1])), TorchAttention)


@pytest.mark.parametrize("page_tokens", [2, 4, 16])
def test_it_is_proven_on_the_later_pages(tiny, monkeypatch, page_tokens):
    """Of groups of layers, some of which have fewer tokens per page; none has 16 of them."""
    model = tiny("gemma4-wide", has_windows=True)

    def wrong_on_some(query, keys, values, step, call):
        attended = attend_pages(query, keys, values, step, call)  # a norm takes its scale
        return attended.roll(1, 1) if step.page_tokens == page_tokens else attended

    monkeypatch.setattr(attention_choice, "_paged_attention", lambda: PagedAttention(wrong_on_some))
    given = model.loaded, model.calibration, OnPages(model).groups
    if page_tokens == 16:
        assert isinstance(choose_attention("triton", *given), PagedAttention)
        return
    with pytest.raises(ConfigError, match="differ from those of torch by"):
        choose_attention("triton", *given)


def test_impossible_choices_are_refused_with_the_reason(llama, monkeypatch):
    """KV without pages, another mode, no Triton."""
    loaded, calibration = llama
    with pytest.raises(ConfigError, match=r"working_kv is contiguous"):
        choose_attention("triton", loaded, calibration, None)
    gathered = replace(calibration, mode="gather")
    with pytest.raises(ConfigError, match="mode gather"):
        choose_attention("triton", loaded, gathered, groups_of(gathered))
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="not installed"):
        choose_attention("triton", loaded, calibration, groups_of(calibration))


def test_nan_logits_prove_nothing(llama, monkeypatch):
    """A kernel that reads unwritten memory returns them."""

    def nothing(query, _keys, values, _step, _call):
        return torch.full((*query.shape[:2], values.shape[2]), float("nan"))

    monkeypatch.setattr(attention_choice, "_paged_attention", lambda: PagedAttention(nothing))
    with pytest.raises(ConfigError, match="differ from those of torch by"):
        choose_attention("triton", *llama, groups_of(llama[1]))
