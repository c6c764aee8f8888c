"""Replayed decode steps: equal to computed ones, for the steps that fit."""

from dataclasses import replace

import pytest
import torch

from inference_svc.runtime.compute.attention_scores import ScoreKeeper
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.decode_graphs import MOST_TOKENS, StepShape, step_shapes
from inference_svc.runtime.kv.copy_stream import CopyStream
from inference_svc.runtime.kv.layer_gate import LayerGate, StepClock
from tests.paged_steps import PagedSteps, decode_each, kept_contents
from tests.recorded_graph import RecordedGraphs
from tests.simulated_device import RaceError, SimulatedDevice

SHAPES = [StepShape(3, 64), StepShape(3, 24), StepShape(1, 24)]
TEXTS = [range(11, 33), range(40, 45), range(50, 61)]  # 22, 5 and 11 tokens
CAPACITY = 40


@pytest.fixture
def steps(tiny):
    """A small Llama on pages."""
    return PagedSteps(tiny("llama").loaded, tiny("llama").calibration)


def sequences_of(steps):
    """Make sequences of three lengths, the last of which will not be stored."""
    return [
        steps.sequence(list(text), CAPACITY, is_stored=number < 2)
        for number, text in enumerate(TEXTS)
    ]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_a_replayed_step_equals_the_computed_one(tiny, name):
    """To the bit, in logits, working KV and write buffers, over page ends and from 24 tokens on."""
    steps = PagedSteps(tiny(name).loaded, tiny(name).calibration)
    replaying = steps.replaying(RecordedGraphs(), SHAPES)
    ours, theirs = sequences_of(steps), sequences_of(steps)
    for number in range(8):
        token_ids = [60 + number, 70 + number, 80 + number]
        logits = decode_each(replaying, ours, token_ids)
        assert torch.equal(logits, decode_each(steps.runner, theirs, token_ids))
    assert replaying.num_replayed == 8
    for one, other in zip(kept_contents(ours), kept_contents(theirs), strict=True):
        assert torch.equal(one, other)


def test_a_step_uses_the_smallest_fitting_shape(steps):
    """In sequences and in tokens; if none fits it is computed."""
    capture = RecordedGraphs()
    replaying = steps.replaying(capture, SHAPES)
    sequences = sequences_of(steps)
    chosen = []
    for number in (1, 2, 3, 1, 1, 1):
        chunks = [Chunk(kv, [9], True, buffer) for kv, buffer in sequences[:number]]
        chosen.append(replaying.graphs.shape_of(chunks))
        replaying.step(chunks)
    small, middle, large = StepShape(1, 24), StepShape(3, 24), StepShape(3, 64)
    # The first sequence has 22 tokens, and goes beyond 24 in the third step.
    assert chosen == [small, middle, large, None, None, None]
    assert replaying.num_replayed == capture.num_replayed == 3


def test_rows_without_a_sequence_have_no_effect(steps):
    """They write to the spare page; other rows' results are the same."""
    replaying = steps.replaying(RecordedGraphs(), [StepShape(3, 64)])
    ours, theirs = sequences_of(steps)[:2], sequences_of(steps)[:2]
    on_pages, in_ring = steps.everything()
    before = [layer.clone() for layer in (*on_pages, *in_ring)]
    logits = decode_each(replaying, ours, [7, 8])
    slots = [kv.table.slot_of(kv.num_tokens - 1) for kv, _ in ours]
    write_slots = [buffer.slots_of(buffer.end_token - 1, 1)[0] for _, buffer in ours]
    spare = steps.pool.spare_kv().table.slot_of(0), steps.ring.num_slots
    for number, (layer, old) in enumerate(zip((*on_pages, *in_ring), before, strict=True)):
        is_ring = number >= len(on_pages)
        changed = (layer != old).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) - {spare[is_ring]} == set(write_slots if is_ring else slots)
    assert replaying.num_replayed == 1
    torch.testing.assert_close(logits, decode_each(steps.runner, theirs, [7, 8]))


def test_saves_may_follow_a_replayed_step(steps, monkeypatch):
    """All of its layers at once; a copy that does not wait for them is refused."""
    device = SimulatedDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: device)
    replaying = steps.replaying(RecordedGraphs(), SHAPES)
    sequences = sequences_of(steps)
    _, in_ring = steps.everything()
    device.own(in_ring[0])
    clock = StepClock(2, torch.device("cpu"))
    with device.running():
        decode_each(replaying, sequences, [7, 8, 9], clock)
    clock.wait(1, 0.0)
    buffer = sequences[0][1]
    new = buffer.places(buffer.end_token - 1, 1)
    saving = CopyStream(torch.device("cpu"))
    with saving.copies(behind_computing=False), device.running():
        with pytest.raises(RaceError):
            new.read(buffer.keys[1]).clone()
        saving.wait(clock.computed_mark(1))
        for layer in (*buffer.keys.layers, *buffer.values.layers):
            new.read(layer).clone()


def unusual(steps, chunk):
    """Return the same chunk with one change."""
    other = PagedSteps(*steps.model)
    _, elsewhere = other.sequence([5, 6, 7], CAPACITY)
    gated = steps.sequence([5, 6, 7], CAPACITY)[0]
    gated.gate = LayerGate(2)
    alone = steps.pool.new_write_buffer(chunk.kv.num_tokens, 4)
    return {
        "nothing": chunk,
        "not stored": replace(chunk, write_buffer=None),
        "two tokens": replace(chunk, token_ids=[5, 6]),
        "no logits": replace(chunk, want_logits=False),
        "scored": replace(chunk, scores=ScoreKeeper.__new__(ScoreKeeper)),
        "behind a load": replace(chunk, kv=gated, write_buffer=None),
        "other pages": Chunk(other.sequence([5, 6], CAPACITY)[0], [5], True),
        "another ring": replace(chunk, write_buffer=elsewhere),
        "a buffer of its own": replace(chunk, write_buffer=alone),
    }


def test_unusual_chunks_are_computed(steps):
    """One in a step is enough."""
    step = steps.step(SHAPES)
    chunks = [Chunk(kv, [9], True, buffer) for kv, buffer in sequences_of(steps)]
    others = unusual(steps, chunks[0])
    taken = [name for name, other in others.items() if step.can_run([*chunks[1:], other])]
    assert taken == ["nothing", "not stored"]


def test_without_a_write_ring_nothing_is_buffered(tiny):
    """Nothing is saved there; a sequence with a buffer all the same is computed."""
    steps = PagedSteps(tiny("llama").loaded, tiny("llama").calibration, write_slots=0)
    replaying = steps.replaying(RecordedGraphs(), [StepShape(1, 64)])
    ours, theirs = (steps.sequence([5, 6, 7], CAPACITY, is_stored=False) for _ in range(2))
    logits = decode_each(replaying, [ours], [9])
    assert torch.equal(logits, decode_each(steps.runner, [theirs], [9]))
    assert replaying.num_replayed == 1
    buffer = steps.pool.new_write_buffer(4, 4)
    decode_each(replaying, [(ours[0], buffer)], [9])
    assert (replaying.num_replayed, buffer.end_token) == (1, 5)


def test_a_buffer_takes_tokens_from_its_first_on(steps):
    """Earlier tokens are not stored."""
    replaying = steps.replaying(RecordedGraphs(), [StepShape(1, 64)])
    kv, _ = steps.sequence([5, 6, 7], CAPACITY, is_stored=False)
    buffer = steps.ring.lend(4, 4)
    steps.ring.extend(buffer, 6)
    _, in_ring = steps.everything()
    before = [layer[buffer.slots].clone() for layer in in_ring]
    decode_each(replaying, [(kv, buffer)], [9])
    assert (replaying.num_replayed, buffer.end_token) == (1, 4)
    for layer, old in zip(in_ring, before, strict=True):
        assert torch.equal(layer[buffer.slots], old)
    decode_each(replaying, [(kv, buffer)], [9])
    assert (replaying.num_replayed, buffer.end_token) == (2, 5)


@pytest.mark.parametrize(
    ("most_rows", "window", "rows", "reaches"),
    [
        (1, 100, [1], [100]),
        (3, 1024, [1, 2, 3], [1024]),
        (8, 5000, [1, 2, 4, 8], [1024, 4096, 5000]),
        (20, 1025, [1, 2, 4, 8, 12, 16, 20], [1024, 1025]),
        (1024, 9, [1, 2, 4, *(8 << n for n in range(8)), *(12 << n for n in range(7))], [9]),
    ],
)
def test_shapes_are_few_and_cover_all_steps(most_rows, window, rows, reaches):
    """Few rows are empty, and the largest shape fits every step; it comes first."""
    shapes = step_shapes(most_rows, window)
    assert shapes == sorted(shapes, reverse=True)
    assert set(shapes) == {StepShape(size, reach) for size in rows for reach in reaches}


def test_the_memory_of_shapes_is_limited():
    """Long sequences are replayed alone, not in large batches."""
    shapes = step_shapes(64, MOST_TOKENS)
    assert StepShape(1, MOST_TOKENS) in shapes
    assert StepShape(64, 1 << 14) in shapes
    assert max(shape.rows * shape.reach for shape in shapes) == MOST_TOKENS
