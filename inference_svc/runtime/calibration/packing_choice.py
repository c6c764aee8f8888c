"""Packing choice: the kernels that may multiply a model's packed weights, by device and dtype.

    cpp     our kernel for CPUs, for float32, and for bfloat16 where the processor multiplies it;
            needs g++
    torch   oneDNN's, which torch has

The first one with which the model gives the same answers is taken.
"""

from typing import Literal

import structlog
import torch

from inference_svc.runtime.calibration.kernels import reason_of
from inference_svc.runtime.calibration.stock import StockLogits, answers_as
from inference_svc.runtime.cpu.native_library import NativeLibraryError
from inference_svc.runtime.cpu.product_kernel import ProductKernel
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.packed_linear import pack_weights, unpack_weights
from inference_svc.runtime.model.packing import OneDnnPacking, Packing
from shared.types.errors import ConfigError

PackingName = Literal["auto", "cpp", "torch", "off"]

log = structlog.get_logger()


def choose_packing(name: PackingName, loaded: LoadedModel, reference: StockLogits) -> None:
    """Pack a model's weights for the first kernel with which it answers as before, if there is one.

    Args:
        name: the kernel, see `usable_packings`.
        loaded: the model.
        reference: its answers with its original weights.

    Raises:
        ConfigError: the named packing cannot be used here, or gives other answers.
    """
    for packing in usable_packings(name, loaded.device, loaded.dtype):
        pack_weights(loaded.model, packing)
        reason = "the model's answers differ"
        try:
            if answers_as(loaded, reference):
                return
        except Exception as error:  # noqa: BLE001 - models may do anything with their layers
            reason = reason_of(error)
        unpack_weights(loaded.model)
        _report(name, packing.name, reason)


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
        else:
            _report(name, wanted, reason)
    return tuple(usable)


def _report(asked: PackingName, packing: str, reason: str) -> None:
    """Log why a packing cannot be used; raise if it is the one that was asked for."""
    if asked == packing:
        raise ConfigError(
            f"model.packed_weights = {asked} cannot be used: {reason}", "set it to auto"
        )
    log.info("packing_not_usable", packing=packing, reason=reason)


def _packing(name: str) -> Packing | str:
    """Return a packing, or why there is none."""
    if name == "torch":
        return OneDnnPacking()
    try:
        return ProductKernel.load()
    except NativeLibraryError as error:
        return str(error)
