"""ProductKernel: products of a model's linear layers with packed weights, in C++.

The kernel of `packed_product.cpp`, which `native_library.py` compiles; torch calls it as an
operator (`operators.py`). It reads weights at memory's speed for 1 to 8 rows, where torch takes two
to four times as long, and multiplies many rows as fast as oneDNN. A row's result has the same bits
whatever other rows are multiplied with it. Before it serves, it is proven on this machine.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from inference_svc.runtime.cpu.native_library import load_library
from inference_svc.runtime.cpu.operators import register
from inference_svc.runtime.memory import RegionTensors
from inference_svc.runtime.model.packing import MIN_WEIGHTS
from shared.types.units import ceil_div

PROOF_SIZES = ((1, 64, 32), (7, 301, 70), (77, 2500, 33))  # rows, inputs, outputs
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the largest product


class ProductKernel:
    """The compiled kernel; a `Packing`. May be called by several threads."""

    name = "cpp"

    def __init__(self, library: ctypes.CDLL) -> None:
        """Let the operator call the library's kernel."""
        size = ctypes.c_int64
        library.panel_columns.restype = library.panel_depth.restype = size
        self._panel: int = library.panel_columns()
        self._depths: dict[torch.dtype, int] = {
            torch.float32: library.panel_depth(0),
            torch.bfloat16: library.panel_depth(1),
        }
        register(library)
        self._multiply = torch.ops.cachedattention.multiply_packed.default

    @staticmethod
    @cache
    def load() -> "ProductKernel":
        """Compile and load the kernel; the same one each time.

        Raises:
            NativeLibraryError: that is not possible here.
        """
        return ProductKernel(load_library())

    def why_unusable(self, device: torch.device, dtype: torch.dtype) -> str:
        """See `Packing`; the kernel is compared to torch's product."""
        if device.type != "cpu":
            return f"device {device} is not a CPU"
        if not self._depths.get(dtype):
            return f"the kernel does not take {str(dtype).removeprefix('torch.')} here"
        return _why_wrong(self, dtype)

    def least_weights(self, dtype: torch.dtype) -> int | None:
        """See `Packing`."""
        return MIN_WEIGHTS if self._depths.get(dtype) else None

    def few_rows(self, _dtype: torch.dtype) -> int:
        """See `Packing`."""
        return 0

    def pack(self, weight: Tensor, regions: RegionTensors) -> Tensor:
        """See `Packing`; [panels, pieces, panel, depth] as `packed_product.cpp` describes it."""
        depth = self._depths[weight.dtype]
        outputs, inputs = weight.shape
        panels, pieces = ceil_div(outputs, self._panel), ceil_div(inputs, depth)
        missing = (0, pieces * depth - inputs, 0, panels * self._panel - outputs)
        whole = pad(weight, missing) if any(missing) else weight
        packed = regions.take((panels, pieces, self._panel, depth), weight.dtype)
        return packed.copy_(whole.view(panels, self._panel, pieces, depth).transpose(1, 2))

    def unpack(self, packed: Tensor, out_features: int, in_features: int) -> Tensor:
        """See `Packing`."""
        whole = packed.transpose(1, 2).reshape(packed.shape[0] * self._panel, -1)
        return whole[:out_features, :in_features].contiguous()

    def multiply(
        self, states: Tensor, packed: Tensor, bias: Tensor | None, out_features: int
    ) -> Tensor:
        """See `Packing`."""
        products: Tensor = self._multiply(states, packed, bias, out_features)
        return products


def _why_wrong(kernel: ProductKernel, dtype: torch.dtype) -> str:
    """Compare the kernel to torch; return how they differ; "": they do not."""
    random = torch.Generator().manual_seed(0)
    for rows, inputs, outputs in PROOF_SIZES:
        states, weight, bias = (
            torch.randn(*sizes, generator=random).to(dtype)
            for sizes in ((rows, inputs), (outputs, inputs), (outputs,))
        )
        packed = kernel.pack(weight, RegionTensors())
        found = kernel.multiply(states, packed, bias, outputs).float()
        expected = linear(states.float(), weight.float(), bias.float())
        off = (found - expected).abs().max() / expected.abs().max()
        if not off <= TOLERANCE[dtype]:  # also if it is NaN
            return f"the kernel is {off:.1e} off torch's product"
    return ""
