"""Sequences' KV and write buffers: layers of several shapes, in order; counters and bounds."""

import pytest
import torch

from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.kv.layer_tensors import LayerShape, Places

SHAPES = [LayerShape((2, 4), (2, 4)), LayerShape((1, 8), (1, 6)), LayerShape((2, 4), (1, 6))]


@pytest.fixture
def pool():
    return KVPool(SHAPES, 64, device=torch.device("cpu"), dtype=torch.float32)


def test_layers_of_several_shapes_keep_their_order(pool):
    """Splitting all layers at once gives views of each layer's own rows."""
    kv = pool.new_kv(10)
    assert [tuple(rows.shape) for rows in kv.keys.cut(3, 5)] == [
        (1, 2, 5, 4),
        (1, 1, 5, 8),
        (1, 2, 5, 4),
    ]
    assert [tuple(rows.shape) for rows in kv.values.cut(0, 2)] == [
        (1, 2, 2, 4),
        (1, 1, 2, 6),
        (1, 1, 2, 6),
    ]
    for layer_index, rows in enumerate(kv.keys.cut(4, 2)):
        rows.fill_(layer_index)
    for layer_index in range(len(SHAPES)):
        assert (kv.keys[layer_index][:, :, 4:6] == layer_index).all()


def test_rows_of_a_head_are_contiguous(pool):
    """Attention reads one head's rows after another."""
    kv = pool.new_kv(7)
    for rows in (*kv.keys.layers, *kv.values.layers):
        assert rows[0, 0].is_contiguous()
        assert rows.is_contiguous()


def test_rows_of_a_write_buffer_are_found_by_position(pool):
    """By their position in the sequence, token-major."""
    buffer = pool.new_write_buffer(first_token=40, capacity_tokens=6)
    places = buffer.places(43, 2)
    read = [places.read(rows) for rows in (*buffer.keys.layers, *buffer.values.layers)]
    assert [tuple(rows.shape) for rows in read[:3]] == [(2, 2, 4), (2, 1, 8), (2, 2, 4)]
    assert [tuple(rows.shape) for rows in read[3:]] == [(2, 2, 4), (2, 1, 6), (2, 1, 6)]
    for layer_index, rows in enumerate(buffer.values.layers):
        places.write(rows, torch.full_like(rows[:2], layer_index))
        assert (rows[3:5] == layer_index).all()
    assert (buffer.end_token, buffer.free_tokens) == (40, 6)
    buffer.end_token = 45
    assert buffer.free_tokens == 1


@pytest.mark.parametrize(("first", "count"), [(39, 1), (45, 2), (46, 1)])
def test_a_cut_outside_the_buffer_violates_an_invariant(pool, first, count):
    """Narrowing alone would take other rows."""
    buffer = pool.new_write_buffer(first_token=40, capacity_tokens=6)
    with pytest.raises(AssertionError, match="slots for those from 40 to 46"):
        buffer.places(first, count)


@pytest.mark.parametrize("slots", [[2, 3, 4], [4, 0, 3], [5]])
def test_places_read_back_written_rows(slots):
    """Adjacent or not, in the order of the tokens; other slots do not change."""
    memory = torch.zeros(6, 2, 3)
    rows = torch.arange(1.0, 1 + len(slots) * 6).view(-1, 2, 3)
    places = Places(slots, memory.device)
    places.write(memory, rows.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(places.read(memory), rows)
    assert torch.equal(memory[slots], rows)
    assert int(memory.count_nonzero()) == rows.numel()


def test_places_in_a_tensor_are_read_when_they_are_used():
    """Where they are is looked up when they are used."""
    memory, index = torch.zeros(6, 2, 3), torch.tensor([4, 1])
    places = Places.at(index)
    index.copy_(torch.tensor([5, 0]))
    rows = torch.arange(1.0, 13).view(2, 2, 3)
    places.write(memory, rows)
    assert torch.equal(memory[[5, 0]], rows)
    assert torch.equal(places.read(memory), rows)
    assert not memory[1:5].any()


def test_reset_drops_rows_and_gate(pool):
    """A sequence's KV with a failed load begins again, without a gate."""
    kv = pool.new_kv(10)
    kv.num_tokens, kv.gate = 6, LayerGate(3)
    assert kv.free_tokens == 4
    kv.reset()
    assert (kv.num_tokens, kv.gate, kv.free_tokens) == (0, None, 10)


@pytest.mark.parametrize(
    ("load_ends", "num_tokens", "wanted"),
    [((), 7, [7]), ((4, 30), 7, [4, 30]), ((4, 30), 30, [4, 30]), ((4, 30), 31, [4, 30, 31])],
)
def test_loads_may_end_at_the_marks_and_at_answers(pool, load_ends, num_tokens, wanted):
    """Blocks stored on the way through a prompt are no such places."""
    buffer = pool.new_write_buffer(0, 40)
    buffer.load_ends = load_ends
    assert buffer.load_ends_within(num_tokens) == wanted
