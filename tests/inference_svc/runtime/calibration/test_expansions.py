"""The expansion of latents is found by running the model, or the model is refused."""

import types

import pytest
import torch
from torch import nn

from inference_svc.runtime.calibration.expansions import find_expansions
from inference_svc.runtime.calibration.mode_probe import probe_mode
from inference_svc.runtime.calibration.rope_tables import freeze_rotary
from inference_svc.runtime.calibration.stock import use_attention
from inference_svc.runtime.model import capture
from inference_svc.runtime.model.model_loader import describe_model
from inference_svc.runtime.model.refusals import ModelModeMissingError


@pytest.fixture
def found(build):
    """Return a function that finds the expansions of a modified model."""

    def find(name, change=lambda _model: None, mode="latent", dtype=torch.float32):
        model = build(name).to(dtype)
        change(model)
        loaded = describe_model(model, tokenizer=None, name=name, fingerprint="0" * 32)
        freeze_rotary(loaded)
        capture.install(model)
        probe = probe_mode(loaded, mode, capture.ATTENTION_NAME)
        use_attention(model, capture.ATTENTION_NAME)
        return model, find_expansions(loaded, mode, probe)

    return find


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "mode"), [("deepseek-v3", "latent"), ("deepseek-v32", "indexed")])
def test_it_equals_the_models_own_matrix(found, name, mode, dtype):
    """To the bit, in each layer: products with zeros and ones are exact."""
    model, expansions = found(name, mode=mode, dtype=dtype)
    layers = model.model.layers
    assert len(expansions) == len(layers)
    for layer, expansion in zip(layers, expansions, strict=True):
        heads, free_dim, latent_dim = expansion.keys.shape
        weights = layer.self_attn.kv_b_proj.weight.view(heads, -1, latent_dim)
        assert torch.equal(expansion.keys, weights[:, :free_dim])
        assert torch.equal(expansion.values, weights[:, free_dim:].transpose(1, 2))
        assert (expansion.rotated_dim, expansion.is_rotated_first) == (8, False)


def change_expansion(change):
    """Return a modification of a model: each layer expands differently."""

    def apply(model):
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.expand_kv = types.MethodType(change(attention.expand_kv), attention)

    return apply


def rotated_first(expand):
    """Put the rotated part, 8 wide, first in keys and queries."""

    def expanded(_self, latent, rotated):
        keys, values = expand(latent, rotated)
        return torch.cat((keys[..., -8:], keys[..., :-8]), dim=-1), values

    return expanded


def bent(expand):
    """Apply a nonlinear function to latents."""
    return lambda _self, latent, rotated: expand(latent.tanh(), rotated)


def placed(expand):
    """Make the expansion depend on the position."""

    def expanded(_self, latent, rotated):
        keys, values = expand(latent, rotated)
        return keys, values * torch.arange(1, 1 + values.shape[2])[:, None]

    return expanded


def scaled(expand):
    """Scale the rotated part of keys."""
    return lambda _self, latent, rotated: expand(latent, 2 * rotated)


def mixed(expand):
    """Mix the rotated part into values."""

    def expanded(_self, latent, rotated):
        keys, values = expand(latent, rotated)
        return keys, values + rotated

    return expanded


def shortened(expand):
    """Attend to fewer tokens than are cached."""
    return lambda _self, latent, rotated: expand(latent[:, :, 1:], rotated[:, :, 1:])


def test_the_rotated_part_may_come_first(found):
    """The place of the rotated part is found, too."""
    _, expansions = found("deepseek-v3", change_expansion(rotated_first))
    assert [expansion.is_rotated_first for expansion in expansions] == [True, True]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (bent, "more than a matrix is involved"),
        (placed, "more than a matrix is involved"),
        (scaled, "rotated parts are involved, too"),
        (mixed, "rotated parts are involved, too"),
        (shortened, "they belong to other tokens or to fewer heads"),
    ],
)
def test_other_expansions_are_refused(found, change, reason):
    """Each with its reason, which is shown at the start."""
    with pytest.raises(ModelModeMissingError, match=reason):
        found("deepseek-v3", change_expansion(change))


def test_a_bias_is_refused(found):
    """The expansion of zero must be zero."""

    def change(model):
        for layer in model.model.layers:
            linear = layer.self_attn.kv_b_proj
            linear.bias = nn.Parameter(torch.ones(linear.out_features), requires_grad=False)

    with pytest.raises(ModelModeMissingError, match="more than a matrix is involved"):
        found("deepseek-v3", change)


def test_keys_of_heads_are_no_latents(found):
    """A model that transforms its cached rows otherwise is gathered, as before."""
    with pytest.raises(ModelModeMissingError, match="caches keys of each head"):
        found("diffllama")
