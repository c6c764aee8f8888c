"""AttentionKernel: the new tokens of several sequences attend over their KV in place, in C++.

The kernels of `decode_attention.cpp`, for sequences with one new token, which they can also write,
and of `prefill_attention.cpp`, for those with more; `native_library.py` compiles them, torch calls
them as operators (`operators.py`). Before they serve, they are proven on this machine: random
tensors of the model's shapes against plain softmax in torch.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.runtime.attention.attention import NewKv
from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.cpu.native_library import load_library
from inference_svc.runtime.cpu.operators import register
from inference_svc.runtime.kv.layer_tensors import LayerShape

DIM_STEP = 16  # heads have a multiple of so many elements
DTYPES = (torch.float32, torch.bfloat16)
# Numbers of `Part` in the sources: indices of some, and how many there are.
PAGES, PAGE_TOKENS, FIRST, END, NUM_TOKENS, FIRSTS, KEY_ROW, VALUE_ROW = 2, 3, 4, 5, 10, 11, 12, 13
PART_NUMBERS = 14
PROOF_LENGTHS = (1300, 7)  # tokens: two of the kernel's splits, and less than a tile
PROOF_TOKENS = (150, 5)  # new ones of each in a prefill: with many heads, more than a block of rows
PROOF_GROUPS = (1, 3, 8)  # query heads of a key head: a part of a block, and more than one
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the largest value


class AttendedLayer(NamedTuple):
    """A layer of the KV to which parts attend.

    Attributes:
        layer_index: the layer's index.
        kv_heads: number of its key heads.
        value_dim: elements of a value.
    """

    layer_index: int
    kv_heads: int
    value_dim: int


class AttentionKernel:
    """The compiled kernels; may be called by several threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Let the operators call the library's kernels."""
        register(library)
        self._decode = torch.ops.cachedattention.attend_decode.default
        self._prefill = torch.ops.cachedattention.attend_prefill.default
        self._write_and_decode = torch.ops.cachedattention.write_and_attend_decode.default
        library.panel_depth.restype = ctypes.c_int64
        self._prefilled = {
            dtype for dtype in DTYPES if library.panel_depth(int(dtype == torch.bfloat16))
        }

    @classmethod
    def load(cls) -> "AttentionKernel":
        """Compile and load the kernels.

        Raises:
            NativeLibraryError: that is not possible here.
        """
        return cls(load_library())

    def can_prefill(self, dtype: torch.dtype) -> bool:
        """Whether parts of several tokens can attend; of other dtypes torch is faster."""
        return dtype in self._prefilled

    def decode(
        self, query: Tensor, parts: Tensor, layer: AttendedLayer, options: AttentionOptions
    ) -> Tensor:
        """Attend one token of each part.

        Args:
            query: [1, heads, parts, head_dim], of a dtype in DTYPES, which KV has too.
            parts: [layers, parts, numbers] int64, as `Part` in the sources; what they point to has
                to stay in place during the call.
            layer: the layer, whose number of key heads divides `heads`.
            options: scale, softcap and sinks of the call; its window is in `parts`.

        Returns:
            [1, parts, heads, value_dim]
        """
        attended: Tensor = self._decode(query, parts, *layer, *_scoring(query, options))
        return attended

    def write_and_decode(
        self,
        query: Tensor,
        new: NewKv,
        parts: Tensor,
        layer_index: int,
        options: AttentionOptions,
    ) -> Tensor:
        """Write one token of each part to KV, and to write buffers that `parts` names, and attend.

        Args:
            query: see `decode`.
            new: the parts' tokens, all of the query's dtype.
            parts: see `decode`.
            layer_index: the layer's index.
            options: see `decode`.

        Returns:
            [1, parts, heads, value_dim]
        """
        scoring = _scoring(query, options)
        attended: Tensor = self._write_and_decode(query, *new, parts, layer_index, *scoring)
        return attended

    def prefill(
        self, query: Tensor, parts: Tensor, layer: AttendedLayer, options: AttentionOptions
    ) -> Tensor:
        """Attend several tokens of each part, of a dtype that `can_prefill`.

        Args:
            query: [1, heads, tokens, head_dim], the parts' new tokens one after another.
            parts: see `decode`.
            layer: see `decode`.
            options: see `decode`; also its chunk is in `parts`.

        Returns:
            [1, tokens, heads, value_dim]
        """
        attended: Tensor = self._prefill(query, parts, *layer, *_scoring(query, options))
        return attended


def _scoring(query: Tensor, options: AttentionOptions) -> tuple[float, float, Tensor | None]:
    """Return scale, softcap (0: none) and sinks of a call."""
    scale = query.shape[3] ** -0.5 if options.scale is None else options.scale
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    return scale, options.softcap or 0.0, sinks


def why_unsupported(shapes: Sequence[LayerShape], dtype: torch.dtype) -> str:
    """Return why the kernels cannot serve layers of these shapes; "": it can."""
    if dtype not in DTYPES:
        return f"the kernel does not take {str(dtype).removeprefix('torch.')}"
    for shape in shapes:
        if shape.key[0] != shape.value[0]:
            return "keys have other heads than values"
        for _, dim in (shape.key, shape.value):
            if dim % DIM_STEP:
                return f"heads have {dim} elements, which is no multiple of {DIM_STEP}"
    return ""


def why_wrong(kernel: AttentionKernel, shapes: Sequence[LayerShape], dtype: torch.dtype) -> str:
    """Compare the kernels to plain softmax in torch; return how they differ; "": they do not."""
    random = torch.Generator().manual_seed(0)
    ways = [("decode", (1, 1))]
    if kernel.can_prefill(dtype):
        ways.append(("prefill", PROOF_TOKENS))
    for shape in dict.fromkeys(shapes):
        (kv_heads, dim), value_dim = shape.key, shape.value[1]
        keys, values = (
            torch.randn(kv_heads, PROOF_LENGTHS[0], size, generator=random).to(dtype)
            for size in (dim, value_dim)
        )
        for group, (name, counts) in product(PROOF_GROUPS, ways):
            heads = kv_heads * group
            query = torch.randn(1, heads, sum(counts), dim, generator=random).to(dtype)
            sinks = torch.randn(heads, generator=random)
            for options in (AttentionOptions(), AttentionOptions(0.3, softcap=5.0, sinks=sinks)):
                parts = torch.tensor(
                    [
                        [
                            _contiguous_part(keys, values, length, count)
                            for length, count in zip(PROOF_LENGTHS, counts, strict=True)
                        ]
                    ]
                )
                layer = AttendedLayer(0, kv_heads, value_dim)
                found = getattr(kernel, name)(query, parts, layer, options)[0]
                for row, length in _proof_rows(counts):
                    seen = (keys[:, :length].float(), values[:, :length].float())
                    expected = _plain_softmax(query[0, :, row].float(), *seen, options)
                    off = (found[row].float() - expected).abs().max() / values.float().abs().max()
                    if not off <= TOLERANCE[dtype]:  # also if it is NaN
                        return f"the kernel of {name} is {off:.1e} off plain softmax"
        reason = _why_miswritten(kernel, keys, values)
        if reason:
            return reason
    return ""


def _why_miswritten(kernel: AttentionKernel, keys: Tensor, values: Tensor) -> str:
    """Let the kernel write last tokens that are there already; return how it differs; "": not."""
    last = PROOF_LENGTHS[0] - 1
    query = keys[None, :, last:]  # any will do
    unrotated = (-keys[:, last:].transpose(0, 1), -values[:, last:].transpose(0, 1))
    new = NewKv(keys[None, :, last:], values[None, :, last:], *unrotated)
    rows = [torch.zeros_like(tokens, memory_format=torch.contiguous_format) for tokens in unrotated]
    unwritten = [tokens.index_fill(1, torch.tensor([last]), math.nan) for tokens in (keys, values)]
    layer = AttendedLayer(0, keys.shape[0], values.shape[2])
    expected = kernel.decode(query, _lone_part(keys, values), layer, AttentionOptions())
    numbers = _lone_part(*unwritten)
    numbers[0, 0, [KEY_ROW, VALUE_ROW]] = torch.tensor([tokens.data_ptr() for tokens in rows])
    found = kernel.write_and_decode(query, new, numbers, 0, AttentionOptions())
    written = [found, *unwritten, *rows]
    wanted = [expected, keys, values, *unrotated]
    if not all(map(torch.equal, written, wanted)):
        return "the kernel of decode writes other tokens than it is given"
    return ""


def _lone_part(keys: Tensor, values: Tensor) -> Tensor:
    """Return the numbers of a step whose one part is all of these tokens, the last one new."""
    return torch.tensor([[_contiguous_part(keys, values, keys.shape[1], 1)]])


def _proof_rows(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the rows to compare, each with the number of tokens that it sees."""
    begin = 0
    for length, count in zip(PROOF_LENGTHS, counts, strict=True):
        for token in {0, count // 2, count - 1}:
            yield begin + token, length - count + token + 1
        begin += count


def _contiguous_part(keys: Tensor, values: Tensor, length: int, count: int) -> list[int]:
    """Return the numbers of a part: `count` tokens behind others, of [kv_heads, tokens, dim]."""
    strides = [*keys.stride()[:2], *values.stride()[:2]]
    return [keys.data_ptr(), values.data_ptr(), 0, 0, 0, length, *strides, count, 0, 0, 0]


def _plain_softmax(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """Attend one token, [heads, dim], to keys and values, [kv_heads, tokens, dim] each."""
    kv_heads, _, dim = keys.shape
    scale = dim**-0.5 if options.scale is None else options.scale
    scores = query.view(kv_heads, -1, dim) @ keys.transpose(1, 2) * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks.view(kv_heads, -1, 1)), dim=2)
    weights = torch.softmax(scores, dim=2)[..., : keys.shape[1]]
    return (weights @ values).view(query.shape[0], -1)
