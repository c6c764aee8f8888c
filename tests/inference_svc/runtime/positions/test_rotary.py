"""Rotary tables reproduce a model's own embedding exactly."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inference_svc.runtime.positions.rotary import RotaryNotLinearError, RotaryTable, find_pairing
from inference_svc.runtime.positions.rotation import MAX_RUNS, element_runs
from tests.ropes import (
    DIM,
    SCATTERED,
    halves,
    interleaved,
    partial,
    partly_scaled,
    permuting,
    reordering,
    scaled,
    scattered,
)
from tests.sampled import sampled_cases

CPU = torch.device("cpu")


def table(rope, max_tokens=100_000, dtype=torch.float32, table_dtype=None):
    return RotaryTable(
        rope,
        find_pairing(rope, DIM, CPU),
        max_tokens=max_tokens,
        table_dtype=table_dtype or dtype,
        dtype=dtype,
        device=CPU,
    )


def random_keys(num_tokens, heads=3, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, heads, DIM, generator=generator).to(dtype)


def by_definition(rotary, keys, start):
    """Rotate element by element as the module docstring defines, in three rounded steps."""
    end = start + keys.shape[0]
    wide = keys.to(rotary._dtype)
    positions = torch.arange(start, end)
    dim = len(rotary.pairing.source)
    source, partner = (
        torch.tensor(side) for side in (rotary.pairing.source, rotary.pairing.partner)
    )
    factors = []
    for column in range(dim):  # C and S, one unit vector at a time
        unit = torch.zeros(1, 1, end - start, dim)
        unit[..., column] = 1
        factors.append(rotary._rope(unit, positions)[0, 0])
    turned = torch.stack(factors)  # [input, position, output]
    outputs = torch.arange(dim)
    cosines, sines = (turned[side, :, outputs].T[:, None] for side in (source, partner))
    sines = torch.where(source == partner, torch.zeros_like(sines), sines)
    cosines, sines = (t.to(rotary._table_dtype).to(rotary._dtype) for t in (cosines, sines))
    first, second = wide[..., source] * cosines, wide[..., partner] * sines
    return (first + second).to(keys.dtype)


ROPES = [
    halves,
    interleaved,
    permuting,
    partial,
    scaled,
    partly_scaled,
    reordering,
    scattered,
]
DTYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float16, torch.float16, torch.float16),
]


@pytest.mark.parametrize(("rope", "dtypes"), sampled_cases(ROPES, DTYPES, count=16, seed=1))
def test_bits_equal_the_definition(rope, dtypes):
    """In every dtype and pairing, also into strided places: two rounded products, one sum."""
    keys_dtype, dtype, table_dtype = dtypes
    rotary = table(rope, dtype=dtype, table_dtype=table_dtype)
    keys = random_keys(130, dtype=keys_dtype)
    expected = by_definition(rotary, keys, 900)
    kv = torch.full((3, 200, DIM), 9.0, dtype=keys_dtype)  # head-major, with rows around
    rotary.rotate_into(keys, 900, kv[:, 20:150].transpose(0, 1))
    assert torch.equal(kv[:, 20:150].transpose(0, 1), expected)
    assert torch.equal(rotary.rotate(keys, 900), expected)
    here = kv[:, 20:150].transpose(0, 1).copy_(keys)
    rotary.rotator(here, 900).rotate_in_place(here)
    assert torch.equal(here, expected)
    assert (kv[:, :20] == 9).all()
    assert (kv[:, 150:] == 9).all()


def test_a_fused_multiply_add_would_be_detected():
    """The keys of these tests distinguish three roundings from two."""
    rotary, keys = table(halves), random_keys(130)
    exact = halves(keys.double().transpose(0, 1)[None], torch.arange(900, 1030))[0].transpose(0, 1)
    assert not torch.equal(exact.float(), by_definition(rotary, keys, 900))


def test_a_rotator_can_be_used_for_other_keys():
    """One that was prepared once rotates any keys, layer by layer, in place or not."""
    rotary, keys = table(interleaved, dtype=torch.bfloat16), random_keys(40, dtype=torch.bfloat16)
    rotator, out = rotary.rotator(keys, 7), torch.empty_like(keys)
    for seed in (3, 4):
        others = random_keys(40, dtype=torch.bfloat16, seed=seed)
        expected = by_definition(rotary, others, 7)
        rotator.rotate_into(others, out)
        assert torch.equal(out, expected)
        rotator.rotate_in_place(others)
        assert torch.equal(others, expected)


def test_unrotated_elements_pass_unchanged():
    """Arithmetic would change some: infinity times a sine of zero is NaN."""
    keys = random_keys(5)
    keys[:, :, 4:] = torch.inf
    turned = table(partial).rotate(keys, 3)
    assert (turned[:, :, 4:] == torch.inf).all()
    assert turned[:, :, :4].isfinite().all()
    table(partial).rotator(keys, 3).rotate_in_place(keys)
    assert torch.equal(keys, turned)


def test_threads_do_not_share_intermediate_results():
    """Several threads that rotate other keys with the same table get their own results."""
    rotary = table(halves, dtype=torch.float32)
    keys = [random_keys(300, dtype=torch.bfloat16, seed=seed) for seed in range(4)]
    expected = [by_definition(rotary, one, 50) for one in keys]

    def turn(index):
        return all(torch.equal(rotary.rotate(keys[index], 50), expected[index]) for _ in range(50))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(turn, range(4)))


@pytest.mark.parametrize("num_pairs", [2, 32])
def test_usual_pairings_need_few_slices(num_pairs):
    """Halves, interleaved and permuting pairings are two strided runs; scattered ones are many."""
    dim = 2 * num_pairs
    pairings = (
        [*range(num_pairs, dim), *range(num_pairs)],
        [element ^ 1 for element in range(dim)],
        [*range(0, dim, 2), *range(1, dim, 2)],
    )
    for indices in pairings:
        runs = element_runs(indices)
        assert len(runs) <= 2
        found = torch.full((dim,), -1)
        for run in runs:
            found[run.outputs] = torch.arange(dim)[run.inputs]
        assert found.tolist() == indices
    assert len(element_runs(range(dim))) == 1
    assert len(element_runs(SCATTERED.tolist())) > MAX_RUNS


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("start", [0, 1000, 5000])
def test_tables_equal_the_function(rope, start):
    """With any pairing, also beyond the first table."""
    keys = torch.randn(7, 3, DIM, generator=torch.Generator().manual_seed(1))
    expected = rope(keys.transpose(0, 1)[None], torch.arange(start, start + 7))[0].transpose(0, 1)
    torch.testing.assert_close(table(rope).rotate(keys, start), expected, rtol=1e-6, atol=1e-6)


def test_halves_are_exact():
    """The usual embedding comes out bit by bit."""
    keys = torch.randn(9, 2, DIM, generator=torch.Generator().manual_seed(2))
    expected = halves(keys.transpose(0, 1)[None], torch.arange(30, 39))[0].transpose(0, 1)
    assert torch.equal(table(halves).rotate(keys, 30), expected)


def test_tables_stay_within_the_context_window():
    """The model's function is never called for positions beyond the window."""
    asked = []

    def watched(keys, positions):
        asked.append(int(positions.max()))
        return halves(keys, positions)

    table(watched, max_tokens=300).rotate(torch.zeros(1, 1, DIM), 299)
    assert max(asked) == 299


def pairs_and_a_third(keys, positions):
    """Rotate pairs, and add a part of a third element to one."""
    turned = interleaved(keys, positions)
    turned[..., 0] += positions[:, None].T * keys[..., -1]
    return turned


def one_element_twice(keys, positions):
    """Rotate pairs, one of which takes both of its outputs from one element."""
    turned = interleaved(keys, positions)
    turned[..., 1] = turned[..., 0]
    return turned


OTHERS = {
    "mixes all": lambda keys, _: keys.cumsum(-1),
    "copies one": lambda keys, _: keys[..., :1].expand_as(keys),
    "a ring": lambda keys, positions: keys + positions[:, None] * keys.roll(1, -1),
    "pairs and a third": pairs_and_a_third,
    "one element twice": one_element_twice,
}


def test_growing_tables_are_made_few_times():
    """Token by token, a sequence needs only powers of two."""
    asked = []

    def watched(keys, positions):
        asked.append(len(positions))
        return halves(keys, positions)

    rotary = table(watched)
    asked.clear()
    for position in range(1000, 2100, 5):
        rotary.rotate(torch.zeros(1, 1, DIM), position)
    assert asked == [1024, 2048, 4096]
    for most in (2048, 2049):
        table(watched).rotate(torch.zeros(1, 1, DIM), most - 1)
    assert [asked[-3], asked[-1]] == [2048, 4096]  # the other call finds the pairs
    whole = table(watched, max_tokens=300)
    asked.clear()
    for _ in range(2):
        whole.rotate(torch.zeros(1, 1, DIM), 299)
    assert asked == [300]


def test_a_fast_rotating_element_is_still_paired_with_itself():
    """First with itself, then with its partner: as at position 0, without rotation."""
    pairing = find_pairing(interleaved, DIM, CPU)
    assert list(pairing.source) == list(range(DIM))
    assert list(pairing.partner) == [element ^ 1 for element in range(DIM)]


@pytest.mark.parametrize("rope", OTHERS.values(), ids=OTHERS)
def test_other_functions_are_recognised(rope):
    """They are not taken for rotations of pairs."""
    with pytest.raises(RotaryNotLinearError):
        find_pairing(rope, DIM, CPU)
