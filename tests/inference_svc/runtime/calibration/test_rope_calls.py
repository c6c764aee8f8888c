"""A call that embeds positions is searched in the first layer of a model only."""

from types import SimpleNamespace

import pytest
import torch

from inference_svc.runtime.calibration.rope_calls import (
    ReplayedRope,
    RopeOutOfReachError,
    _FoundError,
    _Search,
)
from inference_svc.runtime.model import capture
from inference_svc.runtime.positions.recipes import KeySource

POSITIONS = torch.arange(3)
KEYS = torch.zeros(1, 2, 3, 8)


@pytest.fixture(scope="module")
def model(build):
    """Return a hooked model, whose layers call their apply function once each."""
    model = build("llama")
    capture.install(model)
    model.set_attn_implementation(capture.PROBE_ATTENTION_NAME)
    return model


def source(call_index):
    return KeySource(call_index=call_index, arg_index=1, first=0, width=8, seq_dim=2)


def test_a_call_of_a_later_layer_is_ignored(model):
    """Its arguments depend on tokens."""
    assert ReplayedRope(model, source(0))(KEYS, POSITIONS).shape == KEYS.shape
    with pytest.raises(RopeOutOfReachError, match="layer 0 is cached before it"):
        ReplayedRope(model, source(1))(KEYS, POSITIONS)


class _Plain(torch.nn.Module):
    """Embeds no positions and caches nothing."""

    def forward(self, input_ids, **_options):
        return SimpleNamespace(logits=torch.zeros(1, input_ids.shape[1], 9))


def test_a_model_without_such_a_call_is_refused():
    """It runs to its end."""
    with pytest.raises(RopeOutOfReachError, match="to its end"):
        ReplayedRope(_Plain(), source(0))(KEYS, POSITIONS)


def test_the_call_with_the_given_number_is_found():
    """Earlier ones pass."""
    search, tap = _Search(2), SimpleNamespace(apply=len)
    for number in range(2):
        search.on_rotary(tap, (number,), {}, None)
    with pytest.raises(_FoundError) as found:
        search.on_rotary(tap, (2,), {}, None)
    assert found.value.args[0].args == (2,)


def test_a_model_that_attends_before_it_calls_is_refused():
    """Its cached rows would depend on tokens."""
    with pytest.raises(RopeOutOfReachError, match="attends before it"):
        _Search(0).attend(KEYS, KEYS, KEYS, None, {})
    with pytest.raises(RopeOutOfReachError, match="layer 0 is indexed before it"):
        _Search(0).update_index(0, KEYS[0])
