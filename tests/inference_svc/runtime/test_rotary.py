"""Rotary tables repeat a model's own embedding exactly."""

import pytest
import torch

from inference_svc.runtime.rotary import RotaryNotLinearError, RotaryTable, find_pairing

DIM = 16
CPU = torch.device("cpu")


def angles(positions, num_pairs):
    return positions[:, None].float() / 10_000 ** (torch.arange(num_pairs) / num_pairs)


def halves(keys, positions):
    angle = torch.cat([angles(positions, DIM // 2)] * 2, dim=-1)
    first, second = keys.chunk(2, dim=-1)
    return keys * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()


def interleaved(keys, positions):
    angle = angles(positions, DIM // 2)
    even, odd = keys[..., ::2], keys[..., 1::2]
    turned = (even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin())
    return torch.stack(turned, dim=-1).flatten(-2)


def permuting(keys, positions):
    """Interleaved in, halves out."""
    return halves(torch.cat((keys[..., ::2], keys[..., 1::2]), dim=-1), positions)


def partial(keys, positions):
    angle = angles(positions, 2)
    first, second, rest = keys[..., :2], keys[..., 2:4], keys[..., 4:]
    turned = (
        first * angle.cos() - second * angle.sin(),
        second * angle.cos() + first * angle.sin(),
    )
    return torch.cat((*turned, rest), dim=-1)


def scaled(keys, positions):
    return halves(keys, positions) * 1.25


def table(rope, max_tokens=100_000):
    pairing = find_pairing(rope, DIM, CPU)
    single = torch.float32
    return RotaryTable(
        rope, pairing, max_tokens=max_tokens, table_dtype=single, dtype=single, device=CPU
    )


@pytest.mark.parametrize("rope", [halves, interleaved, permuting, partial, scaled])
@pytest.mark.parametrize("start", [0, 1000, 5000])
def test_rotation_equals_the_function(rope, start):
    """Whatever the pairing, tables give what the function gives, also beyond the first table."""
    keys = torch.randn(7, 3, DIM, generator=torch.Generator().manual_seed(1))
    expected = rope(keys.transpose(0, 1)[None], torch.arange(start, start + 7))[0].transpose(0, 1)
    torch.testing.assert_close(table(rope).rotate(keys, start), expected, rtol=1e-6, atol=1e-6)


def test_halves_are_exact():
    """The usual embedding comes out bit by bit."""
    keys = torch.randn(9, 2, DIM, generator=torch.Generator().manual_seed(2))
    expected = halves(keys.transpose(0, 1)[None], torch.arange(30, 39))[0].transpose(0, 1)
    assert torch.equal(table(halves).rotate(keys, 30), expected)


def test_tables_stay_within_the_context_window():
    """The model's function is never asked for positions beyond the window."""
    asked = []

    def watched(keys, positions):
        asked.append(int(positions.max()))
        return halves(keys, positions)

    table(watched, max_tokens=300).rotate(torch.zeros(1, 1, DIM), 299)
    assert max(asked) == 299


@pytest.mark.parametrize(
    "rope",
    [lambda keys, _: keys.cumsum(-1), lambda keys, _: keys[..., :1].expand_as(keys)],
    ids=["mixes all", "copies one"],
)
def test_other_functions_are_recognised_as_such(rope):
    """What is no rotation of pairs is not taken for one."""
    with pytest.raises(RotaryNotLinearError):
        find_pairing(rope, DIM, CPU)
