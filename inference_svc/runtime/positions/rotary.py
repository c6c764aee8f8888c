"""RotaryTable: a rotary embedding compiled to tables, to re-embed stored keys at any position.

Every rotary embedding known so far (halves, interleaved, permuting, partial, complex) computes for
each element j of a key

    out[j] = x[source[j]] * C[position, j] + x[partner[j]] * S[position, j]

`find_pairing` finds `source` and `partner` by sending unit vectors through the model's own
function, so no convention is assumed. C and S are found by sending the indicator vector of the
first members of all pairs, and that of the second ones, through the same function: products with 0
and 1 are exact, and so are the tables. Owns the tables only; the arithmetic is in `rotation.py`.
Knows no layers and no working KV.

Invariant: `rotate_into` repeats the model's own arithmetic, element by element, in the same dtypes.
Calibration checks it against keys that the model has rotated itself. Models that multiply complex
numbers fuse two of its roundings: there float32 keys differ in the last bit.
"""

import threading
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from inference_svc.runtime.memory import ThreadScratch
from inference_svc.runtime.positions.rotation import (
    ElementPermutation,
    Inversion,
    Pairing,
    RotationScratch,
    Rotator,
    Tables,
)

# Applies the model's own RoPE to keys [1, heads, n, dim] (float32) at n positions.
Rope = Callable[[Tensor, Tensor], Tensor]

PROBE_POSITIONS = (0, 1, 2, 3, 5, 8, 13)  # no rotated pair has a sine of zero at all of these
FIRST_TABLE_TOKENS = 1024


class RotaryNotLinearError(Exception):
    """The rotary function is not a rotation of pairs of elements."""


class RotaryTable:
    """The tables C and S of one rotary embedding, which grow on demand.

    Every method may be called from any thread: longer tables replace the old ones under a lock.
    """

    def __init__(
        self,
        rope: Rope,
        pairing: Pairing,
        *,
        max_tokens: int,
        table_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Store the recipe.

        Args:
            rope: the model's own RoPE.
            pairing: the pairs of elements that this RoPE rotates.
            max_tokens: number of tokens of the context window; the model's RoPE is not called
                beyond it, where some change their frequencies.
            table_dtype: dtype to which the model rounds cosines and sines.
            dtype: dtype in which the model multiplies; results are cast back to the keys' dtype.
            device: where keys are rotated.
        """
        self.pairing = pairing
        self._table_dtype = table_dtype
        self._dtype = dtype
        self._rope = rope
        self._max_tokens = max_tokens
        self._device = device
        self._scratch = ThreadScratch(device, dtype)
        self._lock = threading.Lock()
        self._tables: Tables | None = None

    @property
    def signature(self) -> str:
        """A description of what loading does to stored bytes; the fingerprint has frequencies."""
        return f"{self.pairing.source}{self.pairing.partner}{self._table_dtype}{self._dtype}"

    def with_dtypes(self, table_dtype: torch.dtype, dtype: torch.dtype) -> "RotaryTable":
        """Return a table of the same rotation that computes in other dtypes."""
        return RotaryTable(
            self._rope,
            self.pairing,
            max_tokens=self._max_tokens,
            table_dtype=table_dtype,
            dtype=dtype,
            device=self._device,
        )

    def as_rope(self) -> Rope:
        """Return the same embedding as a function of these tables, which does not run the model.

        The tables are computed now, up to the end of the context window.
        """
        self._tables_to(self._max_tokens)

        def rope(keys: Tensor, positions: Tensor) -> Tensor:
            by_token = keys[0].transpose(0, 1)
            rotated = torch.empty_like(by_token)
            self._apply(self._tables_to(self._max_tokens).of(positions), by_token, rotated)
            return rotated.transpose(0, 1)[None]

        return rope

    def rotate(self, keys: Tensor, start: int) -> Tensor:
        """Return `keys`, [n, kv_heads, dim] before RoPE, embedded at positions from `start` on."""
        rotated = torch.empty_like(keys)
        self.rotate_into(keys, start, rotated)
        return rotated

    def rotate_into(self, keys: Tensor, start: int, out: Tensor) -> None:
        """Write keys embedded at positions from `start` on to `out`.

        If `out` has another dtype than the keys, this computes in float32 at least, and rounds
        once.

        Args:
            keys: [n, kv_heads, dim], before RoPE.
            start: position of the first key.
            out: of the same shape and any strides; must not overlap the keys.
        """
        if out.dtype == keys.dtype:
            self.rotator(keys, start).rotate_into(keys, out)
        elif self.wide is not self:
            self.wide.rotate_into(keys, start, out)
        else:
            self._apply(self.tables(start, keys.shape[0]), keys, out)

    def tables(self, start: int, num_tokens: int) -> Tables:
        """Return the factors of `num_tokens` positions from `start` on."""
        end = start + num_tokens
        return self._tables_to(end).at(start, end)

    def rotator(self, keys: Tensor, start: int) -> Rotator:
        """Make a rotator for keys of this shape and dtype, at positions from `start` on.

        It may be used by this thread only, in whose scratch memory it works.

        Args:
            keys: any tensor [n, kv_heads, dim] of that shape and dtype; it is not read.
            start: position of the first key.
        """
        num_tokens, heads, _ = keys.shape
        tables = self.tables(start, num_tokens)
        is_rounded = keys.dtype != self._dtype
        is_staged = is_rounded or not tables.source.is_identity
        # Head-major, like working KV.
        parts = self._scratch.take(1 + is_rounded + is_staged, heads, num_tokens, tables.width)
        products, *more = parts.transpose(1, 2).unbind(0)
        staged = more.pop() if is_staged else None
        return Rotator(
            tables, RotationScratch(products, more.pop() if is_rounded else None, staged)
        )

    def unrotate_into(self, keys: Tensor, start: int, out: Tensor) -> None:
        """Undo `rotate_into`, up to rounding: write the keys before RoPE to `out`.

        Computes in float32 at least, and rounds once to the dtype of `out`.

        Args:
            keys: [n, kv_heads, dim], after RoPE, on the table's device.
            start: position of the first key.
            out: the result, of the same shape and any strides; may overlap the keys.
        """
        wide, end = self.wide, start + keys.shape[0]
        if wide is not self:
            wide.unrotate_into(keys, start, out)
            return
        self._apply(self._inversion.undo(self._tables_to(end), start, end), keys, out)

    def move_into(self, keys: Tensor, old_start: int, new_start: int, out: Tensor) -> None:
        """Move keys embedded from `old_start` on to positions from `new_start` on.

        Shapes, dtypes and overlap are as in `unrotate_into`. One matrix per pair instead of two,
        and one rounding: half the work of `unrotate_into` and `rotate_into`.
        """
        wide, num_tokens = self.wide, keys.shape[0]
        if wide is not self:
            wide.move_into(keys, old_start, new_start, out)
            return
        tables = self._tables_to(max(old_start, new_start) + num_tokens)
        self._apply(self._inversion.move(tables, old_start, new_start, num_tokens), keys, out)

    def _apply(self, tables: Tables, keys: Tensor, out: Tensor) -> None:
        """Apply tables that begin at the first key, in their dtype; `out` may overlap the keys."""
        num_tokens, heads, dim = keys.shape
        parts = self._scratch.take(3, heads, num_tokens, dim).transpose(1, 2)
        staged, products, sums = parts.unbind(0)  # head-major, like the results
        staged.copy_(keys)
        is_rounded = out.dtype != sums.dtype
        scratch = RotationScratch(
            products[..., : tables.width], sums[..., : tables.width] if is_rounded else None
        )
        Rotator(tables, scratch).rotate_into(staged, out)

    @cached_property
    def wide(self) -> "RotaryTable":
        """The same rotation, computed in float32 at least, from tables rounded like the model's."""
        if self._dtype in (torch.float32, torch.float64):
            return self
        return self.with_dtypes(self._table_dtype, torch.float32)

    @cached_property
    def _inversion(self) -> Inversion:
        return Inversion(self.pairing, self._tables_to(1).width, self._device)

    def _tables_to(self, end: int) -> Tables:
        with self._lock:
            tables = self._tables
            if tables is None or tables.num_tokens < end:
                num_tokens = max(FIRST_TABLE_TOKENS, 1 << (end - 1).bit_length())
                tables = self._tables = self._build(max(end, min(num_tokens, self._max_tokens)))
            return tables

    @torch.no_grad()
    def _build(self, num_tokens: int) -> Tables:
        """Compute both tables for positions [0, num_tokens)."""
        dim = len(self.pairing.source)
        source = torch.tensor(self.pairing.source)
        partner = torch.tensor(self.pairing.partner)
        first = torch.zeros(dim, dtype=torch.bool)
        first[torch.minimum(source, partner)] = True
        probes = torch.stack((first, ~first)).to(torch.float32)  # [2, dim]
        positions = torch.arange(num_tokens, device=self._device)
        keys = probes.to(self._device)[None, :, None, :].expand(1, 2, num_tokens, dim)
        by_first, by_second = self._rope(keys, positions)[0]  # [num_tokens, dim] each
        source_is_first = first[source].to(self._device)
        cosines = torch.where(source_is_first, by_first, by_second)
        sines = torch.where(source_is_first, by_second, by_first)
        sines = torch.where((source == partner).to(self._device), torch.zeros_like(sines), sines)
        cosines, sines = (
            table.to(self._table_dtype).to(self._dtype).unsqueeze(1) for table in (cosines, sines)
        )
        width = self._rotated_width(cosines)
        return Tables(
            cosines[..., :width].contiguous(),
            sines[..., :width].contiguous(),
            ElementPermutation(self.pairing.source[:width], self._device),
            ElementPermutation(self.pairing.partner[:width], self._device),
            width,
        )

    def _rotated_width(self, cosines: Tensor) -> int:
        """Return the number of leading elements up to the last one that changes."""
        is_unscaled = (cosines == 1).flatten(0, 1).all(dim=0).tolist()
        pairs = enumerate(zip(self.pairing.source, self.pairing.partner, strict=True))
        return max((j + 1 for j, pair in pairs if pair != (j, j) or not is_unscaled[j]), default=0)


@torch.no_grad()
def find_pairing(rope: Rope, dim: int, device: torch.device) -> Pairing:
    """Find the pairing of a rotary embedding of keys of `dim` elements.

    Raises:
        RotaryNotLinearError: an output element depends on more than two inputs, or the elements
            do not form pairs.
    """
    positions = torch.tensor(PROBE_POSITIONS, device=device)
    units = torch.eye(dim, device=device)[None, :, None, :].expand(1, dim, len(positions), dim)
    answer = rope(units, positions)[0].cpu()  # [input, position, output]
    used = (answer != 0).any(dim=1).T  # [output, input]; unused inputs give an exact 0
    source = answer[:, 0, :].abs().argmax(dim=0)  # at position 0 all sines are 0
    partner = source.clone()
    for output in range(dim):
        others = [int(i) for i in used[output].nonzero().flatten() if int(i) != int(source[output])]
        if len(others) > 1:
            raise RotaryNotLinearError(f"element {output} depends on {len(others) + 1} elements")
        if others:
            partner[output] = others[0]
    pairs = {(min(a, b), max(a, b)) for a, b in zip(source.tolist(), partner.tolist(), strict=True)}
    sides = (sorted(source.tolist()), sorted(partner.tolist()))
    is_closed = sides == (list(range(dim)),) * 2
    if not is_closed or sum(2 if a != b else 1 for a, b in pairs) != dim:
        raise RotaryNotLinearError("its elements do not form pairs")
    return Pairing(tuple(source.tolist()), tuple(partner.tolist()))
