"""Recipes embed cached rows exactly as the model itself does, for every kind of model."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from inference_svc.runtime.calibration.layer_recipes import (
    _check_recipe,
    before_rope,
    find_scale,
    layer_recipes,
)
from inference_svc.runtime.calibration.probe import Probe, run_probe
from inference_svc.runtime.calibration.rope_tables import freeze_rotary
from inference_svc.runtime.model import capture
from inference_svc.runtime.model.forward import forward_context
from inference_svc.runtime.model.model_loader import LoadedModel, describe_model
from inference_svc.runtime.model.refusals import ModelModeMissingError
from inference_svc.runtime.positions.recipes import ComponentRecipe, LayerRecipe
from tests.zoo.architectures import architectures
from tests.zoo.models import build_model

TOKENS = [5, 6, 7, 5, 9, 5, 11, 12, 13, 5, 15, 16, 5]
# name -> what each layer embeds: key, value, a norm after it, or nothing
KINDS = {
    "llama": ["k"] * 4,
    "gpt_neox": ["k"] * 4,  # partial
    "glm4": ["k"] * 4,  # interleaved
    "qwen3 (yarn)": ["k"] * 4,
    "llama (longrope)": ["k"] * 4,
    "gemma3_text": ["k"] * 4,  # two rotary embeddings
    "gemma3n_text": ["k"] * 2,  # an apply call per tensor; two layers cache nothing
    "gemma4_text": ["k"] * 2,
    "cohere2": ["k", "", "k", ""],  # every other layer without positions
    "deepseek_v2": ["v"] * 4,  # complex frequencies
    "deepseek_v3": ["v"] * 4,
    "deepseek_v3 (yarn)": ["v"] * 4,
    "minicpm3": ["v"] * 4,
    "hunyuan_v1_dense": ["kp"] * 4,  # a norm with weights follows
    "nanochat": ["kp"] * 4,
    "llama4_text": ["kp", "", "kp", ""],
    "falcon": ["k"] * 4,
    "gptj": ["k"] * 4,  # cosines from a buffer
    "codegen": ["k"] * 4,
    "gpt2": [""] * 4,
    "bloom": [""] * 4,
}


@dataclass(frozen=True)
class Found:
    """A model, a probe of it and its recipes."""

    loaded: LoadedModel
    probe: Probe
    recipes: tuple[LayerRecipe, ...]

    def cached_at(self, start: int) -> Any:
        """Return what layers cache of the same tokens at other positions."""
        positions = torch.arange(start, start + len(TOKENS))
        probe = Probe(self.loaded.context_window, self.loaded.device)
        options = {"position_ids": positions[None], "past_key_values": capture.CaptureCache()}
        with torch.inference_mode(), forward_context(probe):
            self.loaded.model(input_ids=torch.tensor([TOKENS]), use_cache=True, **options)
        return probe.layers


@pytest.fixture(scope="module")
def found(one_thread):
    """Return a function that probes a model of the zoo."""
    made: dict[tuple[str, torch.dtype], Found] = {}

    def find(name, dtype=torch.float32):
        if (name, dtype) not in made:
            model = build_model(architectures()[name]).to(dtype)
            loaded = describe_model(model, tokenizer=None, name=name, fingerprint="0" * 32)
            freeze_rotary(loaded)
            capture.install(model)
            if type(model)._can_set_attn_implementation():
                model.set_attn_implementation(capture.PROBE_ATTENTION_NAME)
            probe = run_probe(model, TOKENS, loaded.context_window)
            made[name, dtype] = Found(loaded, probe, layer_recipes(loaded, probe))
        return made[name, dtype]

    return find


def kind(recipe):
    found = ("k" if recipe.key.rotary else "") + ("v" if recipe.value.rotary else "")
    return found + ("p" if recipe.key.post else "")


@pytest.mark.parametrize("name", KINDS)
def test_each_layers_embedding_is_found(found, name):
    """Of the key, the value, or nothing, with a norm behind it or not.

    All can be moved in place.
    """
    recipes = found(name).recipes
    assert [kind(recipe) for recipe in recipes] == KINDS[name]
    for recipe in recipes:
        for component in recipe.components:
            assert component.can_move
            assert (component.rotary is None) == (component.source is None)
            assert bool(component.signature) == (component.rotary is not None)


@pytest.mark.parametrize("name", [name for name, kinds in KINDS.items() if any(kinds)])
def test_rows_are_embedded_elsewhere_as_by_the_model(found, name):
    """Rows before RoPE of one forward, embedded further on, are those of a forward there.

    Hunyuan's norm weighs what was rotated: the scores of its first layer, and with them what later
    layers cache, depend on absolute positions. Its first layer is compared.
    """
    model = found(name)
    for start in (0, 29):
        for index, cached in model.cached_at(start).items():
            if name == "hunyuan_v1_dense" and index > 0:
                continue
            recipe, seen = model.recipes[index], model.probe.layers[index]
            rows = zip(recipe.components, before_rope(recipe, seen), strict=True)
            for (component, free), expected in zip(rows, (cached.key, cached.value), strict=True):
                embedded = component.embed(free, start).transpose(0, 1)[None]
                torch.testing.assert_close(embedded, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize(
    "name", ["llama", "deepseek_v2", "hunyuan_v1_dense", "nanochat", "llama4_text", "gptj"]
)
def test_cached_rows_are_moved_as_if_embedded_there(found, name, dtype, error):
    """Also through a norm behind RoPE, whose weights are found by calling it."""
    model = found(name, dtype)
    for index, recipe in enumerate(model.recipes):
        seen = model.probe.layers[index]
        rows = zip(recipe.components, before_rope(recipe, seen), strict=True)
        for component, free in rows:
            if component.mover is None:
                continue
            expected, whole = component.embed(free, 11), torch.empty(free.shape)
            cached = component.embed(free, 40)
            component.mover.unrotate_into(cached, 40, whole)
            component.mover.move_into(cached, 40, 11, cached)
            torch.testing.assert_close(cached, expected, rtol=error, atol=4 * error)
            component.mover.rotate_into(whole, 11, cached)
            torch.testing.assert_close(cached, expected, rtol=error, atol=4 * error)


@pytest.mark.parametrize(
    "norm", [torch.nn.LayerNorm(16), torch.nn.Softmax(-1), torch.nn.LayerNorm(16, bias=False)]
)
def test_other_norms_are_not_inverted(found, norm):
    """Subtracting a mean, or mixing elements, has no scale; they are only repeated."""
    model = found("llama")
    free, _ = before_rope(model.recipes[0], model.probe.layers[0])
    assert find_scale(model.recipes[0].key.rotary, norm, free) is None


@pytest.mark.parametrize(
    "name", ["llama", "glm4", "deepseek_v2", "deepseek_v3", "hunyuan_v1_dense", "gptj", "falcon"]
)
def test_sixteen_bits_are_reproduced_exactly(found, name):
    """In bfloat16, recipes give bit by bit the rows that the model cached."""
    model = found(name, torch.bfloat16)
    for index, recipe in enumerate(model.recipes):
        seen = model.probe.layers[index]
        rows = zip(recipe.components, before_rope(recipe, seen), strict=True)
        for (component, free), cached in zip(rows, (seen.key, seen.value), strict=True):
            assert torch.equal(component.embed(free, 0).transpose(0, 1)[None], cached)


@pytest.mark.parametrize(
    ("name", "num_tables"),
    [("llama", 1), ("gemma3_text", 2), ("gemma4_text", 2), ("deepseek_v3", 1), ("gptj", 1)],
)
def test_layers_with_the_same_embedding_share_a_table(found, name, num_tables):
    """There are as many tables as rotary embeddings."""
    components = [component for recipe in found(name).recipes for component in recipe.components]
    tables = {id(component.rotary) for component in components if component.rotary}
    assert len(tables) == num_tables


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "hunyuan_v1_dense", "gptj"])
def test_rows_before_rope_of_the_first_layer_have_no_position(found, name):
    """One token at several places has the same rows."""
    model = found(name)
    same = [index for index, token in enumerate(TOKENS) if token == TOKENS[0]]
    for free in before_rope(model.recipes[0], model.probe.layers[0]):
        assert torch.equal(free[same], free[:1].expand(len(same), -1, -1))


def test_an_unknown_change_after_rope_is_refused(found):
    """Only a norm may change keys after their rotary embedding."""
    model = found("llama")
    layers = {
        index: type(seen)(seen.key * 1.01, seen.value, seen.calls, seen.norms)
        for index, seen in model.probe.layers.items()
    }
    changed = replace(model.probe, layers=layers)
    with pytest.raises(ModelModeMissingError, match=r"changes .*keys after their rotary embedding"):
        layer_recipes(model.loaded, changed)


def test_embedding_does_not_run_the_model(found, monkeypatch):
    """Once there are recipes, all positions of the window are embedded from tables alone."""
    model = found("gptj")
    monkeypatch.setattr(model.loaded.model, "forward", None)
    window = model.loaded.context_window
    keys = torch.randn(window, *model.recipes[0].shape.key)
    for recipe in model.recipes:
        rotated = recipe.key.embed(keys, 0)
        recipe.key.rotary.unrotate_into(rotated, 0, rotated)
        torch.testing.assert_close(rotated, keys, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("off", [1.0, float("nan")])
def test_a_recipe_with_other_rows_is_refused(tiny, off):
    """Whatever its error is."""
    loaded, free = tiny("llama").loaded, torch.ones(5, 2, 8)
    cached = free.transpose(0, 1)[None].clone()
    _check_recipe(loaded, ComponentRecipe(), free, cached)
    cached[0, 1, 4, 7] += off
    with pytest.raises(ModelModeMissingError, match="could not be reproduced"):
        _check_recipe(loaded, ComponentRecipe(), free, cached)
