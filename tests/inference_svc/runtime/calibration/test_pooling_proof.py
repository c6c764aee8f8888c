"""A model's embeddings are proven, or it makes none."""

import pytest
import torch

from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.calibration.pooling_proof import prove_pooling
from inference_svc.runtime.model.model_loader import load_model
from inference_svc.runtime.model.pooling import Pooling, PoolingMode, UnknownPoolingError


@pytest.fixture
def loaded(tiny_model):
    return load_model(tiny_model, "float32", "cpu")


@pytest.mark.parametrize("mode", PoolingMode)
def test_every_way_is_proven(loaded, mode):
    prove_pooling(loaded, calibrate(loaded), Pooling(mode))


def test_a_head_that_gets_something_else_is_noticed(loaded):
    """As in models that scale their last states before the head."""
    loaded.model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * args[0],))
    with pytest.raises(
        UnknownPoolingError, match="something else than the output of its last layer"
    ):
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
