"""Re-embedding: applies the rotary tables of given positions to keys, in few torch calls.

For element j of a key, out[j] = x[source[j]] * C[j] + x[partner[j]] * S[j]. `source` and `partner`
are permutations. All that occur consist of a few strided slices, so elements are not permuted:
products of slices are written to their place. Two products are rounded, then their sum is rounded,
as models do it: a fused multiply-add would differ in the last bit.

A pair of elements x[a], x[b] of a key becomes out[j] and out[mate] by a 2x2 matrix,

    out[j]    = x[a] * C[j]    + x[b] * S[j]
    out[mate] = x[b] * C[mate] + x[a] * S[mate]

whose determinant is 1 for a rotation, and larger where the model scales its cosines and sines
(yarn, longrope). Its inverse, and the product of a new position's matrix with the inverse of an old
position's, have the same form (`Inversion` makes their tables), so a `Rotator` applies them too: a
moved key is read once, multiplied in the tables' dtype and rounded once.

Owns views; knows no layers and no working KV.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inference_svc.runtime.kv.layer_tensors import TokenRoom

MAX_RUNS = 8  # most slices of a permutation; with more, one gather is cheaper


@dataclass(frozen=True)
class Pairing:
    """The two elements of a key from which each element of the rotated key is computed.

    Attributes:
        source: input index by output element; multiplied by the cosine.
        partner: input index by output element; multiplied by the sine. Equals `source` where the
            element is only scaled.
    """

    source: tuple[int, ...]
    partner: tuple[int, ...]


class ElementRun(NamedTuple):
    """A run of a permutation: elements `outputs` of the result are elements `inputs` of a key."""

    outputs: slice
    inputs: slice


def element_runs(indices: Sequence[int]) -> list[ElementRun]:
    """Divide a permutation (input index by output) into few strided slices.

    Embeddings that rotate halves, or permute, give runs of adjacent outputs; interleaved ones give
    two runs of every other output.
    """
    return min((list(_runs_of_step(indices, step)) for step in (1, 2)), key=len)


def _runs_of_step(indices: Sequence[int], out_step: int) -> Iterator[ElementRun]:
    """Yield runs whose outputs are `out_step` apart."""
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


class ElementPermutation:
    """A permutation of the elements of keys: by slices if they are few, else by a gather.

    Attributes:
        indices: [outputs] int64 on the device, the input index of each output.
    """

    def __init__(self, indices: Sequence[int], device: torch.device) -> None:
        """Store the permutation: the input index of each output."""
        runs = element_runs(indices)
        self._runs = runs if len(runs) <= MAX_RUNS else []
        self.indices = torch.tensor(indices, device=device)

    @property
    def is_identity(self) -> bool:
        """Whether the permutation is a single slice, so that elements stay in their order."""
        return len(self._runs) == 1

    def cuts(self, table: Tensor) -> list[tuple[slice, Tensor, slice]]:
        """Cut a table, [n, 1, width], into (elements of keys, their factors, output elements).

        Empty if the permutation has too many slices: then `gather` is used.
        """
        return [(run.inputs, table[..., run.outputs], run.outputs) for run in self._runs]

    def gather(self, keys: Tensor) -> Tensor:
        """Return the permuted elements of [..., width], by a gather."""
        return keys.index_select(-1, self.indices)

    def permute(self, table: Tensor) -> Tensor:
        """Return the permuted elements of [..., width]; slices take a tenth of a gather's time."""
        if not self._runs:
            return self.gather(table)
        out = torch.empty_like(table)
        for run in self._runs:
            out[..., run.outputs] = table[..., run.inputs]
        return out


class Tables(NamedTuple):
    """Cosines and sines of positions [0, tokens), and the elements that they multiply.

    Attributes:
        cosines: [tokens, 1, width].
        sines: [tokens, 1, width].
        source: the elements that the cosines multiply.
        partner: the elements that the sines multiply.
        width: number of leading elements that are rotated; later ones are copied unchanged.
    """

    cosines: Tensor
    sines: Tensor
    source: ElementPermutation
    partner: ElementPermutation
    width: int

    @property
    def num_tokens(self) -> int:
        """Number of positions."""
        return self.cosines.shape[0]

    def at(self, start: int, end: int) -> "Tables":
        """View the factors of positions [start, end)."""
        return self._replace(cosines=self.cosines[start:end], sines=self.sines[start:end])

    def of(self, positions: Tensor) -> "Tables":
        """Return the factors of positions, [n], in their order."""
        return self._replace(cosines=self.cosines[positions], sines=self.sines[positions])


class EmbedKernel(Protocol):
    """Embeds keys and writes them to their slots in one pass, where a `Rotator` needs several."""

    def __call__(self, keys: Tensor, tables: Tables, region: Tensor, slots: Tensor) -> None:
        """Write rotated keys to their slots; no other slot changes.

        The result is the same to the bit as that of `Rotator.rotate_into`.

        Args:
            keys: [n, heads, dim] before RoPE, contiguous.
            tables: the factors of exactly their positions.
            region: [slots, heads, dim], of the keys' dtype; slots and heads of any stride.
            slots: [n] int64, the slot of each token.
        """


class TokenCopy(NamedTuple):
    """Tokens of one component that are to be copied out of slots, and embedded if they are keys.

    Attributes:
        slots: [num_slots, block_tokens, heads, dim], a component of all slots.
        distances: [n] int64, by token, its distance from the first token of slot 0 in elements;
            within the slots.
        room: where they go, in tensors of the same dtype and of any strides.
        tables: the factors of exactly the tokens' positions; None: they are copied as they are.
    """

    slots: Tensor
    distances: Tensor
    room: TokenRoom
    tables: Tables | None


class LoadKernel(Protocol):
    """Copies tokens out of slots in the CPU's memory, and embeds keys on the way."""

    def __call__(self, copies: Sequence[TokenCopy]) -> None:
        """Make these copies; no other slot changes.

        Embedded keys have the bits of `Rotator.rotate_into`.
        """


@dataclass(frozen=True)
class LoadKernels:
    """The kernels that a model's KV is loaded by, of which it has one at most; else torch loads it.

    Attributes:
        embed: for a device, where keys are copied to scratch memory first.
        load: for the CPU.
    """

    embed: EmbedKernel | None = None
    load: LoadKernel | None = None


BY_TORCH = LoadKernels()


class RotationScratch(NamedTuple):
    """Scratch memory of a rotator, each [n, heads, width].

    Attributes:
        products: products with the sines.
        sums: sums in the tables' dtype, before they are rounded to the keys' dtype; None: the
            dtypes are the same.
        staged: the keys in the tables' dtype; None: they are read in place.
    """

    products: Tensor
    sums: Tensor | None = None
    staged: Tensor | None = None


class Rotator:
    """Rotates keys at fixed positions, layer after layer; tables and scratch are cut only once.

    Invariant: its scratch belongs to the thread that made it.
    """

    def __init__(self, tables: Tables, scratch: RotationScratch) -> None:
        """Cut tables and scratch.

        Args:
            tables: the factors of exactly these positions.
            scratch: memory for intermediate results.
        """
        self._products, self._sums, self._staged = scratch
        self._tables = tables
        self._source_cuts = tables.source.cuts(tables.cosines)
        self._partner_cuts = [
            (inputs, table, self._products[..., outputs])
            for inputs, table, outputs in tables.partner.cuts(tables.sines)
        ]

    def rotate_in_place(self, keys: Tensor) -> None:
        """Rotate keys in place, [n, heads, dim] with any strides.

        The keys have to be staged, or the source not permuted: otherwise elements would be
        overwritten before they are read.
        """
        rotated = self._rotated_part(keys)
        self._rotate(rotated, rotated)

    def rotate_into(self, keys: Tensor, out: Tensor) -> None:
        """Write rotated keys to `out`, of the same shape and any strides; they must not overlap."""
        width = self._tables.width
        self._rotate(self._rotated_part(keys), self._rotated_part(out))
        if width < keys.shape[-1]:
            out[..., width:].copy_(keys[..., width:])

    def _rotated_part(self, keys: Tensor) -> Tensor:
        width = self._tables.width
        return keys if width == keys.shape[-1] else keys[..., :width]

    def _rotate(self, keys: Tensor, out: Tensor) -> None:
        """Rotate [n, heads, width]; the sines come first, as keys may be overwritten after them."""
        factors, sums = keys, out if self._sums is None else self._sums
        if self._staged is not None:
            factors = self._staged.copy_(keys)
        for inputs, table, products in self._partner_cuts:
            torch.mul(factors[..., inputs], table, out=products)
        if not self._partner_cuts:
            torch.mul(self._tables.partner.gather(factors), self._tables.sines, out=self._products)
        self._multiply_source(factors, sums)
        sums.add_(self._products)
        if sums is not out:
            out.copy_(sums)

    def _multiply_source(self, factors: Tensor, out: Tensor) -> None:
        source, cosines = self._tables.source, self._tables.cosines
        if source.is_identity:  # true of most models
            torch.mul(factors, cosines, out=out)
            return
        for inputs, table, outputs in self._source_cuts:
            torch.mul(factors[..., inputs], table, out=out[..., outputs])
        if not self._source_cuts:
            torch.mul(source.gather(factors), cosines, out=out)


class Inversion:
    """Makes tables that undo the rotations of one pairing, or move keys to other positions."""

    def __init__(self, pairing: Pairing, width: int, device: torch.device) -> None:
        """Invert both permutations.

        Args:
            pairing: the pairing, both sides of which are permutations.
            width: number of leading elements that are rotated, as in `Tables`.
            device: the device of the tables.
        """
        by_source = _inverse(pairing.source[:width])
        by_partner = _inverse(pairing.partner[:width])
        mates = [by_partner[element] for element in pairing.source[:width]]
        self._by_source = ElementPermutation(by_source, device)
        self._by_partner = ElementPermutation(by_partner, device)
        self._mates = ElementPermutation(mates, device)
        self._same = ElementPermutation(range(width), device)

    def undo(self, tables: Tables, start: int, end: int) -> Tables:
        """Return tables that undo the rotations of positions [start, end)."""
        cosines, sines = tables.at(start, end)[:2]
        determinants = _determinants(
            cosines, sines, self._mates.permute(cosines), self._mates.permute(sines)
        )
        return Tables(
            self._by_partner.permute(cosines / determinants),
            self._by_source.permute(-sines / determinants),
            self._by_source,
            self._by_partner,
            tables.width,
        )

    def move(self, tables: Tables, old: int, new: int, num_tokens: int) -> Tables:
        """Return tables that move `num_tokens` keys from positions `old` ... to `new` ..."""
        cosines, sines = tables.at(old, old + num_tokens)[:2]
        new_cosines, new_sines = tables.at(new, new + num_tokens)[:2]
        mate_cosines, mate_sines = self._mates.permute(cosines), self._mates.permute(sines)
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
    """Return the matrices' determinants by output, [tokens, 1, width]; a pair has the same one."""
    return (cosines * mate_cosines).sub_(sines * mate_sines)


def _inverse(permutation: tuple[int, ...]) -> list[int]:
    """Return the inverse of a permutation: the output index of each input."""
    inverse = [0] * len(permutation)
    for output, index in enumerate(permutation):
        inverse[index] = output
    return inverse
