"""States of one sequence: two phases, packed and restored, and what is not taken for one."""

import pytest
import torch

from inference_svc.runtime.kv import states as kv_states
from inference_svc.runtime.kv.states import (
    ALIGNMENT,
    SequenceStates,
    StatePlace,
    StateShape,
    packed_bytes,
)
from shared.types.errors import LoadFailedError

CONV = StateShape(0, "conv", 0, (1, 3, 4), torch.bfloat16)
SUM = StateShape(2, "recurrent", 1, (1, 2, 5), torch.float32, is_overwritten=False)
SHAPES = (CONV, SUM)
CPU = torch.device("cpu")


def tensor_of(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape.shape, generator=generator).to(shape.dtype)


def filled(seed=1, num_tokens=7):
    """States with a tensor at each place."""
    states = SequenceStates(SHAPES, CPU)
    for shape in SHAPES:
        states.put(shape.place, tensor_of(shape, seed))
    states.commit(num_tokens)
    return states


def test_there_is_nothing_before_the_first_token():
    """Models begin from nothing by themselves."""
    states = SequenceStates(SHAPES, CPU)
    assert [states.read(shape.place) for shape in SHAPES] == [None, None]
    with pytest.raises(AssertionError, match="before the first token"):
        states.snapshot()


def test_what_a_failed_step_has_put_is_forgotten():
    """Only `commit` makes it current."""
    states = filled()
    before = states.snapshot()
    states.begin()
    states.put(SUM.place, tensor_of(SUM, 2))
    assert states.snapshot().equal(before)
    states.begin()
    assert states.read(SUM.place).equal(tensor_of(SUM, 1))
    states.put(SUM.place, tensor_of(SUM, 3))
    states.commit(9)
    assert (states.num_tokens, states.snapshot().equal(before)) == (9, False)
    assert states.read(SUM.place).equal(tensor_of(SUM, 3))


def test_what_a_model_changes_in_place_is_a_copy_and_the_new_tensor():
    """Kernels of convolutions do, and do not hand over what they have changed."""
    states = filled()
    before = states.snapshot()
    states.begin()
    states.read(CONV.place).add_(1)
    assert states.snapshot().equal(before)
    states.commit(8)
    assert states.read(CONV.place).equal(tensor_of(CONV, 1) + 1)


def test_a_part_of_a_larger_tensor_does_not_keep_that_alive():
    """Convolutions cut their last inputs from all of a chunk."""
    states = SequenceStates(SHAPES, CPU)
    whole = torch.arange(300.0, dtype=torch.bfloat16).view(1, 3, 100)
    states.put(CONV.place, whole[..., -4:])
    kept = states.read(CONV.place)
    assert kept.equal(whole[..., -4:])
    assert kept.untyped_storage().nbytes() == CONV.num_bytes


def test_a_state_of_another_shape_or_place_is_an_error():
    """So is a forward that left one out."""
    states = SequenceStates(SHAPES, CPU)
    with pytest.raises(AssertionError, match="shape"):
        states.put(CONV.place, torch.zeros(1, 3, 5))
    with pytest.raises(AssertionError, match="shape"):
        states.put(StatePlace(1, "conv", 0), torch.zeros(1, 3, 4))
    states.put(CONV.place, tensor_of(CONV, 1))
    with pytest.raises(AssertionError, match="left no state"):
        states.check_pending()


def test_a_packed_state_is_restored_with_its_position():
    """Bit for bit, from a slot that is longer than it."""
    packed = filled(num_tokens=7).snapshot()
    assert packed.shape == (packed_bytes(SHAPES),)
    assert packed_bytes(SHAPES) == 3 * ALIGNMENT  # a header, and each tensor in a line of its own
    assert packed_bytes(()) == 0
    states = filled(seed=5, num_tokens=3)
    states.restore(torch.cat((packed, torch.full((100,), 0xAB, dtype=torch.uint8))))
    packed.zero_()
    assert states.num_tokens == 7
    for shape in SHAPES:
        assert states.read(shape.place).equal(tensor_of(shape, 1))


@pytest.mark.parametrize("damage", ["header", "length", "shapes", "version"])
def test_what_is_no_state_of_this_model_is_not_restored(damage, monkeypatch):
    """Nothing has changed then."""
    packed, shapes = filled().snapshot(), SHAPES
    if damage == "header":
        packed[3] ^= 1
    elif damage == "length":
        packed = packed[:-1]
    elif damage == "shapes":  # as many bytes
        shapes = (CONV, StateShape(2, "recurrent", 1, (1, 5, 2), torch.float32))
    else:
        monkeypatch.setattr(kv_states.transformers, "__version__", "0.0.1")
    states = SequenceStates(shapes, CPU)
    with pytest.raises(LoadFailedError):
        states.restore(packed)
    assert (states.num_tokens, states.read(CONV.place)) == (0, None)


def test_a_sequence_that_is_reset_has_no_state():
    """As before the first token."""
    states = filled()
    states.clear()
    assert (states.num_tokens, states.read(SUM.place)) == (0, None)
