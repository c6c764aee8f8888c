"""Models whose positions do not start at 0 get their own, and lose no context."""

import copy

import pytest
import torch
from torch import nn

from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.model.first_position import count_from_zero

NAME, PADDING, WINDOW = "roberta", 1, 192
TOKENS = [3, 9, 27, 81, 4, 12]


def logits(model, **options):
    with torch.no_grad():
        return model(input_ids=torch.tensor([TOKENS]), use_cache=False, **options).logits


def test_given_positions_start_at_zero(build):
    """For repeated calls; positions that the model computes itself do not change."""
    model = build(NAME).eval()
    stock = copy.deepcopy(model)
    positions = torch.arange(len(TOKENS))[None]
    assert not logits(stock, position_ids=positions).allclose(logits(stock), rtol=1e-3)
    assert [count_from_zero(model, WINDOW) for _ in range(2)] == [PADDING + 1] * 2
    assert logits(model, position_ids=positions).equal(logits(stock))
    assert logits(model).equal(logits(stock))


def test_the_window_has_as_many_tokens_as_positions(tiny):
    """Padding rows do not count."""
    model = tiny(NAME)
    assert model.loaded.context_window == WINDOW - PADDING - 1
    assert (model.calibration.mode, model.calibration.positions) == ("ragged", "coupled")
    token_ids = [3 + i % 90 for i in range(model.loaded.context_window)]
    kv = model.new_kv(len(token_ids))
    model.runner.step([Chunk(kv, token_ids[:-1], want_logits=False)])
    found = model.runner.step([Chunk(kv, token_ids[-1:], want_logits=True)])
    expected = model.stock_logits(token_ids)[-1:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class _Counting(nn.Module):
    """A model with a table that has padding rows, read from `first` on."""

    def __init__(self, first):
        super().__init__()
        self.table = nn.Embedding(32, 4, padding_idx=0)
        self.device, self._first, self.told = torch.device("cpu"), first, None

    def forward(self, input_ids, position_ids=None):
        if self._first is None:
            raise ValueError("it does not run")
        self.told = position_ids
        return self.table(torch.arange(self._first, self._first + input_ids.shape[1]))


@pytest.mark.parametrize(
    ("first", "num_positions", "expected"), [(5, 32, 5), (0, 32, 0), (5, 64, 0), (None, 32, 0)]
)
def test_the_first_position_is_observed(first, num_positions, expected):
    """A table with padding may be read from 0, or have another purpose."""
    model = _Counting(first)
    assert count_from_zero(model, num_positions) == expected
    if first is not None:
        model(torch.zeros(1, 2, dtype=torch.long), position_ids=torch.tensor([[0, 1]]))
        assert model.told.tolist() == [[expected, expected + 1]]


def test_other_models_are_not_changed(build):
    """They are not even run."""
    model = build("llama")
    model.register_forward_pre_hook(lambda *_: pytest.fail("it is run"))
    assert count_from_zero(model, WINDOW) == 0
    assert len(model._forward_pre_hooks) == 1
