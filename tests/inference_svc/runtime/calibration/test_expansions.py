"""What keys and values are made by is found without a look at weights, or the model is refused."""

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
    """Returns a function that finds the expansions of a model that was changed before."""

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
def test_it_is_the_model_s_own_matrix(found, name, mode, dtype):
    """To the bit, of each layer: products with zeros and ones are exact."""
    model, expansions = found(name, mode=mode, dtype=dtype)
    layers = model.model.layers
    assert len(expansions) == len(layers)
    for layer, expansion in zip(layers, expansions, strict=True):
        heads, free_dim, latent_dim = expansion.keys.shape
        weights = layer.self_attn.kv_b_proj.weight.view(heads, -1, latent_dim)
        assert torch.equal(expansion.keys, weights[:, :free_dim])
        assert torch.equal(expansion.values, weights[:, free_dim:].transpose(1, 2))
        assert (expansion.rotated_dim, expansion.is_rotated_first) == (8, False)


def changed_expansion(change):
    """Returns a change of a model: each layer's keys and values are made in another way."""

    def apply(model):
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.expand_kv = types.MethodType(change(attention.expand_kv), attention)

    return apply


def rotated_first(expand):
    """Keys and queries have their rotated part, 8 wide, before the rest."""

    def expanded(_self, latent, rotated):
        keys, values = expand(latent, rotated)
        return torch.cat((keys[..., -8:], keys[..., :-8]), dim=-1), values

    return expanded


def bent(expand):
    """Latents go through something that is not linear."""
    return lambda _self, latent, rotated: expand(latent.tanh(), rotated)


def placed(expand):
    """What is made of a latent depends on where it is."""

    def expanded(_self, latent, rotated):
        keys, values = expand(latent, rotated)
        return keys, values * torch.arange(1, 1 + values.shape[2])[:, None]

    return expanded


def scaled(expand):
    """Keys do not have the rotated part as it is cached."""
    return lambda _self, latent, rotated: expand(latent, 2 * rotated)


def mixed(expand):
    """Values have something of the rotated part."""

    def expanded(_self, latent, rotated):
        keys, values = expand(latent, rotated)
        return keys, values + rotated

    return expanded


def shortened(expand):
    """A layer attends to fewer tokens than it caches."""
    return lambda _self, latent, rotated: expand(latent[:, :, 1:], rotated[:, :, 1:])


def test_the_rotated_part_may_come_first(found):
    """Where a key has it is found, too."""
    _, expansions = found("deepseek-v3", changed_expansion(rotated_first))
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
def test_what_is_no_matrix_of_latents_is_refused(found, change, reason):
    """Each with its reason, which is shown at the start."""
    with pytest.raises(ModelModeMissingError, match=reason):
        found("deepseek-v3", changed_expansion(change))


def test_a_bias_is_more_than_a_matrix(found):
    """What is made of nothing would have to be nothing."""

    def change(model):
        for layer in model.model.layers:
            linear = layer.self_attn.kv_b_proj
            linear.bias = nn.Parameter(torch.ones(linear.out_features), requires_grad=False)

    with pytest.raises(ModelModeMissingError, match="more than a matrix is involved"):
        found("deepseek-v3", change)


def test_keys_of_heads_are_no_latents(found):
    """A model that makes something else of what it caches is gathered, as ever."""
    with pytest.raises(ModelModeMissingError, match="caches keys of each head"):
        found("diffllama")
