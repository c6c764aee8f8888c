"""Tables that take a rotary embedding back, or move it to another position.

A pair of elements x[a], x[b] of a key becomes out[j] and out[mate] by a 2x2 matrix,

    out[j]    = x[a] * C[j]    + x[b] * S[j]
    out[mate] = x[b] * C[mate] + x[a] * S[mate]

whose determinant is 1 for a rotation, and more where the model scales its cosines and sines (yarn,
longrope). Its inverse, and the product of the matrix of a new position with the inverse of an old
one, are of the same form, so `rotation.Turn` applies them too: a moved key is read once, multiplied
in the tables' dtype and rounded once. Knows no layers and no slabs.
"""

import torch
from torch import Tensor

from inference_svc.runtime.positions.pairing import Pairing
from inference_svc.runtime.positions.rotation import ElementTake, Tables


class Inversion:
    """What the inverses of one pairing's rotations share."""

    def __init__(self, pairing: Pairing, width: int, device: torch.device) -> None:
        """Turn both permutations round.

        Args:
            pairing: both sides of it are permutations.
            width: leading elements that turn, as in `Tables`.
            device: of the tables.
        """
        by_source = _inverse(pairing.source[:width])
        by_partner = _inverse(pairing.partner[:width])
        mates = [by_partner[element] for element in pairing.source[:width]]
        self._by_source = ElementTake(by_source, device)
        self._by_partner = ElementTake(by_partner, device)
        self._mates = ElementTake(mates, device)
        self._same = ElementTake(range(width), device)

    def back(self, tables: Tables, start: int, end: int) -> Tables:
        """Return tables for `end - start` keys that undo those of positions [start, end)."""
        cosines, sines = tables.at(start, end)[:2]
        determinants = _determinants(
            cosines, sines, self._mates.taken(cosines), self._mates.taken(sines)
        )
        return Tables(
            self._by_partner.taken(cosines / determinants),
            self._by_source.taken(-sines / determinants),
            self._by_source,
            self._by_partner,
            tables.width,
        )

    def move(self, tables: Tables, old: int, new: int, num_tokens: int) -> Tables:
        """Return tables that move keys at positions from `old` on to positions from `new` on."""
        cosines, sines = tables.at(old, old + num_tokens)[:2]
        new_cosines, new_sines = tables.at(new, new + num_tokens)[:2]
        mate_cosines, mate_sines = self._mates.taken(cosines), self._mates.taken(sines)
        determinants = _determinants(cosines, sines, mate_cosines, mate_sines)
        return Tables(
            (new_cosines * mate_cosines).sub_(new_sines * mate_sines).div_(determinants),
            (new_sines * cosines).sub_(new_cosines * sines).div_(determinants),
            self._same,
            self._mates,
            tables.width,
        )


def _determinants(
    cosines: Tensor, sines: Tensor, mate_cosines: Tensor, mate_sines: Tensor
) -> Tensor:
    """Return those of the matrices by output, [tokens, 1, width]; equal for both of a pair."""
    return (cosines * mate_cosines).sub_(sines * mate_sines)


def _inverse(permutation: tuple[int, ...]) -> list[int]:
    """Return where each index stands."""
    places = [0] * len(permutation)
    for place, index in enumerate(permutation):
        places[index] = place
    return places
