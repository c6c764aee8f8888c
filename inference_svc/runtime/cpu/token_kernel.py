"""TokenKernel: loads tokens of one component out of slots, and embeds keys on the way, in C++.

The kernel of `token_load.cpp`, which `native_library.py` compiles. One call per layer and component
reads and writes each element once, without the interpreter's lock, where torch takes several calls
that read and write all of them.
"""

import ctypes

import torch
from torch import Tensor

from inference_svc.runtime.cpu.native_library import load_library
from inference_svc.runtime.positions.rotation import Tables

DTYPES = (torch.float32, torch.bfloat16)


class TokenKernel:
    """The compiled kernel; a `LoadKernel`. May be called by several threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Declare the library's functions."""
        size, address = ctypes.c_int64, ctypes.c_void_p
        tokens = (address, address, size, size, size, address, size, size)
        self._copy = library.copy_tokens
        self._copy.restype = None
        self._copy.argtypes = [*tokens, ctypes.c_int, ctypes.c_int]
        self._embed = library.embed_tokens
        self._embed.restype = None
        self._embed.argtypes = [*tokens, address, address, size, address, address]
        self._embed.argtypes += [ctypes.c_int, ctypes.c_int, ctypes.c_int]

    @classmethod
    def load(cls) -> "TokenKernel":
        """Compile and load the kernel.

        Raises:
            NativeLibraryError: that is not possible here.
        """
        return cls(load_library())

    def __call__(
        self, slots: Tensor, distances: Tensor, tables: Tables | None, out: Tensor
    ) -> None:
        """See `LoadKernel`.

        Raises:
            RuntimeError: dtypes or strides are not those that the kernel takes.
        """
        num_tokens, heads, dim = out.shape
        _, _, per_head, per_item = slots.stride()
        token_stride, head_stride, item_stride = out.stride()
        if (per_head, per_item, item_stride) != (dim, 1, 1) or slots.dtype != out.dtype:
            raise RuntimeError(
                f"tokens of {slots.dtype}, strides {slots.stride()}, cannot be loaded to "
                f"{out.dtype}, strides {out.stride()}"
            )
        tokens = (
            slots.data_ptr(),
            distances.data_ptr(),
            num_tokens,
            heads,
            dim,
            out.data_ptr(),
            token_stride,
            head_stride,
        )
        if tables is None:
            self._copy(*tokens, out.itemsize, torch.get_num_threads())
            return
        factors = tables.cosines.dtype
        if out.dtype not in DTYPES or factors not in (torch.float32, out.dtype):
            raise RuntimeError(f"keys of {out.dtype} and tables of {factors} are not supported")
        self._embed(
            *tokens,
            tables.cosines.data_ptr(),
            tables.sines.data_ptr(),
            tables.width,
            tables.source.indices.data_ptr(),
            tables.partner.indices.data_ptr(),
            out.dtype == torch.bfloat16,
            factors == torch.bfloat16,
            torch.get_num_threads(),
        )
