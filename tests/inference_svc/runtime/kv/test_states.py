"""States of one sequence: two phases, packing and restoring, and invalid ones."""

import pytest
import torch

from inference_svc.runtime.kv import states as kv_states
from inference_svc.runtime.kv.states import (
    ALIGNMENT,
    JointStates,
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


def make_filled(seed=1, num_tokens=7):
    """Make states with a tensor in each place."""
    states = SequenceStates(SHAPES, CPU)
    for shape in SHAPES:
        states.put(shape.place, tensor_of(shape, seed))
    states.commit(num_tokens)
    return states


def test_before_the_first_token_there_are_no_states():
    """Models begin without any."""
    states = SequenceStates(SHAPES, CPU)
    assert [states.read(shape.place) for shape in SHAPES] == [None, None]
    with pytest.raises(AssertionError, match="before the first token"):
        states.snapshot()


def test_states_of_a_failed_step_are_dropped():
    """Only `commit` makes them current."""
    states = make_filled()
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


def test_a_state_changed_in_place_is_a_copy_and_the_new_tensor():
    """Kernels of convolutions change it without returning it."""
    states = make_filled()
    before = states.snapshot()
    states.begin()
    states.read(CONV.place).add_(1)
    assert states.snapshot().equal(before)
    states.commit(8)
    assert states.read(CONV.place).equal(tensor_of(CONV, 1) + 1)


def test_a_part_does_not_keep_the_larger_tensor_alive():
    """Convolutions cut their last inputs out of a chunk."""
    states = SequenceStates(SHAPES, CPU)
    whole = torch.arange(300.0, dtype=torch.bfloat16).view(1, 3, 100)
    states.put(CONV.place, whole[..., -4:])
    kept = states.read(CONV.place)
    assert kept.equal(whole[..., -4:])
    assert kept.untyped_storage().nbytes() == CONV.num_bytes


def test_a_wrong_shape_or_place_is_an_error():
    """So is a forward that omits a state."""
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
    packed = make_filled(num_tokens=7).snapshot()
    assert packed.shape == (packed_bytes(SHAPES),)
    assert packed_bytes(SHAPES) == 3 * ALIGNMENT  # a header, and each tensor in a line of its own
    assert packed_bytes(()) == 0
    states = make_filled(seed=5, num_tokens=3)
    states.restore(torch.cat((packed, torch.full((100,), 0xAB, dtype=torch.uint8))))
    packed.zero_()
    assert states.num_tokens == 7
    for shape in SHAPES:
        assert states.read(shape.place).equal(tensor_of(shape, 1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integers_are_packed_exactly(dtype):
    """Some models keep ids of the last tokens; some are no exact floats."""
    shapes = (StateShape(0, "conv", 2, (1, 2), dtype), SUM)
    ids = torch.tensor([[torch.iinfo(dtype).max, -1]], dtype=dtype)
    states, restored = SequenceStates(shapes, CPU), SequenceStates(shapes, CPU)
    states.put(shapes[0].place, ids)
    states.put(SUM.place, tensor_of(SUM, 1))
    states.commit(5)
    restored.restore(states.snapshot())
    joint = JointStates([states, restored])
    assert joint.read(shapes[0].place).equal(torch.cat([ids, ids]))
    assert restored.peek(SUM.place).equal(tensor_of(SUM, 1))


@pytest.mark.parametrize("damage", ["header", "length", "shapes", "version"])
def test_foreign_bytes_are_not_restored(damage, monkeypatch):
    """They change nothing."""
    packed, shapes = make_filled().snapshot(), SHAPES
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


def test_a_reset_sequence_has_no_state():
    """As before the first token."""
    states = make_filled()
    states.clear()
    assert (states.num_tokens, states.read(SUM.place)) == (0, None)


def test_states_of_several_sequences_form_a_batch():
    """Changes in place affect no current tensor; parts are distributed at the end."""
    both = [make_filled(1), make_filled(2)]
    before = [states.snapshot() for states in both]
    joint = JointStates(both)
    conv = joint.read(CONV.place)
    assert conv.equal(torch.cat([tensor_of(CONV, 1), tensor_of(CONV, 2)]))
    conv.add_(1)
    assert joint.read(CONV.place) is conv
    assert joint.read(SUM.place).shape == (2, *SUM.shape[1:])
    joint.put(SUM.place, torch.cat([tensor_of(SUM, 3), tensor_of(SUM, 4)]))
    joint.split()
    for seed, (states, was) in enumerate(zip(both, before, strict=True), 1):
        assert states.snapshot().equal(was)
        states.commit(8)
        assert states.read(SUM.place).equal(tensor_of(SUM, seed + 2))
        assert states.read(CONV.place).equal(tensor_of(CONV, seed) + 1)


def test_a_sequence_without_a_state_cannot_join_a_batch():
    """It would be omitted."""
    joint = JointStates([make_filled(), SequenceStates(SHAPES, CPU)])
    with pytest.raises(AssertionError, match="without a state"):
        joint.read(SUM.place)
