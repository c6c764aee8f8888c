"""Taps of modules with states: how they split and join calls, and which they refuse."""

import pytest
import torch
from torch import nn

from inference_svc.runtime.model.forward import TokenGroup, forward_context
from inference_svc.runtime.model.mixers import MixerCall, MixerTap, tap_mixers
from inference_svc.runtime.model.refusals import ModelModeMissingError

TOKENS = torch.arange(1.0, 15.0).view(1, 7, 2)
COUNTED = MixerCall(frozenset({0, "factors"}), frozenset({0, 1}))


class Sums(nn.Module):
    """Sums up tokens, times factors; mixes its inputs."""

    def forward(self, tokens, names, factors=None):
        """Return the sums, twice the sums in a tuple, and a value without tokens."""
        sums = (tokens * factors[0]).cumsum(1)
        return sums, (sums * 2,), f"{names} of {tokens.shape[0]} by {tokens.shape[1]}"


class Groups:
    """A running forward with these groups of tokens."""

    def __init__(self, *groups):
        self._groups = groups

    def token_groups(self):
        """Yield them."""
        return iter(self._groups)


def make_tapped():
    """Return a module with a tap, and how it is called."""
    module = Sums()
    tap_mixers({module: COUNTED})
    factors = (torch.full((1, 7, 1), 3.0),)
    return module, lambda: module(TOKENS, "sums", factors=factors)


def run(first, end):
    return TokenGroup(slice(first, end), is_batch=False)


def test_without_a_forward_a_tap_is_transparent():
    """Also in one over a single sequence."""
    expected = TOKENS.cumsum(1) * 3
    _, call = make_tapped()
    for found in (call(), _under(Groups(), call)):
        assert found[0].equal(expected)
        assert found[1][0].equal(expected * 2)
        assert found[2] == "sums of 1 by 7"


@pytest.mark.parametrize("singles", [slice(3, 6), torch.tensor([2, 3, 6])], ids=["run", "index"])
def test_each_group_is_called_separately(singles):
    """Tokens of other sequences form a batch; results are in the tokens' places."""
    is_run = isinstance(singles, slice)
    others = [run(0, 3), run(6, 7)] if is_run else [run(0, 2), run(4, 6)]
    _, call = make_tapped()
    sums, (doubled,), text = _under(Groups(*others, TokenGroup(singles, is_batch=True)), call)
    expected = TOKENS * 3
    for group in others:
        expected[:, group.tokens] = expected[:, group.tokens].cumsum(1)
    assert sums.equal(expected)
    assert doubled.equal(expected * 2)
    assert text == "sums of 3 by 1"


def test_a_batch_of_all_tokens_is_one_call():
    """As when all sequences decode."""
    _, call = make_tapped()
    sums, _, text = _under(Groups(TokenGroup(slice(0, 7), is_batch=True)), call)
    assert sums.equal(TOKENS * 3)
    assert text == "sums of 7 by 1"


def test_a_tap_is_replaced_and_not_nested():
    """Models are probed several times."""
    module, _ = make_tapped()
    tap_mixers({module: MixerCall(frozenset({0}), None)})
    assert isinstance(module.forward, MixerTap)
    assert not isinstance(module.forward.forward, MixerTap)


def test_values_per_token_are_recognised():
    """Tensors, and tuples of them; a single result."""
    cos, state = torch.zeros(1, 7, 4), torch.zeros(1, 2, 3)
    call = MixerCall.observe(
        "M", 7, (TOKENS, state, None), {"rope": (cos, cos), "x": 7}, (cos, state)
    )
    assert call == MixerCall(frozenset({0, "rope"}), frozenset({0}))
    assert MixerCall.observe("M", 7, (TOKENS,), {}, cos) == MixerCall(frozenset({0}), None)


@pytest.mark.parametrize(
    "given",
    [(torch.zeros(7),), (torch.zeros(1, 7, 7),), (TOKENS, (torch.zeros(1, 1, 7),))],
    ids=["positions", "mask", "inner"],
)
def test_a_call_that_cannot_be_cut_is_refused(given):
    """Tokens are counted in the second dimension, and nowhere else."""
    with pytest.raises(ModelModeMissingError, match="M does not have tokens in its second"):
        MixerCall.observe("M", 7, given, {}, TOKENS)


@pytest.mark.parametrize("result", [{"states": TOKENS}, None, torch.zeros(1, 3)])
def test_a_result_that_cannot_be_joined_is_refused(result):
    """It has to be a tensor per token, or a tuple."""
    with pytest.raises(ModelModeMissingError, match="M returns"):
        MixerCall.observe("M", 7, (TOKENS,), {}, result)


def _under(forward, call):
    with forward_context(forward):
        return call()
