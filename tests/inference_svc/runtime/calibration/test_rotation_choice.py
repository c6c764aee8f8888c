"""The choice of key embedding: a named one is proven or refused, "auto" falls back."""

from copy import copy
from dataclasses import replace

import pytest
import torch

from inference_svc.runtime.calibration import kernels, rotation_choice
from inference_svc.runtime.calibration.rotation_choice import CPU_WINDOW, choose_rotation
from inference_svc.runtime.cpu.native_library import KERNEL_DIR
from inference_svc.runtime.cpu.token_kernel import TokenKernel
from inference_svc.runtime.cuda.key_rotation import embed_on_device
from inference_svc.runtime.positions.recipes import ComponentRecipe
from inference_svc.runtime.positions.rotation import BY_TORCH, LoadKernels
from shared.types.errors import ConfigError


@pytest.fixture(scope="module")
def llama(tiny):
    """A tiny Llama and its calibration."""
    model = tiny("llama")
    return model.loaded, model.calibration


def nearly(keys, tables, region, slots):
    """Embed with one wrong bit."""
    embed_on_device(keys, tables, region, slots)
    number = region[slots[0], -1, -1]
    number.copy_(torch.nextafter(number, torch.tensor(9.0)))


def beside(keys, tables, region, slots):
    """Embed, and write to one slot too many."""
    embed_on_device(keys, tables, region, slots)
    region[1] = 1.0


def failing(*_):
    """Fail as a compiler does."""
    raise RuntimeError("no such instruction\nin line 7")


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-yarn",
        "gpt-neox",
        "glm",
        "cohere",
        "gemma3",
        "smollm3",
        "deepseek-v3",
        "deepseek-v32",
        "gptj",
    ],
)
def test_models_are_proven_with_the_kernel(tiny, name):
    """Halves, scaled, partial, interleaved, two tables, layers without one, latents, indexes."""
    model = tiny(name)
    chosen = choose_rotation("triton", model.loaded, model.calibration)
    assert chosen == LoadKernels(embed=embed_on_device)
    for asked in ("cpp", "auto"):
        assert isinstance(choose_rotation(asked, model.loaded, model.calibration).load, TokenKernel)


def test_a_named_kernel_is_the_only_one(llama, monkeypatch):
    """Without one, torch needs no proof; a CPU uses no interpreter of its own accord."""
    monkeypatch.setattr(rotation_choice, "_embed_kernel", lambda: failing)
    assert choose_rotation("auto", *llama).embed is None
    monkeypatch.setattr(rotation_choice, "_load_kernel", lambda: failing)
    assert choose_rotation("torch", *llama) == BY_TORCH


def test_keys_without_positions_are_loaded_by_the_kernel_of_a_cpu(tiny):
    """It copies, too."""
    for model in (tiny("hunyuan"), tiny("llama", positions="coupled"), tiny("opt")):
        assert choose_rotation("auto", model.loaded, model.calibration).load is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_that_the_kernel_of_a_cpu_does_not_take_are_left_to_torch(tiny, dtype):
    """It rotates float32 and bfloat16."""
    model = tiny("llama", dtype)
    chosen = choose_rotation("auto", model.loaded, model.calibration)
    assert (chosen.load is not None) == (dtype == torch.bfloat16)


def spoilt(spoil):
    """Return the kernel of a CPU with results that `spoil` changes."""
    kernel = TokenKernel.load()

    def load(copies):
        kernel(copies)
        spoil(copies[0].room)

    return load


def one_bit_off(room):
    number = room.layer[room.slots[-1], -1, -1]
    number.copy_(torch.nextafter(number, torch.tensor(9.0)))


def one_token_too_many(room):
    room.layer[1] = 1.0


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (one_bit_off, "differ from those of torch"),
        (one_token_too_many, "differ from those of torch"),
        (failing, "no such instruction"),
    ],
)
def test_an_unproven_kernel_of_a_cpu_is_not_used(llama, monkeypatch, spoil, reason):
    """If it was named it is an error; else torch is used, and the log says why."""
    monkeypatch.setattr(rotation_choice, "_load_kernel", lambda: spoilt(spoil))
    with pytest.raises(ConfigError, match=f"model.rotation = cpp .*{reason}"):
        choose_rotation("cpp", *llama)
    told = []
    monkeypatch.setattr(rotation_choice.log, "info", lambda event, **facts: told.append(facts))
    assert choose_rotation("auto", *llama) == BY_TORCH
    assert [facts["rotation"] for facts in told] == ["torch"]
    assert reason in told[0]["reason"]


def test_a_long_window_takes_no_memory_at_the_start_of_a_cpu(llama):
    """Tables are computed up to its end only when there are such histories."""
    loaded, calibration = llama
    lengths = []

    def rope(keys, positions):
        lengths.append(len(positions))
        return calibration.layers[0].key.rotary._rope(keys, positions)

    rotary = copy(calibration.layers[0].key.rotary)
    rotary._rope, rotary._tables, rotary._max_tokens = rope, None, 1 << 20
    layer = replace(calibration.layers[0], key=ComponentRecipe(rotary=rotary))
    long = replace(loaded, context_window=1 << 20)
    found = choose_rotation("cpp", long, replace(calibration, layers=(layer,)))
    assert found.load is not None
    assert max(lengths) == CPU_WINDOW


def test_without_a_compiler_torch_loads(llama, monkeypatch, tmp_path):
    """A named kernel is refused with the reason."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(KERNEL_DIR, str(tmp_path))
    assert choose_rotation("auto", *llama) == BY_TORCH
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        choose_rotation("cpp", *llama)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (nearly, "differ from those of torch"),
        (beside, "differ from those of torch"),
        (failing, "no such instruction"),
    ],
)
def test_an_unproven_kernel_is_not_used(llama, monkeypatch, kernel, reason):
    """If it was named it is an error in one line; else torch is used."""
    monkeypatch.setattr(rotation_choice, "_embed_kernel", lambda: kernel)
    with pytest.raises(ConfigError, match=reason) as caught:
        choose_rotation("triton", *llama)
    assert "\n" not in caught.value.message
    monkeypatch.setattr(rotation_choice, "is_gpu", lambda _device: True)
    assert choose_rotation("auto", *llama) == BY_TORCH


def test_both_ends_of_the_window_are_proven(llama, monkeypatch):
    """A kernel that is wrong only at late positions is refused."""
    wrong_from = llama[0].context_window - 1

    def late(keys, tables, region, slots):
        embed_on_device(keys, tables, region, slots)
        last = llama[1].layers[0].key.rotary.tables(wrong_from, 1)
        if torch.equal(tables.cosines[-1:], last.cosines):
            region[slots[-1]] += 1.0

    monkeypatch.setattr(rotation_choice, "_embed_kernel", lambda: late)
    with pytest.raises(ConfigError, match="differ from those of torch"):
        choose_rotation("triton", *llama)


def test_impossible_choices_are_refused_with_the_reason(llama, tiny, monkeypatch):
    """Keys behind a norm, keys without position, a CPU, no Triton."""
    loaded, calibration = llama
    normed = tiny("hunyuan")
    with pytest.raises(ConfigError, match="the model has no keys"):
        choose_rotation("triton", normed.loaded, normed.calibration)
    coupled = tiny("llama", positions="coupled")
    with pytest.raises(ConfigError, match="the model has no keys"):
        choose_rotation("triton", coupled.loaded, coupled.calibration)
    with monkeypatch.context() as changed:
        changed.delenv("TRITON_INTERPRET")
        with pytest.raises(ConfigError, match="cpu is not a GPU"):
            choose_rotation("triton", loaded, calibration)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="not installed"):
        choose_rotation("triton", loaded, calibration)


def test_a_model_without_positions_causes_no_warning(tiny, monkeypatch):
    """Its keys need no embedding, on a GPU."""
    monkeypatch.setattr(rotation_choice, "is_gpu", lambda _device: True)
    monkeypatch.setattr(rotation_choice, "_embed_kernel", lambda: failing)
    warned = []
    monkeypatch.setattr(rotation_choice.log, "warning", lambda *_, **told: warned.append(told))
    coupled = tiny("llama", positions="coupled")
    assert choose_rotation("auto", coupled.loaded, coupled.calibration) == BY_TORCH
    assert warned == []
    llama = tiny("llama")
    no_keys = replace(llama.calibration, layers=())
    assert choose_rotation("auto", llama.loaded, no_keys) == BY_TORCH
    assert warned == []
    assert choose_rotation("auto", llama.loaded, llama.calibration) == BY_TORCH
    assert len(warned) == 1
