"""Operators of torch that call this package's kernels: products with packed weights, attention.

torch calls an operator without Python in between, also from a traced graph and from what its
compiler makes of one: a call from Python by addresses costs more than the arithmetic of a small
product. `operators.cpp` has what they do; here are their schemas, and their results' shapes where
tracers ask for them.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from inference_svc.runtime.cpu.native_library import NativeLibraryError

_library: Any = torch.library  # has no types
_OPERATORS = _library.Library("cachedattention", "FRAGMENT")
_OPERATORS.define(
    "multiply_packed(Tensor states, Tensor packed, Tensor? bias, int out_features) -> Tensor"
)
for name in ("attend_decode", "attend_prefill"):
    _OPERATORS.define(
        f"{name}(Tensor query, Tensor parts, int layer_index, int kv_heads, int value_dim,"
        " float scale, float softcap, Tensor? sinks) -> Tensor"
    )
_OPERATORS.define(
    "write_and_attend_decode(Tensor query, Tensor key, Tensor value, Tensor unrotated_key,"
    " Tensor unrotated_value, Tensor parts, int layer_index, float scale, float softcap,"
    " Tensor? sinks) -> Tensor"
)


def _product_shape(
    states: Tensor, _packed: Tensor, _bias: Tensor | None, out_features: int
) -> Tensor:
    """Return what `multiply_packed` returns, without its contents."""
    return states.new_empty(*states.shape[:-1], out_features)


torch.library.register_fake("cachedattention::multiply_packed", _product_shape, lib=_OPERATORS)


def register(library: ctypes.CDLL) -> None:
    """Let the operators call the kernels of a library, the only one of this process that does.

    Raises:
        NativeLibraryError: torch refuses them.
    """
    if not library.register_operators():
        raise NativeLibraryError(f"torch {torch.__version__} does not take kernels as operators")
