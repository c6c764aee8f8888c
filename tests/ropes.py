"""Rotary embeddings of every known kind: functions of keys [..., DIM] and positions."""

import torch

DIM = 16


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
    """Take interleaved pairs, return halves."""
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
    """Use cosines and sines larger than 1, as yarn and longrope do."""
    return halves(keys, positions) * 1.25


def partly_scaled(keys, positions):
    """Turn some elements, and scale the others."""
    turned = partial(keys, positions)
    return torch.cat((turned[..., :4], turned[..., 4:] * 1.25), dim=-1)


def reordering(keys, positions):
    """Turn some elements, and swap two others."""
    turned = partial(keys, positions)
    return torch.cat((turned[..., :-2], turned[..., -1:], turned[..., -2:-1]), dim=-1)


SCATTERED = torch.randperm(DIM, generator=torch.Generator().manual_seed(5))


def scattered(keys, positions):
    """Rotate pairs in an arbitrary order, as no real model does."""
    return halves(keys[..., SCATTERED], positions)
