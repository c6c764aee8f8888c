"""How attention is chosen: what is named is proven or refused, "auto" falls back."""

from dataclasses import replace

import pytest
import torch

from inference_svc.runtime.attention.paged_attention import PagedAttention
from inference_svc.runtime.attention.torch_attention import TorchAttention
from inference_svc.runtime.calibration import attention_choice
from inference_svc.runtime.calibration.attention_choice import choose_attention
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.model.model_loader import describe_model
from shared.types.errors import ConfigError
from tests.split_attention import attend_pages
from tests.zoo.architectures import architectures
from tests.zoo.models import build_model

PAGE_TOKENS = 16


@pytest.fixture(scope="module")
def llama():
    """A tiny Llama and its calibration."""
    loaded = built("llama")
    return loaded, calibrate(loaded)


def built(name):
    """A tiny model, as it is loaded."""
    model = build_model(architectures()[name])
    return describe_model(model, tokenizer=None, name=name, fingerprint="0" * 32)


def wrong(*args):
    """Attend, and be a hundredth off."""
    return attend_pages(*args) * 1.01


def failing(*_):
    """Fail as a compiler does."""
    raise RuntimeError("no such instruction\nin line 7")


def test_the_portable_one_needs_no_proof(llama):
    """By name; and on a CPU, whether or not Triton's interpreter is there."""
    for name, page_tokens in (("torch", PAGE_TOKENS), ("auto", None), ("auto", PAGE_TOKENS)):
        assert isinstance(choose_attention(name, *llama, page_tokens), TorchAttention)


def test_a_cpu_has_no_kernels(llama, monkeypatch):
    """But by Triton's interpreter, which nobody wants by accident."""
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="cpu is no GPU"):
        choose_attention("triton", *llama, PAGE_TOKENS)


# tests/gpu has gpt_oss, and none with states.
FAMILIES = ["qwen3_next", "mamba", "gemma2", "llama", "gemma3_text", "phi3", "cohere2"]
FAMILIES += ["hunyuan_v1_dense"]


@pytest.mark.parametrize(
    "name", [FAMILIES[0], *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES[1:])]
)
def test_what_answers_as_torch_does_is_taken(name):
    """Windows, softcaps, sinks, layers of several shapes, states."""
    loaded = built(name)
    chosen = choose_attention("triton", loaded, calibrate(loaded), PAGE_TOKENS)
    assert isinstance(chosen, PagedAttention)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [(wrong, "off those of torch"), (failing, "no such instruction: set")],
)
def test_what_is_not_proven_does_not_serve(llama, monkeypatch, kernel, reason):
    """Named, it is an error in one line; else the portable one serves."""
    monkeypatch.setattr(attention_choice, "_paged", lambda: PagedAttention(kernel))
    with pytest.raises(ConfigError, match=reason) as caught:
        choose_attention("triton", *llama, PAGE_TOKENS)
    assert "\n" not in caught.value.message
    monkeypatch.setattr(attention_choice, "is_gpu", lambda _device: True)
    assert isinstance(choose_attention("auto", *llama, PAGE_TOKENS), TorchAttention)


def test_what_cannot_be_is_refused_with_the_reason(llama, monkeypatch):
    """KV on no pages, another mode, no Triton."""
    loaded, calibration = llama
    with pytest.raises(ConfigError, match=r"working_kv is contiguous"):
        choose_attention("triton", loaded, calibration, None)
    gathered = replace(calibration, mode="gather")
    with pytest.raises(ConfigError, match="mode gather"):
        choose_attention("triton", loaded, gathered, PAGE_TOKENS)
    monkeypatch.setattr(attention_choice.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="not installed"):
        choose_attention("triton", loaded, calibration, PAGE_TOKENS)


def test_logits_that_are_no_numbers_prove_nothing(llama, monkeypatch):
    """As a kernel returns that reads what nobody wrote."""

    def nothing(query, _keys, values, _step, _call):
        return torch.full((*query.shape[:2], values.shape[2]), float("nan"))

    monkeypatch.setattr(attention_choice, "_paged", lambda: PagedAttention(nothing))
    with pytest.raises(ConfigError, match="off those of torch"):
        choose_attention("triton", *llama, PAGE_TOKENS)
