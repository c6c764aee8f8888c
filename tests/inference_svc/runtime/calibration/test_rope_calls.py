"""A call that embeds positions is looked for in the first layer of a model, and nowhere else."""

import pytest
import torch

from inference_svc.runtime.calibration.rope_calls import ReplayedRope, RopeOutOfReachError
from inference_svc.runtime.model import capture
from inference_svc.runtime.positions.recipes import KeySource

POSITIONS = torch.arange(3)
KEYS = torch.zeros(1, 2, 3, 8)


@pytest.fixture(scope="module")
def model(build):
    """A model under our hooks, whose layers call their apply function once each."""
    model = build("llama")
    capture.install(model)
    model.set_attn_implementation(capture.PROBE_ATTENTION_NAME)
    return model


def source(call_index):
    return KeySource(call_index=call_index, arg_index=1, width=8, seq_dim=2)


def test_a_call_of_a_later_layer_is_out_of_reach(model):
    """What it is given depends on tokens, by then."""
    assert ReplayedRope(model, source(0))(KEYS, POSITIONS).shape == KEYS.shape
    with pytest.raises(RopeOutOfReachError, match="layer 0 is cached before it"):
        ReplayedRope(model, source(1))(KEYS, POSITIONS)
