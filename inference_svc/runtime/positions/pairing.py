"""Pairing: which elements of a key a rotary embedding turns together.

Found by sending unit vectors through the model's own function, so no convention (halves,
interleaved, permuting, partial) is assumed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Applies the model's own RoPE to keys [1, heads, n, dim] (float32) at n positions.
Rope = Callable[[Tensor, Tensor], Tensor]

PROBE_POSITIONS = (0, 1, 2, 3, 5, 8, 13)  # among these no turning pair has only sines of zero


class RotaryNotLinearError(Exception):
    """The apply function is not a rotation of pairs; the model needs another recipe."""


@dataclass(frozen=True)
class Pairing:
    """Which two elements of a key each element of its rotation is made of.

    Attributes:
        source: index per output element; its factor at position 0 is the scale.
        partner: index of the other member; equals source where the element is only scaled.
    """

    source: tuple[int, ...]
    partner: tuple[int, ...]


@torch.no_grad()
def find_pairing(rope: Rope, dim: int, device: torch.device) -> Pairing:
    """Find the pairing of `rope` over keys of `dim` elements.

    Raises:
        RotaryNotLinearError: if an output element depends on more than two inputs, or pairs do not
            close.
    """
    positions = torch.tensor(PROBE_POSITIONS, device=device)
    units = torch.eye(dim, device=device)[None, :, None, :].expand(1, dim, len(positions), dim)
    answer = rope(units, positions)[0].cpu()  # [input, position, output]
    used = (answer != 0).any(dim=1).T  # [output, input]; what is not used is an exact 0
    source = answer[:, 0, :].abs().argmax(dim=0)  # at position 0 only the source counts
    partner = source.clone()
    for output in range(dim):
        others = [int(i) for i in used[output].nonzero().flatten() if int(i) != int(source[output])]
        if len(others) > 1:
            raise RotaryNotLinearError(f"element {output} is made of {len(others) + 1} elements")
        if others:
            partner[output] = others[0]
    pairs = {(min(a, b), max(a, b)) for a, b in zip(source.tolist(), partner.tolist(), strict=True)}
    sides = (sorted(source.tolist()), sorted(partner.tolist()))
    is_closed = sides == (list(range(dim)),) * 2
    if not is_closed or sum(2 if a != b else 1 for a, b in pairs) != dim:
        raise RotaryNotLinearError("its elements do not form pairs")
    return Pairing(tuple(source.tolist()), tuple(partner.tolist()))
