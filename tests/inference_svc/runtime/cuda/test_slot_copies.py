"""The kernel that copies tokens of slots, run by Triton's interpreter: no other byte changes."""

from math import gcd

import pytest
import torch

from inference_svc.runtime.cuda import slot_copies
from inference_svc.runtime.cuda.slot_copies import TokensInSlots, TokensOnDevice, copy_slots
from tests.sampled import sampled_cases

NUM_SLOTS, NUM_PLACES = 5, 9
# Bytes of a slot, of a token, before the first token, and between layers.
SIZES = [
    (4096, 512, 1024, 2048),
    (4096, 96, 32, 480),
    (400, 40, 8, 160),
    (100, 12, 4, 52),
    (90, 6, 2, 30),
    (33, 3, 1, 11),
]
SLOTS, IN_SLOT = [3, 3, 0, 4, 1], [0, 1, 1, 0, 0]


@pytest.fixture
def block_bytes(request, monkeypatch):
    """Return the bytes that a program copies at once: whole tokens, or parts of them."""
    slot_copies._shape_of.cache_clear()
    monkeypatch.setattr(slot_copies, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(slot_copies, "PROGRAMS_TO_SLOTS", 2)
    monkeypatch.setattr(slot_copies, "PROGRAMS_TO_DEVICE", 3)
    yield request.param
    slot_copies._shape_of.cache_clear()


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("sizes", "num_layers", "places", "to_slots", "block_bytes"),
    sampled_cases(
        SIZES, [1, 2], [None, [7, 0, 3, 8, 2]], [False, True], [16 << 10, 64], count=18, seed=1
    ),
    indirect=["block_bytes"],
)
def test_exactly_the_tokens_are_copied(sizes, num_layers, places, to_slots, block_bytes):
    """Of one layer and of several, with any alignment of their sizes."""
    slot_bytes, token_bytes, first, layer_bytes = sizes
    slots = random_bytes(NUM_SLOTS * slot_bytes)
    memory = random_bytes(num_layers, NUM_PLACES, token_bytes + 5 * (token_bytes == 12))
    distances = [
        slot * slot_bytes + at * token_bytes for slot, at in zip(SLOTS, IN_SLOT, strict=True)
    ]
    expected, expected_memory = slots.clone(), memory.clone()
    for layer in range(num_layers):
        for token, distance in enumerate(distances):
            begin = first + layer * layer_bytes + distance
            place = token if places is None else places[token]
            if to_slots:
                expected[begin : begin + token_bytes] = memory[layer, place, :token_bytes]
            else:
                expected_memory[layer, place, :token_bytes] = slots[begin : begin + token_bytes]
    copy_slots(
        TokensInSlots(
            slots.data_ptr() + first,
            torch.tensor(distances),
            gcd(slot_bytes, token_bytes),
            [layer * layer_bytes for layer in range(num_layers)],
        ),
        TokensOnDevice(
            memory[0, :, :token_bytes],
            None if places is None else torch.tensor(places),
            [layer * memory.stride(0) for layer in range(num_layers)],
        ),
        to_slots=to_slots,
    )
    assert torch.equal(slots, expected)
    assert torch.equal(memory, expected_memory)
