"""PackedLinear: a linear layer whose weights are packed in the order in which a kernel reads them.

`torch.nn.functional.linear` reads weights as they were stored, and rearranges them in every step.
oneDNN can do that once. Then a large layer's product takes half of the time for 4 to 16 rows in
float32, and 0.6 to 0.9 of it for 1 to 256 rows in bfloat16. A single row of float32 takes up to a
quarter longer, and twice as long where there are few outputs: small layers are not packed.

Packed weights replace the stored ones, except where few rows are multiplied faster with the stored
ones. So stored weights are kept in float32, if another layer has them anyway (an embedding that is
also the head), or if the model is small enough to be kept both ways. Packed weights are memory of
this process, while weights of a file may be pages of that file, which the system can drop, and
share between processes.

Shapes decide which layers are packed, and which stored weights are kept, and never a measurement:
otherwise two starts of one model would round differently. A row's result hardly depends on the
other rows: kernels for few rows and for many differ in the last bits.

Knows `torch.nn.Linear`, and no model.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as multiply

# Least weights of a packed layer: below, eight rows take as long either way, and one row longer.
MIN_WEIGHTS = 2**16
MIN_WEIGHTS_FLOAT32 = 2**19  # in float32, where torch's own product reads at memory's speed
FEW_ROWS = 3  # of float32, which torch multiplies as fast as one; four take twice as long
MOST_KEPT_BYTES = 2**31  # most bytes of a model's packed weights that are also kept as stored


class PackedLinear(nn.Module):
    """Replaces a `torch.nn.Linear`; its input is [..., in_features] with any strides."""

    packed: Tensor  # a buffer in an opaque layout of oneDNN
    stored: Tensor | None  # the weights as stored, for few rows; None: they are not kept

    def __init__(self, linear: nn.Linear, *, keeps_stored: bool = False) -> None:
        """Pack the weights of `linear`, which is not changed.

        Args:
            linear: the layer.
            keeps_stored: whether few rows are multiplied with the stored weights.

        Raises:
            Exception: torch has no such kernel here; see `can_pack`.
        """
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        kernels = torch.ops.mkldnn  # torch's own compiler calls them; they have no public name
        packed = kernels._reorder_linear_weight.default(linear.weight.detach(), None)  # noqa: SLF001
        self.register_buffer("packed", packed, persistent=False)
        stored = linear.weight.detach() if keeps_stored else None
        self.register_buffer("stored", stored, persistent=False)
        self.bias = linear.bias
        self._multiply = kernels._linear_pointwise.default  # noqa: SLF001
        # The kernel's arguments behind the input; "none": no activation after the product.
        self._operands: tuple[Any, ...] = (packed, linear.bias, "none", [], "")

    @property
    def weight(self) -> Tensor:
        """The unpacked weights, for models that access them; a copy if they are not kept."""
        return self.packed.to_dense() if self.stored is None else self.stored

    def forward(self, states: Tensor) -> Tensor:
        """Return the product, [..., out_features]."""
        if self.stored is not None and states.numel() <= FEW_ROWS * self.in_features:
            return multiply(states, self.stored, self.bias)
        products: Tensor = self._multiply(states, *self._operands)
        return products

    def unpack(self) -> nn.Linear:
        """Make the layer that this one replaces; stored weights and bias are shared."""
        weight = self.weight
        linear = nn.Linear(
            self.in_features, self.out_features, bias=False, device="meta", dtype=weight.dtype
        )
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linear.bias = self.bias
        return linear


def least_weights(dtype: torch.dtype) -> int:
    """Return the least number of weights of a layer that is packed."""
    return MIN_WEIGHTS_FLOAT32 if dtype == torch.float32 else MIN_WEIGHTS


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has the kernel for this device and dtype."""
    try:
        linear = nn.Linear(4, 4, device=device, dtype=dtype)
        PackedLinear(linear)(torch.zeros(1, 4, device=device, dtype=dtype))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


@torch.no_grad()
def pack_weights(model: nn.Module) -> int:
    """Replace a model's large linear layers by packed ones, one after the other.

    Layers of other classes, also those derived from `torch.nn.Linear`, and layers with hooks are
    left as they are.

    Returns:
        Bytes of packed weights; 0 where torch has no kernel.
    """
    some = next(iter(model.parameters()))
    if not can_pack(some.device, some.dtype):
        return 0
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}  # a layer may be in several
    for parent in model.modules():
        for name, child in parent.named_children():
            if _is_worth_it(child):
                places.setdefault(child, []).append((parent, name))
    is_small = sum(layer.weight.nbytes for layer in places) <= MOST_KEPT_BYTES
    shared = {
        id(weight)
        for part in model.modules()
        if part not in places
        for weight in part.parameters(recurse=False)
    }
    while places:  # pops each layer, so that its weights are freed before the next is packed
        layer, parents = places.popitem()
        is_kept = is_small or id(layer.weight) in shared
        packed = PackedLinear(layer, keeps_stored=is_kept and layer.weight.dtype == torch.float32)
        for parent, name in parents:
            setattr(parent, name, packed)
    return packed_bytes(model)


def unpack_weights(model: nn.Module) -> None:
    """Undo `pack_weights`; the weights are the same to the bit."""
    unpacked: dict[nn.Module, nn.Linear] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                unpacked.setdefault(child, child.unpack())
                setattr(parent, name, unpacked[child])


def packed_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's packed weights."""
    return sum(
        part.packed.numel() * part.packed.itemsize
        for part in model.modules()
        if isinstance(part, PackedLinear)
    )


def _is_worth_it(part: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(part) is nn.Linear
        and part.weight.numel() >= least_weights(part.weight.dtype)
        and not (part._forward_hooks or part._forward_pre_hooks)  # noqa: SLF001
    )
