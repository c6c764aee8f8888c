"""Keys from before RoPE are exact at any position; repeated rotation adds rounding errors."""

from pathlib import Path

import pytest

from inference_svc.core.errors import UnsupportedModelError
from inference_svc.eval.eval_model import prepare_model
from inference_svc.eval.options import RotationOptions
from inference_svc.eval.rotation import measure_rotation
from inference_svc.runtime.model.model_loader import load_model
from shared.types.errors import InvalidInputError

SAMPLE = Path(__file__).parents[2] / "data" / "wikitext2_sample.txt.gz"


@pytest.fixture(scope="module")
def errors(eval_model):
    report = measure_rotation(eval_model, RotationOptions(SAMPLE, 0.125, 4))
    assert report.num_keys == 3 * 2 * report.window_tokens  # layers, heads
    return {(each.way, each.dtype, each.num_moves): each for each in report.errors}


def test_keys_from_before_rope_are_exact(errors):
    """Bit by bit, in every dtype, however often the context was truncated."""
    for (way, _, _), found in errors.items():
        assert (found.to_own == 0) == (way == "before rope")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_repeated_rotation_adds_errors(errors, dtype):
    """Less if each move is rounded once; from before RoPE there is only one rounding."""
    once, often = (errors["before rope", dtype, n].root_mean_square for n in (1, 4))
    assert often == pytest.approx(once, rel=0.1)
    for way in ("single turn", "double rotation"):
        assert errors[way, dtype, 4].root_mean_square > 1.3 * often
    rounded_once = errors["single turn", dtype, 4].root_mean_square
    assert rounded_once < errors["double rotation", dtype, 4].root_mean_square


def test_more_truncations_than_there_are_tokens_are_refused(eval_model):
    """With the values that do not fit."""
    with pytest.raises(
        InvalidInputError, match="2 truncations of 32 tokens leave nothing of a window of 64"
    ):
        measure_rotation(eval_model, RotationOptions(SAMPLE, 0.5, 2))


def test_a_model_of_absolute_positions_cannot_be_rotated(absolute_model):
    """Its keys cannot be embedded anywhere else."""
    with pytest.raises(UnsupportedModelError, match="leave ca and ca-shift out"):
        prepare_model(load_model(absolute_model), 40, ("ca",))
