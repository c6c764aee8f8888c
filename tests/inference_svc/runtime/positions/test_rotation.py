"""Rotary embeddings are inverted, or moved, as exactly as their dtype allows."""

import pytest
import torch

from inference_svc.runtime.positions.rotary import RotaryTable, find_pairing
from tests.ropes import (
    DIM,
    halves,
    interleaved,
    partial,
    partly_scaled,
    permuting,
    scaled,
    scattered,
)
from tests.sampled import sampled_cases

CPU = torch.device("cpu")


ROPES = [halves, interleaved, permuting, partial, scaled, partly_scaled, scattered]
# Rounding of the keys, of the model's products, of its cosines; and of two roundings to the keys'.
DTYPES = [
    (torch.float32, torch.float32, torch.float32, 1e-6),
    (torch.float32, torch.float32, torch.bfloat16, 1e-6),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16, 2e-2),
    (torch.bfloat16, torch.float32, torch.float32, 1e-2),
    (torch.float16, torch.float16, torch.float16, 3e-3),
]


def table(rope, dtype=torch.float32, table_dtype=None):
    return RotaryTable(
        rope,
        find_pairing(rope, DIM, CPU),
        max_tokens=100_000,
        table_dtype=table_dtype or dtype,
        dtype=dtype,
        device=CPU,
    )


def random_keys(num_tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, 3, DIM, generator=generator).to(dtype)


def close(rtol):
    return {"rtol": rtol, "atol": 4 * rtol}


@pytest.mark.parametrize(("rope", "dtypes"), sampled_cases(ROPES, DTYPES, count=14, seed=2))
def test_unrotating_restores_the_keys(rope, dtypes):
    """Also beyond the first table, and with any scaling of the cosines."""
    keys_dtype, dtype, table_dtype, error = dtypes
    rotary, keys = table(rope, dtype, table_dtype), random_keys(130, keys_dtype)
    for start in (0, 950, 5000):
        out = torch.empty_like(keys)
        rotary.unrotate_into(rotary.rotate(keys, start), start, out)
        torch.testing.assert_close(out, keys, **close(error))


@pytest.mark.parametrize(
    ("rope", "dtypes", "move"),
    sampled_cases(ROPES, DTYPES, [(700, 3), (1100, 1000), (3, 700), (9, 9)], count=25, seed=1),
)
def test_moved_keys_are_those_rotated_there(rope, dtypes, move):
    """Moving rotated keys equals rotating the keys at the new positions."""
    (keys_dtype, dtype, table_dtype, error), (old, new) = dtypes, move
    rotary, keys = table(rope, dtype, table_dtype), random_keys(130, keys_dtype)
    out = torch.empty_like(keys)
    rotary.move_into(rotary.rotate(keys, old), old, new, out)
    torch.testing.assert_close(out, rotary.rotate(keys, new), **close(error))


@pytest.mark.parametrize("rope", ROPES)
def test_pieces_equal_the_whole(rope):
    """Keys moved piece by piece, into strided places, have the bits of keys moved at once."""
    rotary = table(rope, torch.bfloat16)
    rotated = rotary.rotate(random_keys(90, torch.bfloat16), 300)
    for apply in (rotary.unrotate_into, lambda keys, at, out: rotary.move_into(keys, at, at, out)):
        whole = torch.empty_like(rotated)
        apply(rotated, 300, whole)
        kv = torch.zeros(3, 90, DIM, dtype=torch.bfloat16)  # head-major
        for first in range(0, 90, 40):
            piece = rotated[first : first + 40]
            apply(piece, 300 + first, kv[:, first : first + 40].transpose(0, 1))
        assert torch.equal(kv.transpose(0, 1), whole)


@pytest.mark.parametrize("rope", [halves, partial])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_move_forward_over_themselves(rope, dtype):
    """The result may overlap the keys, as when rows move by less than their number."""
    rotary = table(rope, dtype)
    rotated = rotary.rotate(random_keys(60, dtype), 0)
    expected = torch.empty_like(rotated[7:])
    rotary.move_into(rotated[7:], 7, 0, expected)
    rotary.move_into(rotated[7:], 7, 0, rotated[:53])
    assert torch.equal(rotated[:53], expected)


def test_sixteen_bits_are_rounded_once():
    """Only the float32 result of 16-bit keys is rounded."""
    rotary = table(halves, torch.bfloat16)
    rotated = rotary.rotate(random_keys(200, torch.bfloat16), 40)
    exact, single = torch.empty(rotated.shape), torch.empty_like(rotated)
    rotary.unrotate_into(rotated, 40, exact)
    rotary.unrotate_into(rotated, 40, single)
    assert torch.equal(single, exact.to(torch.bfloat16))
    back = torch.empty_like(rotated)
    rotary.rotate_into(exact, 40, back)  # float32 in, 16 bits out: nothing is rounded in between
    torch.testing.assert_close(back, rotated, rtol=0, atol=1e-6)


def test_unrotated_elements_pass_unchanged():
    """The rest of a partly rotated key is copied."""
    rotary, keys = table(partial), random_keys(5)
    keys[:, :, 4:] = torch.inf
    out = torch.empty_like(keys)
    rotary.unrotate_into(rotary.rotate(keys, 3), 3, out)
    assert (out[:, :, 4:] == torch.inf).all()
    torch.testing.assert_close(out[:, :, :4], keys[:, :, :4], **close(1e-6))
