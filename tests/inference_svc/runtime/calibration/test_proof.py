"""The proof runs with blocks of any size, and finds what it is there to find.

A model's embeddings are proven, or it makes none.
"""

from dataclasses import replace

import pytest
import torch

from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.calibration.proof import prove, prove_pooling
from inference_svc.runtime.calibration.stock import NOT_STORED, is_same, stock_logits
from inference_svc.runtime.model.model_loader import describe_model, load_model
from inference_svc.runtime.model.pooling import Pooling, PoolingMode, UnknownPoolingError
from inference_svc.runtime.model.refusals import CalibrationMismatchError
from inference_svc.runtime.positions.recipes import Calibration, ComponentRecipe


def prove_with(model, calibration: Calibration):
    """Prove a calibration of a model with installed attention."""
    prove(model.loaded, calibration, stock_logits(model.loaded))


def with_first_key(model, **changes):
    """Return the model's calibration with another recipe for the keys of layer 0."""
    first, *others = model.calibration.layers
    layers = (replace(first, key=replace(first.key, **changes)), *others)
    return replace(model.calibration, layers=layers)


@pytest.mark.parametrize("block_tokens", [1, 7, 16, 39, 40, 41, 1000])
def test_blocks_may_be_smaller_than_the_proof(tiny, block_tokens):
    """Their tokens are stored in several blocks."""
    model = tiny("qwen3")
    layout = replace(model.calibration.layout, block_tokens=block_tokens)
    prove_with(model, replace(model.calibration, layout=layout))


def test_wrong_logits_are_refused(tiny):
    """The failing path is named."""
    model = tiny("llama")
    reference = stock_logits(model.loaded)
    prove(model.loaded, model.calibration, reference)
    rolled = replace(reference, whole=reference.whole.roll(1, dims=0))
    with pytest.raises(CalibrationMismatchError, match=r"^prefill of LlamaForCausalLM"):
        prove(model.loaded, model.calibration, rolled)


def test_a_single_token_with_another_computation_is_detected(build):
    """Models have a separate path for it, which several decodes at once do not use."""
    model = build("gptj")

    def spoil(_module, _args, options, answer):
        if options["input_ids"].shape[1] == 1:
            answer.logits.mul_(1.1)

    loaded = describe_model(model, tokenizer=None, name="spoilt", fingerprint="0" * 32)
    calibration, reference = calibrate(loaded), stock_logits(loaded)
    model.register_forward_hook(spoil, with_kwargs=True)
    with pytest.raises(CalibrationMismatchError, match=r"^decode of a lone token of GPTJ"):
        prove(loaded, calibration, reference)


def test_keys_loaded_at_other_positions_are_detected(tiny):
    """A table that is off by one is refused, with the path."""
    model = tiny("llama")
    table = model.calibration.layers[0].key.rotary

    class OffByOne:
        def rotator(self, keys, start):
            return table.rotator(keys, start + 1)

    with pytest.raises(CalibrationMismatchError, match="decode"):
        prove_with(model, with_first_key(model, rotary=OffByOne()))


def test_keys_that_keep_their_old_positions_are_detected(tiny):
    """The error shows when rows before them are dropped."""
    model = tiny("llama")
    cached = replace(model.calibration.layers[0], key=ComponentRecipe())
    layers = (cached, *model.calibration.layers[1:])
    with pytest.raises(CalibrationMismatchError, match="truncation"):
        prove_with(model, replace(model.calibration, layers=layers))
    prove_with(model, replace(model.calibration, layers=layers, positions="coupled"))


def test_index_keys_loaded_at_other_positions_are_detected(build):
    """Even if no token is skipped in the proof, so that logits do not show it."""
    loaded = describe_model(
        build("deepseek-v32", index_topk=2048), tokenizer=None, name="dsa", fingerprint="0" * 32
    )
    calibration, reference = calibrate(loaded), stock_logits(loaded)
    prove(loaded, calibration, reference)
    first, *others = calibration.layers
    as_cached = (replace(first, index=replace(first.index, source=None, rotary=None)), *others)
    unturned = (replace(first, index=replace(first.index, rotary=None)), *others)
    for layers in (as_cached, unturned):
        with pytest.raises(CalibrationMismatchError, match=r"^an index after truncation of Deeps"):
            prove(loaded, replace(calibration, layers=layers), reference)


def test_a_token_changed_by_rounding_is_tolerated_in_16_bits():
    """One token may be far off in bfloat16, and none in float32; NaN never."""
    expected = torch.ones(5, 9)
    flipped, shifted = expected.clone(), expected * 1.2
    flipped[2] *= 1.3
    assert is_same(flipped, expected, torch.bfloat16)
    assert not is_same(flipped, expected, torch.float32)
    for wrong in (shifted, expected * float("nan")):
        assert not is_same(wrong, expected, torch.bfloat16)
        assert not is_same(wrong, expected, torch.float32)


def test_the_tolerance_follows_the_models_own_error():
    """Three times that, but less than the effect of wrong positions."""
    expected, off = torch.ones(5, 9), torch.ones(5, 9) * 1.08
    assert not is_same(off, expected, torch.bfloat16)
    assert not is_same(off, expected, torch.bfloat16, rounding=0.02)
    assert is_same(off, expected, torch.bfloat16, rounding=0.03)
    assert not is_same(expected * 1.2, expected, torch.bfloat16, rounding=0.3)


def test_rounding_is_the_distance_between_correct_paths(build):
    """In 16 bits; in float32 it is zero."""
    loaded = describe_model(build("llama"), tokenizer=None, name="llama", fingerprint="0" * 32)
    assert stock_logits(loaded).rounding == 0
    half = describe_model(
        build("llama").bfloat16(), tokenizer=None, name="llama", fingerprint="0" * 32
    )
    assert 1e-4 < stock_logits(half).rounding < 5e-2


def test_norms_behind_rope_have_no_reference_for_other_positions(build):
    """Their weights differ, so that scores depend on absolute positions: nothing is refused."""
    model = build("hunyuan")
    for name, weights in model.named_parameters():
        if "layernorm" in name and "self_attn" in name:
            weights.data.copy_(torch.linspace(0.2, 3.0, len(weights)))
    loaded = describe_model(model, tokenizer=None, name="hunyuan", fingerprint="0" * 32)
    assert calibrate(loaded).positions == "decoupled"


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "deepseek-v3", "falcon", "bloom"])
def test_truncation_has_a_reference(tiny, name):
    """The stock model's own cache can hide tokens, with any positions."""
    reference = stock_logits(tiny(name).loaded)
    assert reference.truncated is not None
    assert not torch.equal(reference.truncated, reference.whole[-NOT_STORED:])


# --------------------------------------------------------------------------------- embeddings


@pytest.fixture
def loaded(tiny_model):
    return load_model(tiny_model, "float32", "cpu")


@pytest.mark.parametrize("mode", PoolingMode)
def test_every_way_is_proven(loaded, mode):
    prove_pooling(loaded, calibrate(loaded), Pooling(mode))


def test_a_head_that_gets_something_else_is_noticed(loaded):
    """As in models that scale their last states before the head."""
    loaded.model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * args[0],))
    with pytest.raises(UnknownPoolingError, match="something else than the output"):
        prove_pooling(loaded, calibrate(loaded), Pooling(PoolingMode.LAST))


def test_a_model_without_a_head_of_its_own_has_a_reason(loaded, monkeypatch):
    calibration = calibrate(loaded)
    monkeypatch.setattr(loaded.model, "get_output_embeddings", lambda: None)
    with pytest.raises(UnknownPoolingError, match="are not accessible"):
        prove_pooling(loaded, calibration, Pooling(PoolingMode.LAST))


def test_a_base_that_fails_is_a_reason_too(loaded, monkeypatch):
    calibration = calibrate(loaded)
    monkeypatch.setattr(type(loaded.model), "base_model", torch.nn.Identity())
    with pytest.raises(UnknownPoolingError, match="cannot be pooled"):
        prove_pooling(loaded, calibration, Pooling(PoolingMode.MEAN))
