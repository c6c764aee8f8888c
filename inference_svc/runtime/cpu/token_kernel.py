"""TokenKernel: loads tokens out of slots, and embeds keys on the way, in C++.

The kernel of `token_load.cpp`, which `native_library.py` compiles. One call per layer reads and
writes each element once, without the interpreter's lock, which a forward needs meanwhile. torch
takes several calls that read and write all of them.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from inference_svc.runtime.cpu.native_library import load_library
from inference_svc.runtime.positions.rotation import TokenCopy

EMBEDDED = (torch.float32, torch.bfloat16)  # the dtypes of keys


class TokenKernel:
    """The compiled kernel; a `LoadKernel`. May be called by several threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Declare the library's function."""
        self._load = library.load_tokens
        self._load.restype = None
        self._load.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]

    @classmethod
    def load(cls) -> "TokenKernel":
        """Compile and load the kernel.

        Raises:
            NativeLibraryError: that is not possible here.
        """
        return cls(load_library())

    def __call__(self, copies: Sequence[TokenCopy]) -> None:
        """See `LoadKernel`.

        Raises:
            ValueError: dtypes or strides are not those that the kernel takes, or there is no room.
        """
        fields = np.array([_fields(copy) for copy in copies], dtype=np.int64)
        self._load(fields.ctypes.data, len(copies), torch.get_num_threads())


def _fields(copy: TokenCopy) -> tuple[int, ...]:
    """Return the fields of `Copy` in the source.

    No operation of torch is needed: each would give up the interpreter's lock, and a forward that
    has it then keeps it for a while.
    """
    slots, distances, (layer, token_dim, first, rows), tables = copy
    per_row, per_head, per_item = (layer.stride(dim) for dim in (token_dim, 1, -1))
    heads, dim = slots.shape[2:]
    if slots.stride()[2:] != (dim, 1) or per_item != 1 or slots.dtype != layer.dtype:
        raise ValueError(
            f"tokens of {slots.dtype}, strides {slots.stride()}, cannot be loaded to {layer.dtype},"
            f" strides {layer.stride()}"
        )
    num_tokens = distances.shape[0]
    if not 0 <= first <= layer.shape[token_dim] - num_tokens:
        raise ValueError(
            f"{num_tokens} tokens from slot {first} on, of {layer.shape[token_dim]} slots"
        )
    where = (
        slots.data_ptr(),
        distances.data_ptr(),
        layer.data_ptr() + first * per_row * layer.itemsize,
        0 if rows is None else rows.data_ptr(),
        num_tokens,
        heads,
        dim,
        per_row,
        per_head,
        layer.itemsize,
    )
    if tables is None:
        return (*where, 0, 0, 0, 0, 0, 0)
    factors = tables.cosines.dtype
    if layer.dtype not in EMBEDDED or factors not in (torch.float32, layer.dtype):
        raise ValueError(f"keys of {layer.dtype} and tables of {factors} are not supported")
    return (
        *where,
        tables.cosines.data_ptr(),
        tables.sines.data_ptr(),
        factors.itemsize,
        tables.width,
        tables.source.indices.data_ptr(),
        tables.partner.indices.data_ptr(),
    )
