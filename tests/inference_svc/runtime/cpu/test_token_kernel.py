"""The kernel that loads tokens on a CPU has the bits of torch, for all rotations and strides."""

import os
import platform

import pytest
import torch

from inference_svc.runtime.cpu.native_library import load_library
from inference_svc.runtime.cpu.token_kernel import EMBEDDED, TokenKernel
from inference_svc.runtime.kv.layer_tensors import TokenRoom
from inference_svc.runtime.positions.rotation import TokenCopy
from tests.inference_svc.runtime.positions.test_rotary import DTYPES, ROPES, random_keys, table
from tests.ropes import DIM, halves, partial

START = 900
UNTOUCHED = 9.0
BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def kernel():
    return TokenKernel.load()


def stored(keys):
    """Store keys in slots, the last block first; return the slots, and the keys' distances."""
    num_slots = -(-len(keys) // BLOCK_TOKENS)
    slots = torch.full((num_slots, BLOCK_TOKENS + 3, *keys.shape[1:]), UNTOUCHED).to(keys.dtype)
    slots = slots[:, 1:-2]  # a slot holds other components, too
    for number in range(num_slots):
        block = keys[number * BLOCK_TOKENS :][:BLOCK_TOKENS]
        slots[num_slots - 1 - number, : len(block)] = block
    positions = torch.arange(len(keys))
    slot_ids = num_slots - 1 - positions // BLOCK_TOKENS
    return slots, slot_ids * slots.stride(0) + positions % BLOCK_TOKENS * slots.stride(1)


def load(kernel, keys, tables, room):
    """Load keys to every third row of a tensor; return them, after checking all other rows.

    They go to a view of these rows, and, in another call, by an index, the last one first.
    """
    found = []
    places = torch.arange(3, len(room), 3)[: len(keys)]
    for rows in (None, places.flip(0)):
        room.fill_(UNTOUCHED)
        there = TokenRoom(room[::3], 0, 1) if rows is None else TokenRoom(room, 0, slots=rows)
        kernel([TokenCopy(*stored(keys), there, tables)])
        found.append(room[places if rows is None else rows])
        room[places] = UNTOUCHED
        assert (room == UNTOUCHED).all()
    assert torch.equal(*(each.view(torch.uint8) for each in found))
    return found[0]


def room_for(keys):
    return keys.new_empty(3 * len(keys) + 4, *keys.shape[1:])


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtypes", [kind for kind in DTYPES if kind[0] in EMBEDDED])
@pytest.mark.parametrize(
    "option", ["", "-mno-avx512f", pytest.param("-mno-avx", marks=pytest.mark.long)]
)
def test_bits_equal_those_of_torch(rope, dtypes, option):
    """Of halves, interleaved, partial, scaled, permuted; on processors with narrow vectors, too."""
    if option and platform.machine() != "x86_64":
        pytest.skip("the options are those of x86")
    compiler = {"CXX": f"g++ {option}"} if option else {}
    kernel = TokenKernel(load_library({**os.environ, **compiler}))
    keys_dtype, dtype, table_dtype = dtypes
    rotary = table(rope, dtype=dtype, table_dtype=table_dtype)
    keys = random_keys(45, dtype=keys_dtype)
    found = load(kernel, keys, rotary.tables(START, len(keys)), room_for(keys))
    assert torch.equal(found, rotary.rotate(keys, START))


@pytest.mark.parametrize("rope", [halves, partial])
def test_tokens_and_heads_may_have_any_strides(kernel, rope):
    """For example latents beside each other, and KV whose heads are contiguous."""
    rotary, keys = table(rope), random_keys(20)
    by_heads = torch.empty(3, 64, DIM).transpose(0, 1)
    beside_others = torch.empty(64, 3, DIM + 5)[..., 5:]
    for room in (by_heads, beside_others):
        found = load(kernel, keys, rotary.tables(7, len(keys)), room)
        assert torch.equal(found, rotary.rotate(keys, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_without_a_table_are_copied(kernel, dtype):
    """Of every dtype that can be stored, NaN included."""
    tokens = random_keys(50, dtype=dtype)
    tokens[3, 1, 2] = float("nan")
    found = load(kernel, tokens, None, room_for(tokens))
    assert torch.equal(found.view(torch.uint8), tokens.view(torch.uint8))


def test_several_threads_give_the_same_bits(kernel, monkeypatch):
    """Of a load that is worth waking them."""
    rotary, keys = table(halves), random_keys(1500, heads=8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    found = load(kernel, keys, rotary.tables(5, len(keys)), room_for(keys))
    assert torch.equal(found, rotary.rotate(keys, 5))
    assert torch.equal(load(kernel, keys, None, room_for(keys)), keys)


def test_what_it_does_not_take_is_refused(kernel):
    """Before any memory is written to."""
    keys = random_keys(20)
    slots, distances = stored(keys)
    tables = table(halves).tables(0, len(keys))
    half = torch.empty(20, 3, DIM, dtype=torch.float16)
    for out in (half, torch.empty(20, DIM, 3).mT):
        with pytest.raises(ValueError, match="cannot be loaded to"):
            kernel([TokenCopy(slots, distances, TokenRoom(out, 0), tables)])
    for first in (-1, 1):
        with pytest.raises(ValueError, match="20 tokens from slot"):
            kernel(
                [TokenCopy(slots, distances, TokenRoom(torch.empty(20, 3, DIM), 0, first), tables)]
            )
    with pytest.raises(ValueError, match=r"float16 and tables of torch\.float32"):
        kernel([TokenCopy(slots.half(), distances, TokenRoom(half, 0), tables)])


def test_one_call_makes_several_copies(kernel):
    """Of components of different shapes."""
    rotary = table(halves)
    keys, values = random_keys(45), random_keys(45, heads=1, seed=2)
    out = [torch.zeros_like(keys), torch.zeros_like(values)]
    kernel(
        [
            TokenCopy(*stored(keys), TokenRoom(out[0], 0), rotary.tables(START, 45)),
            TokenCopy(*stored(values), TokenRoom(out[1], 0), None),
        ]
    )
    assert torch.equal(out[0], rotary.rotate(keys, START))
    assert torch.equal(out[1], values)
