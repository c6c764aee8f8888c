"""Packing: a kernel for products of linear layers, and the order in which it reads their weights.

`torch.nn.functional.linear` reads weights as they were stored, and rearranges them in every step. A
packing does that once. Ours (`product_kernel.py`) reads weights at the speed of memory. That of
oneDNN, which torch has, takes half of the time of `linear` for 4 to 16 rows in float32, and 0.6 to
0.9 of it for 1 to 256 rows in bfloat16. But a single row of float32 takes it up to a quarter
longer, and twice as long where there are few outputs.

Shapes decide which layers are packed, and never a measurement: otherwise two starts of one model
would round differently.
"""

from typing import Protocol

import torch
from torch import Tensor

from inference_svc.runtime.memory import RegionTensors

# Least weights of a packed layer: below, a call takes longer than what it saves.
MIN_WEIGHTS = 2**16
MIN_WEIGHTS_ONEDNN_FLOAT32 = 2**19  # where one row of fewer takes longer than by torch's product
FEW_ROWS = 3  # of float32, which torch multiplies as fast as one; four take twice as long


class Packing(Protocol):
    """A kernel, and its order of weights.

    Attributes:
        name: its name in the setting `model.packed_weights`.
    """

    name: str

    def why_unusable(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return why the kernel cannot serve a model on this device, of this dtype; "": it can."""

    def least_weights(self, dtype: torch.dtype) -> int | None:
        """Return the least number of weights of a layer that is packed; None: no such layer is."""

    def few_rows(self, dtype: torch.dtype) -> int:
        """Return the most rows that `linear` multiplies faster, with stored weights; 0: none."""

    def pack(self, weight: Tensor, regions: RegionTensors) -> Tensor:
        """Return weights in the kernel's order.

        Args:
            weight: [out_features, in_features].
            regions: memory for them, from which they are read fastest.
        """

    def unpack(self, packed: Tensor, out_features: int, in_features: int) -> Tensor:
        """Undo `pack`: the same weights to the bit."""

    def multiply(
        self, states: Tensor, packed: Tensor, bias: Tensor | None, out_features: int
    ) -> Tensor:
        """Compute a layer.

        Args:
            states: [..., in_features] with any strides, of the weights' dtype.
            packed: the layer's weights, from `pack`.
            bias: [out_features]; None: the layer has none.
            out_features: number of the layer's outputs.

        Returns:
            [..., out_features]
        """


class OneDnnPacking:
    """oneDNN's; its kernels for few rows and for many differ in the last bits."""

    name = "torch"

    def why_unusable(self, device: torch.device, dtype: torch.dtype) -> str:
        """See `Packing`; only a try shows it."""
        try:
            packed = self.pack(torch.zeros(4, 4, device=device, dtype=dtype), RegionTensors())
            self.multiply(torch.zeros(1, 4, device=device, dtype=dtype), packed, None, 4)
        except (AttributeError, NotImplementedError, RuntimeError):
            return f"torch has no packed product of {str(dtype).removeprefix('torch.')} here"
        return ""

    def least_weights(self, dtype: torch.dtype) -> int | None:
        """See `Packing`."""
        if dtype == torch.float32:
            return MIN_WEIGHTS_ONEDNN_FLOAT32
        return MIN_WEIGHTS if dtype in (torch.bfloat16, torch.float16) else None

    def few_rows(self, dtype: torch.dtype) -> int:
        """See `Packing`."""
        return FEW_ROWS if dtype == torch.float32 else 0

    def pack(self, weight: Tensor, _regions: RegionTensors) -> Tensor:
        """See `Packing`; the result has an opaque layout, and memory that oneDNN allocates."""
        kernels = torch.ops.mkldnn  # torch's own compiler calls them; they have no public name
        packed: Tensor = kernels._reorder_linear_weight.default(weight, None)  # noqa: SLF001
        return packed

    def unpack(self, packed: Tensor, out_features: int, in_features: int) -> Tensor:
        """See `Packing`."""
        return packed.to_dense().view(out_features, in_features)

    def multiply(
        self, states: Tensor, packed: Tensor, bias: Tensor | None, _out_features: int
    ) -> Tensor:
        """See `Packing`."""
        kernels = torch.ops.mkldnn
        # "none": no activation after the product.
        products: Tensor = kernels._linear_pointwise.default(  # noqa: SLF001
            states, packed, bias, "none", [], ""
        )
        return products
