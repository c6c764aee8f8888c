"""Rotary embedding compiled to tables, to re-embed stored keys at any position.

Every rotary embedding met so far (halves, interleaved, permuting, partial, complex) is, per element
j of a key,

    out[j] = x[source[j]] * C[position, j] + x[partner[j]] * S[position, j]

`find_pairing` finds source and partner by sending unit vectors through the model's own apply
function, and C, S by sending the indicator of one member of each pair and of the other: products
with 0 and 1 are exact, so are the tables. Owns the tables and the pairing, nothing else; the
arithmetic is in `rotation.py`; knows no layers and no slabs.

Invariant: `rotate_into` repeats the model's own arithmetic, element by element, in the same dtypes;
calibration checks it against keys the model rotated itself.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_svc.runtime.kv.scratch import ThreadScratch
from inference_svc.runtime.model.rotation import ElementTake, Spare, Tables, Turn

# Applies the model's own RoPE to keys [1, heads, n, dim] (float32) at n positions.
Rope = Callable[[Tensor, Tensor], Tensor]

PROBE_POSITIONS = (0, 1, 2, 3, 5, 8, 13)  # among these no turning pair has only sines of zero
FIRST_TABLE_TOKENS = 1024


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


class RotaryTable:
    """Tables C and S of one rotary embedding, grown on demand up to the positions asked for.

    `rotate` may be called from any thread: growing swaps in a longer pair of tables under a lock.
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
            pairing: of that RoPE.
            max_tokens: the context window; the model's RoPE is never asked beyond it, some change
                there.
            table_dtype: to which the model rounds cosines and sines.
            dtype: in which the model multiplies; the result is cast back to the keys' dtype.
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
        """What loading does to stored bytes; frequencies belong to the model's fingerprint."""
        return f"{self.pairing.source}{self.pairing.partner}{self._table_dtype}{self._dtype}"

    def with_dtypes(self, table_dtype: torch.dtype, dtype: torch.dtype) -> "RotaryTable":
        """Return the same rotation computed in other dtypes."""
        return RotaryTable(
            self._rope,
            self.pairing,
            max_tokens=self._max_tokens,
            table_dtype=table_dtype,
            dtype=dtype,
            device=self._device,
        )

    def rotate(self, keys: Tensor, start: int) -> Tensor:
        """Embed `keys` [n, heads, dim], before RoPE, at positions from `start` on."""
        rotated = torch.empty_like(keys)
        self.rotate_into(keys, start, rotated)
        return rotated

    def rotate_into(self, keys: Tensor, start: int, out: Tensor) -> None:
        """Write what `rotate` returns to `out`, [n, heads, dim] of any strides, not over `keys`."""
        self.turn(keys, start).into(out)

    def turn(self, keys: Tensor, start: int) -> Turn:
        """Prepare `rotate_into` for whatever `keys` will hold; in this thread only."""
        num_tokens, heads, _ = keys.shape
        tables = self._tables_to(start + num_tokens)
        num_parts = 1 if keys.dtype == self._dtype else 3
        parts = self._scratch.take(num_parts, num_tokens * heads * tables.width).unbind(0)
        # Head-major, as results are going to be; the keys alone stay as they come.
        products, *sums = (
            part.view(heads, num_tokens, tables.width).transpose(0, 1) for part in parts[:2]
        )
        wide = parts[2].view(num_tokens, heads, tables.width) if num_parts == 3 else None
        return Turn(keys, tables, start, Spare(products, sums[0] if sums else None, wide))

    def _tables_to(self, end: int) -> Tables:
        tables = self._tables
        if tables is not None and tables.num_tokens >= end:
            return tables
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
        width = self._turning_width(cosines)
        return Tables(
            cosines[..., :width].contiguous(),
            sines[..., :width].contiguous(),
            ElementTake(self.pairing.source[:width], self._device),
            ElementTake(self.pairing.partner[:width], self._device),
            width,
        )

    def _turning_width(self, cosines: Tensor) -> int:
        """Count leading elements up to the last that does not stay where and what it is."""
        stays = (cosines == 1).flatten(0, 1).all(dim=0).tolist()
        pairs = enumerate(zip(self.pairing.source, self.pairing.partner, strict=True))
        return max((j + 1 for j, pair in pairs if pair != (j, j) or not stays[j]), default=0)


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
    if sum(2 if a != b else 1 for a, b in pairs) != dim:
        raise RotaryNotLinearError("its elements do not form pairs")
    return Pairing(tuple(source.tolist()), tuple(partner.tolist()))
