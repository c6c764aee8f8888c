"""The arithmetic of re-embedding: tables of some positions applied to keys, in few torch calls.

Per element j of a key, out[j] = x[source[j]] * C[j] + x[partner[j]] * S[j]. Which element meets
which is a permutation; all that occur are a few strided slices, so nothing is permuted: products of
slices are written where they belong. Two products rounded, then one sum rounded, as models do it: a
fused multiply-add would differ in the last bit.

A pair of elements x[a], x[b] of a key becomes out[j] and out[mate] by a 2x2 matrix,

    out[j]    = x[a] * C[j]    + x[b] * S[j]
    out[mate] = x[b] * C[mate] + x[a] * S[mate]

whose determinant is 1 for a rotation, and more where the model scales its cosines and sines (yarn,
longrope). Its inverse, and the product of the matrix of a new position with the inverse of an old
one, are of the same form (`Inversion` makes their tables), so `Turn` applies them too: a moved key
is read once, multiplied in the tables' dtype and rounded once.

Owns views; knows no layers and no working KV.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

MAX_RUNS = 8  # of a permutation; with more, one gather is cheaper than that many slices


@dataclass(frozen=True)
class Pairing:
    """Which two elements of a key each element of its rotation is made of.

    Attributes:
        source: index per output element; its factor at position 0 is the scale.
        partner: index of the other member; equals source where the element is only scaled.
    """

    source: tuple[int, ...]
    partner: tuple[int, ...]


class ElementRun(NamedTuple):
    """Elements `outputs` of a result are elements `inputs` of a key, in this order."""

    outputs: slice
    inputs: slice


def element_runs(indices: Sequence[int]) -> list[ElementRun]:
    """Divide the permutation output -> input index into the fewest strided slices we find.

    Halves and permuting embeddings give runs of adjacent outputs, interleaved ones two runs of
    every other output.
    """
    return min((list(_runs_of_step(indices, step)) for step in (1, 2)), key=len)


def _runs_of_step(indices: Sequence[int], out_step: int) -> Iterator[ElementRun]:
    """Divide so that the outputs of a run are `out_step` apart."""
    for residue in range(out_step):
        inputs = indices[residue::out_step]
        begin = 0
        while begin < len(inputs):
            end = begin + 1
            step = max(1, inputs[end] - inputs[begin]) if end < len(inputs) else 1
            while end < len(inputs) and inputs[end] - inputs[end - 1] == step:
                end += 1
            first_output = residue + begin * out_step
            yield ElementRun(
                slice(first_output, first_output + (end - begin) * out_step, out_step),
                slice(inputs[begin], inputs[end - 1] + 1, step),
            )
            begin = end


class ElementTake:
    """Multiplies permuted elements with a table: by slices if few, else by a gather.

    Attributes:
        indices: [outputs] int64, which input each output is, on the device.
    """

    def __init__(self, indices: Sequence[int], device: torch.device) -> None:
        """Store the permutation output -> input index."""
        runs = element_runs(indices)
        self._runs = runs if len(runs) <= MAX_RUNS else []
        self.indices = torch.tensor(indices, device=device)

    @property
    def is_identity(self) -> bool:
        """Whether nothing is permuted."""
        return len(self._runs) == 1

    def cuts(self, table: Tensor) -> list[tuple[slice, Tensor, slice]]:
        """Cut a table, [n, 1, width]: (elements of keys, their factors, where products belong)."""
        return [(run.inputs, table[..., run.outputs], run.outputs) for run in self._runs]

    def gathered(self, keys: Tensor) -> Tensor:
        """Return the permuted elements of [..., width]; only if there are no cuts."""
        return keys.index_select(-1, self.indices)

    def taken(self, table: Tensor) -> Tensor:
        """Return permuted elements of [..., width]; slices are ten times as fast as a gather."""
        if not self._runs:
            return self.gathered(table)
        out = torch.empty_like(table)
        for run in self._runs:
            out[..., run.outputs] = table[..., run.inputs]
        return out


class Tables(NamedTuple):
    """Factors of positions [0, tokens) and which elements they belong to.

    Attributes:
        cosines: [tokens, 1, width].
        sines: [tokens, 1, width].
        source: which elements the cosines multiply.
        partner: which elements the sines multiply.
        width: leading elements that turn; those after them are passed on as they are.
    """

    cosines: Tensor
    sines: Tensor
    source: ElementTake
    partner: ElementTake
    width: int

    @property
    def num_tokens(self) -> int:
        """Number of positions."""
        return self.cosines.shape[0]

    def at(self, start: int, end: int) -> "Tables":
        """View the factors of positions [start, end)."""
        return self._replace(cosines=self.cosines[start:end], sines=self.sines[start:end])

    def of(self, positions: Tensor) -> "Tables":
        """Pick the factors of positions [n], in their order."""
        return self._replace(cosines=self.cosines[positions], sines=self.sines[positions])


class EmbedKernel(Protocol):
    """Embeds keys while it writes them where they belong: one pass instead of `Turn`'s several."""

    def __call__(self, keys: Tensor, tables: Tables, region: Tensor, slots: Tensor) -> None:
        """Write keys to their slots as `Turn.into` turns them, to the bit; no other slot changes.

        Args:
            keys: [n, heads, dim] before RoPE, contiguous.
            tables: factors of their very positions.
            region: [slots, heads, dim], of the keys' dtype; slots and heads of any stride.
            slots: [n] int64, where each token's keys go.
        """


class Spare(NamedTuple):
    """Scratch of a turn, each [n, heads, width].

    Attributes:
        products: products with the sines.
        sums: sums in the tables' dtype, before they are rounded to the keys'; None: they need not.
        staged: the keys in the tables' dtype; None: they are of it, and are read where they are.
    """

    products: Tensor
    sums: Tensor | None = None
    staged: Tensor | None = None


class Turn:
    """Keys turned at some positions, layer after layer: everything but the keys is cut once.

    Invariant: what it writes to meanwhile belongs to the thread that made it.
    """

    def __init__(self, tables: Tables, spare: Spare) -> None:
        """Cut tables and scratch.

        Args:
            tables: factors of these very positions.
            spare: scratch to write intermediate results to.
        """
        self._products, self._sums, self._staged = spare
        self._tables = tables
        self._source_cuts = tables.source.cuts(tables.cosines)
        self._partner_cuts = [
            (inputs, table, self._products[..., outputs])
            for inputs, table, outputs in tables.partner.cuts(tables.sines)
        ]

    def over(self, keys: Tensor) -> None:
        """Turn keys where they are, [n, heads, dim] of any strides.

        They are staged, or their sources are not permuted: else some would be lost on the way.
        """
        turning = self._turning(keys)
        self._turn(turning, turning)

    def into(self, keys: Tensor, out: Tensor) -> None:
        """Write the keys after RoPE to `out`, of their shape and any strides, not over the keys."""
        width = self._tables.width
        self._turn(self._turning(keys), self._turning(out))
        if width < keys.shape[-1]:
            out[..., width:].copy_(keys[..., width:])

    def _turning(self, keys: Tensor) -> Tensor:
        width = self._tables.width
        return keys if width == keys.shape[-1] else keys[..., :width]

    def _turn(self, keys: Tensor, out: Tensor) -> None:
        """Turn [n, heads, width]; the sines come first: after them keys may be overwritten."""
        factors, sums = keys, out if self._sums is None else self._sums
        if self._staged is not None:
            factors = self._staged.copy_(keys)
        for inputs, table, products in self._partner_cuts:
            torch.mul(factors[..., inputs], table, out=products)
        if not self._partner_cuts:
            torch.mul(
                self._tables.partner.gathered(factors), self._tables.sines, out=self._products
            )
        self._multiply_source(factors, sums)
        sums.add_(self._products)
        if sums is not out:
            out.copy_(sums)

    def _multiply_source(self, factors: Tensor, out: Tensor) -> None:
        source, cosines = self._tables.source, self._tables.cosines
        if source.is_identity:  # as in most models
            torch.mul(factors, cosines, out=out)
            return
        for inputs, table, outputs in self._source_cuts:
            torch.mul(factors[..., inputs], table, out=out[..., outputs])
        if not self._source_cuts:
            torch.mul(source.gathered(factors), cosines, out=out)


class Inversion:
    """What the inverses of one pairing's rotations share."""

    def __init__(self, pairing: Pairing, width: int, device: torch.device) -> None:
        """Turn both permutations round.

        Args:
            pairing: both sides of it are permutations.
            width: leading elements that turn, as in `Tables`.
            device: where the tables are.
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
    """Return the inverse of a permutation output -> input: input -> output."""
    inverse = [0] * len(permutation)
    for output, index in enumerate(permutation):
        inverse[index] = output
    return inverse
