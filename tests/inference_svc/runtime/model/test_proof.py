"""The proof runs with blocks of any size, and finds what it is there to find."""

from dataclasses import replace

import pytest

from inference_svc.runtime.model.proof import prove, stock_logits
from inference_svc.runtime.model.recipes import Calibration
from inference_svc.runtime.model.refusals import CalibrationMismatchError


def prove_with(model, calibration: Calibration):
    """Prove a calibration of a model whose attention is ours already."""
    name = model.loaded.model.config._attn_implementation
    reference = stock_logits(model.loaded)
    model.loaded.model.set_attn_implementation(name)
    prove(model.loaded, calibration, reference)


@pytest.mark.parametrize("block_tokens", [1, 7, 16, 44, 45, 46, 1000])
def test_blocks_may_be_smaller_than_the_proof(tiny, block_tokens):
    """A model whose blocks hold fewer tokens than the proof stores is proven over several."""
    model = tiny("qwen3")
    layout = replace(model.calibration.layout, block_tokens=block_tokens)
    prove_with(model, replace(model.calibration, layout=layout))


def test_keys_loaded_at_other_positions_are_found(tiny):
    """A table that turns keys one position too far is refused, naming the path."""
    model = tiny("llama")
    recipe = model.calibration.layers[1]

    class OffByOne:
        def turn(self, keys, start):
            return recipe.rotary.turn(keys, start + 1)

    layers = (model.calibration.layers[0], replace(recipe, rotary=OffByOne()))
    with pytest.raises(CalibrationMismatchError, match="decode"):
        prove_with(model, replace(model.calibration, layers=layers))
