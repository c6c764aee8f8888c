"""How modules with states get a step's tokens."""

import pytest
import torch

from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.step_states import StepStates

MODEL = "lfm2"


@pytest.fixture
def chunk_of(tiny):
    """Make the chunk of a sequence that has computed some tokens."""
    model = tiny(MODEL)

    def make(num_before, num_tokens):
        kv = model.new_kv(64)
        if num_before:
            model.runner.step([Chunk(kv, list(range(3, 3 + num_before)), want_logits=False)])
        return Chunk(kv, [5] * num_tokens, want_logits=False)

    return make


def groups_of(chunks, *, is_one_by_one=False):
    """Return the groups, with the number of sequences whose states each uses."""
    states = StepStates(chunks, is_one_by_one=is_one_by_one)
    place = chunks[0].kv.states.shapes[0].place
    found = []
    for group in states.token_groups():
        state = states.read(place)
        assert (states.num_tokens > 0) == (state is not None)
        tokens = group.tokens
        where = (tokens.start, tokens.stop) if isinstance(tokens, slice) else tokens.tolist()
        found.append((where, group.is_batch, 0 if state is None else len(state)))
    return found


def test_a_single_sequence_is_not_cut(chunk_of):
    """Its states are found all the same."""
    chunk = chunk_of(4, 3)
    assert groups_of([chunk]) == []
    states = StepStates([chunk], is_one_by_one=False)
    shape = chunk.kv.states.shapes[0]
    assert states.read(shape.place).shape == shape.shape
    assert states.num_tokens == 4


def test_decoding_sequences_form_a_batch(chunk_of):
    """In one call, if there are no others."""
    assert groups_of([chunk_of(n, 1) for n in (2, 5, 3)]) == [((0, 3), True, 3)]


def test_chunks_are_computed_one_after_another(chunk_of):
    """A first token is a chunk, too: there is no state before it."""
    chunks = [chunk_of(2, 1), chunk_of(0, 4), chunk_of(3, 1), chunk_of(0, 1), chunk_of(5, 2)]
    assert groups_of(chunks) == [
        ((1, 5), False, 0),
        ((6, 7), False, 0),
        ((7, 9), False, 1),
        ([0, 5], True, 2),
    ]


def test_a_chunk_over_a_state_goes_token_by_token_where_necessary(chunk_of):
    """Not the first chunk of a sequence."""
    chunks = [chunk_of(0, 3), chunk_of(2, 2)]
    expected = [((0, 3), False, 0), ((3, 4), False, 1), ((4, 5), False, 1)]
    assert groups_of(chunks, is_one_by_one=True) == expected
    assert groups_of(chunks[1:], is_one_by_one=True) == [((0, 1), False, 1), ((1, 2), False, 1)]


def test_each_sequence_gets_its_part_of_a_batch(chunk_of):
    """Of new states, and of those changed in place; current only after the commit."""
    chunks = [chunk_of(2, 1), chunk_of(5, 1)]
    shape = chunks[0].kv.states.shapes[0]
    before = [chunk.kv.states.snapshot() for chunk in chunks]
    states = StepStates(chunks, is_one_by_one=False)
    for _ in states.token_groups():
        joined = states.read(shape.place)
        expected = joined.clone() + 1
        joined.add_(1)
    states.check()
    for chunk, was, part in zip(chunks, before, expected.split(1), strict=True):
        assert chunk.kv.states.snapshot().equal(was)
        chunk.kv.states.commit(chunk.end_token)
        assert torch.equal(chunk.kv.states.read(shape.place), part)
