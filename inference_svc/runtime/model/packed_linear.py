"""PackedLinear: a linear layer whose weights are in the order in which a kernel reads them.

Packed weights replace the stored ones, except where a packing multiplies few rows faster with the
stored ones (`Packing.few_rows`). Then these are kept, if another layer has them anyway (an
embedding that is also the head), or if the model is small enough to be kept both ways. Packed
weights are memory of this process, while weights of a file may be pages of that file, which the
system can drop, and share between processes.

Knows `torch.nn.Linear`, and no model.
"""

from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as multiply

from inference_svc.runtime.memory import RegionTensors
from inference_svc.runtime.model.packing import Packing

MOST_KEPT_BYTES = 2**31  # most bytes of a model's packed weights that are also kept as stored


class PackedLinear(nn.Module):
    """Replaces a `torch.nn.Linear`; its input is [..., in_features] with any strides."""

    packed: Tensor  # a buffer in the packing's order
    stored: Tensor | None  # the weights as stored, for few rows; None: they are not kept

    def __init__(
        self,
        linear: nn.Linear,
        packing: Packing,
        regions: RegionTensors,
        *,
        keeps_stored: bool = False,
    ) -> None:
        """Pack the weights of `linear`, which is not changed.

        Args:
            linear: the layer.
            packing: packs and multiplies.
            regions: memory for packed weights.
            keeps_stored: whether stored weights are kept, if few rows are multiplied with them.
        """
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packing = packing
        weight = linear.weight.detach()
        self.register_buffer("packed", packing.pack(weight, regions), persistent=False)
        self._few_rows = packing.few_rows(weight.dtype) if keeps_stored else 0
        self.register_buffer("stored", weight if self._few_rows else None, persistent=False)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The unpacked weights, for models that access them; a copy if they are not kept."""
        if self.stored is not None:
            return self.stored
        return self.packing.unpack(self.packed, self.out_features, self.in_features)

    def forward(self, states: Tensor) -> Tensor:
        """Return the product, [..., out_features]."""
        if self.stored is not None and states.numel() <= self._few_rows * self.in_features:
            return multiply(states, self.stored, self.bias)
        return self.packing.multiply(states, self.packed, self.bias, self.out_features)

    def unpack(self) -> nn.Linear:
        """Make the layer that this one replaces; stored weights and bias are shared."""
        weight = self.weight
        linear = nn.Linear(
            self.in_features, self.out_features, bias=False, device="meta", dtype=weight.dtype
        )
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linear.bias = self.bias
        return linear


@torch.no_grad()
def pack_weights(model: nn.Module, packing: Packing) -> int:
    """Replace a model's large linear layers by packed ones, one after the other.

    Layers of other classes, also those derived from `torch.nn.Linear`, and layers with hooks are
    left as they are.

    Args:
        model: the model.
        packing: one that is usable for the model's device and dtype.

    Returns:
        Bytes of packed weights.
    """
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}  # a layer may be in several
    for parent in model.modules():
        for name, child in parent.named_children():
            if _is_worth_it(child, packing):
                places.setdefault(child, []).append((parent, name))
    is_small = sum(layer.weight.nbytes for layer in places) <= MOST_KEPT_BYTES
    shared = {
        id(weight)
        for part in model.modules()
        if part not in places
        for weight in part.parameters(recurse=False)
    }
    regions = RegionTensors()
    while places:  # pops each layer, so that its weights are freed before the next is packed
        layer = next(iter(places))  # in the order in which a forward reads them
        parents = places.pop(layer)
        is_kept = is_small or id(layer.weight) in shared
        packed = PackedLinear(layer, packing, regions, keeps_stored=is_kept)
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


def packing_of(model: nn.Module) -> str:
    """Return the name of the packing that a model's weights have; "": none is packed."""
    names = (part.packing.name for part in model.modules() if isinstance(part, PackedLinear))
    return next(names, "")


def _is_worth_it(part: nn.Module, packing: Packing) -> TypeGuard[nn.Linear]:
    if type(part) is not nn.Linear or part._forward_hooks or part._forward_pre_hooks:  # noqa: SLF001
        return False
    least = packing.least_weights(part.weight.dtype)
    return least is not None and part.weight.numel() >= least
