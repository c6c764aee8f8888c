"""The kernel that embeds loaded keys, run by Triton's interpreter: the bits of torch."""

import pytest
import torch

from inference_svc.runtime.cuda.key_rotation import PROGRAM_ITEMS, embed_on_device, rows_of_program
from inference_svc.runtime.positions.rotary import RotaryTable, find_pairing
from tests.inference_svc.runtime.positions.test_rotary import DTYPES, ROPES, random_keys, table
from tests.interpreted import rounding_as_a_gpu  # noqa: F401 - a fixture
from tests.ropes import DIM, halves, partial
from tests.sampled import sampled_cases

CPU = torch.device("cpu")
START = 900
UNTOUCHED = 9.0


def embed_slots(rotary, keys, start, region, slots):
    """Embed with the kernel; return these slots, after checking that all others are unchanged."""
    region.fill_(UNTOUCHED)
    embed_on_device(keys, rotary.tables(start, len(keys)), region, torch.tensor(slots))
    others = [slot for slot in range(len(region)) if slot not in set(slots)]
    assert (region[others] == UNTOUCHED).all()
    return region[slots]


@pytest.mark.usefixtures("rounding_as_a_gpu")
@pytest.mark.parametrize(("rope", "dtypes"), sampled_cases(ROPES, DTYPES, count=12, seed=1))
def test_bits_equal_those_of_torch(rope, dtypes):
    """Of halves, interleaved, partial, scaled, permuted: in every dtype, into any slots."""
    keys_dtype, dtype, table_dtype = dtypes
    rotary = table(rope, dtype=dtype, table_dtype=table_dtype)
    keys = random_keys(45, dtype=keys_dtype)
    region = torch.empty(100, 3, DIM, dtype=keys_dtype)
    slots = torch.randperm(100, generator=torch.Generator().manual_seed(3))[:45].tolist()
    found = embed_slots(rotary, keys, START, region, slots)
    assert torch.equal(found, rotary.rotate(keys, START))


@pytest.mark.parametrize("rope", [halves, partial])
def test_slots_and_heads_may_have_any_strides(rope):
    """For example latents beside each other, and KV whose heads are contiguous."""
    rotary, keys = table(rope), random_keys(20)
    by_heads = torch.empty(3, 40, DIM).transpose(0, 1)
    beside_others = torch.full((40, 3, DIM + 5), 4.0)[..., 5:]
    for region in (by_heads, beside_others):
        found = embed_slots(rotary, keys, 7, region, list(range(39, 19, -1)))
        assert torch.equal(found, rotary.rotate(keys, 7))


@pytest.mark.parametrize(("num_tokens", "heads"), [(1, 1), (1, 3), (43, 3), (128, 1), (129, 1)])
def test_programs_may_have_fewer_keys_than_they_hold(num_tokens, heads):
    """One key, and numbers around a program's size."""
    assert rows_of_program(DIM) == PROGRAM_ITEMS // DIM == 128
    rotary, keys = table(halves), random_keys(num_tokens, heads=heads)
    region = torch.empty(num_tokens + 2, heads, DIM)
    found = embed_slots(rotary, keys, 0, region, list(range(1, num_tokens + 1)))
    assert torch.equal(found, rotary.rotate(keys, 0))


def test_elements_need_not_be_a_power_of_two():
    """A head of 12: elements beyond it are ignored."""

    def rope(keys, positions):
        angle = positions[:, None].float() / 10.0 ** torch.arange(6)
        first, second = keys.chunk(2, dim=-1)
        cosines, sines = angle.cos(), angle.sin()
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        return torch.cat(turned, dim=-1)

    rotary = RotaryTable(
        rope,
        find_pairing(rope, 12, CPU),
        max_tokens=100,
        table_dtype=torch.float32,
        dtype=torch.float32,
        device=CPU,
    )
    keys = torch.randn(30, 2, 12)
    found = embed_slots(rotary, keys, 3, torch.empty(31, 2, 12), list(range(30)))
    assert torch.equal(found, rotary.rotate(keys, 3))
