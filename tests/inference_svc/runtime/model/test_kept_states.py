"""Taps of modules that keep states: each forward has its own, as if passed explicitly."""

import pytest
import torch
from torch import nn

from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.calibration.state_probe import find_kept_states
from inference_svc.runtime.kv.states import StatePlace
from inference_svc.runtime.model import capture
from inference_svc.runtime.model.forward import forward_context
from inference_svc.runtime.model.kept_states import (
    KeptStatesTap,
    has_taps,
    kept_tensors,
    tap_kept_states,
)
from inference_svc.runtime.model.model_loader import describe_model

SUM, LAST = StatePlace(0, "kept", 0), StatePlace(0, "kept", 1)


class Sums(nn.Module):
    """Sums up its inputs over all calls, and keeps the last one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.total, self.last = None, None

    def forward(self, tokens):
        """Return the sum so far."""
        self.last = tokens[-1]
        if self.total is None:
            self.total = torch.zeros(())
        self.total = self.total + tokens.sum()
        if self.total > 1000:
            raise OverflowError
        return self.total


class States(dict):
    """A running forward with these states."""

    def state(self, place):
        """Return one of them."""
        return self.get(place)

    def update_state(self, place, state):
        """Keep it."""
        self[place] = state


def make_tapped():
    module = Sums()
    tap_kept_states({module: {"total": SUM, "last": LAST}})
    return module


def tensor(value):
    return torch.tensor(float(value))


def test_each_forward_continues_with_its_own_state():
    """Whatever ran in between; and none of it stays in the module."""
    module, one, other = make_tapped(), States(), States({SUM: tensor(100), LAST: tensor(0)})
    for states, tokens, expected in (
        (one, [1.0, 2.0], 3),
        (other, [5.0], 105),
        (one, [4.0], 7),
    ):
        with forward_context(states):
            assert module(torch.tensor(tokens)) == expected
        assert (states[SUM], states[LAST]) == (expected, tokens[-1])
        assert kept_tensors(module) == {}


def test_without_a_forward_a_module_keeps_its_own_state():
    """A forward in between does not change it."""
    module = make_tapped()
    module(torch.tensor([2.0]))
    with forward_context(States()):
        module(torch.tensor([50.0]))
    assert module(torch.tensor([3.0])) == 5


def test_a_failed_call_changes_no_state():
    """Neither the forward's nor the module's."""
    module, states = make_tapped(), States({SUM: tensor(7), LAST: tensor(6)})
    with forward_context(states), pytest.raises(OverflowError):
        module(torch.tensor([2000.0]))
    assert states == {SUM: tensor(7), LAST: tensor(6)}
    assert kept_tensors(module) == {}


def test_tensors_that_change_are_found_and_restored(build):
    """A module may have other tensors; a second search finds nothing."""
    model = build("recurrent-gemma").eval()
    loaded = describe_model(model, tokenizer=None, name="tiny", fingerprint="0" * 32)
    capture.install(model)
    model.model.table = table = torch.ones(3)
    find_kept_states(loaded)
    assert kept_tensors(model) == {(model.model, "table"): table}
    taps = {m: m.forward for m in model.modules() if isinstance(m.forward, KeptStatesTap)}
    recurrent = model.config.layers_block_type.count("linear_attention")
    assert len(taps) == 2 * recurrent > 0  # a convolution's and the sum's, each in its module
    calibrate(loaded)  # which wraps some in its own taps
    tapped = [(m, m.forward) for m in taps]
    assert has_taps(model)
    find_kept_states(loaded)
    assert [(m, m.forward) for m in taps] == tapped
