"""Packing choice: the kernels that may multiply a model's packed weights, by device and dtype.

    cpp     our kernel for CPUs, for float32, and for bfloat16 where the processor multiplies it;
            needs g++
    torch   oneDNN's, which torch has

The first one with which the model gives the same answers is taken (`calibration.py`).
"""

from typing import Literal

import structlog
import torch

from inference_svc.runtime.cpu.native_library import NativeLibraryError
from inference_svc.runtime.cpu.product_kernel import ProductKernel
from inference_svc.runtime.model.packing import OneDnnPacking, Packing
from shared.types.errors import ConfigError

PackingName = Literal["auto", "cpp", "torch", "off"]

log = structlog.get_logger()


def usable_packings(
    name: PackingName, device: torch.device, dtype: torch.dtype
) -> tuple[Packing, ...]:
    """Return the packings that a model may have, the fastest first.

    Args:
        name: the only one that is wanted; "auto": all; "off": none.
        device: where the model is.
        dtype: of its weights.

    Raises:
        ConfigError: the named packing cannot be used here.
    """
    if name == "off":
        return ()
    usable: list[Packing] = []
    for wanted in ("cpp", "torch") if name == "auto" else (name,):
        found = _packing(wanted)
        reason = found if isinstance(found, str) else found.why_unusable(device, dtype)
        if not isinstance(found, str) and not reason:
            usable.append(found)
        elif name == wanted:
            raise ConfigError(
                f"model.packed_weights = {name} cannot be used: {reason}", "set it to auto"
            )
        else:
            log.info("packing_not_usable", packing=wanted, reason=reason)
    return tuple(usable)


def _packing(name: str) -> Packing | str:
    """Return a packing, or why there is none."""
    if name == "torch":
        return OneDnnPacking()
    try:
        return ProductKernel.load()
    except NativeLibraryError as error:
        return str(error)
