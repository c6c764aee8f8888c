"""Chooses what embeds keys when they are loaded: by the device, by what is installed, by proof.

    torch   turns keys where they were copied to, in several calls; takes every recipe
    triton  one kernel that turns keys while it writes them to their token slots; takes keys that
            no norm follows (those that one does stay torch's). Needs Triton, and a GPU
            (TRITON_INTERPRET=1 runs it on a CPU, slowly)

Before it serves, the kernel embeds random keys by each of the model's own rotary tables, at its
first positions and at its last. If a single bit is not that of torch, or it fails, torch serves:
what is loaded has to be what was computed.
"""

from collections.abc import Iterator
from typing import Literal

import structlog
import torch

from inference_svc.runtime.calibration.attention_choice import is_gpu, no_kernels_on, reason_of
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.positions.rotary import RotaryTable
from inference_svc.runtime.positions.rotation import EmbedKernel
from shared.types.errors import ConfigError

RotationName = Literal["auto", "torch", "triton"]
PROOF_TOKENS = 100  # at each end of the window

log = structlog.get_logger()


def choose_rotation(
    name: RotationName, loaded: LoadedModel, calibration: Calibration
) -> EmbedKernel | None:
    """Return what embeds keys that no norm follows; None: torch does.

    Args:
        name: "auto": the kernel, if it is proven; a name: this one or none.
        loaded: the model.
        calibration: what is known of it.

    Raises:
        ConfigError: if the kernel is named and cannot serve here, or embeds otherwise.
    """
    if name == "torch" or (name == "auto" and not is_gpu(loaded.device)):
        return None
    kinds = dict.fromkeys(_kinds(calibration))
    if name == "auto" and not kinds:
        return None
    reason = no_kernels_on(loaded.device) if kinds else "no keys of this model are embedded by it"
    if not reason:
        kernel = _kernel()
        reason = _refuted(loaded, kernel, list(kinds))
        if not reason:
            log.info("rotation_chosen", rotation="triton")
            return kernel
    if name == "triton":
        raise ConfigError(f"model.rotation = triton: {reason}", "set it to auto or torch")
    log.warning("rotation_chosen", rotation="torch", reason=reason)
    return None


def _kinds(calibration: Calibration) -> Iterator[tuple[RotaryTable, int, int]]:
    """Yield table, heads and elements of all keys that the kernel would embed."""
    for layer in calibration.layers:
        for recipe, (heads, dim) in zip(layer.components, layer.shape.parts, strict=True):
            if recipe.rotary is not None and recipe.post is None:
                yield recipe.rotary, heads, dim


def _kernel() -> EmbedKernel:
    """Return Triton's kernel, which is imported only where it is used."""
    from inference_svc.runtime.cuda.key_rotation import embed_on_device

    return embed_on_device


@torch.inference_mode()
def _refuted(
    loaded: LoadedModel, kernel: EmbedKernel, kinds: list[tuple[RotaryTable, int, int]]
) -> str:
    """Return why the kernel must not serve the model; empty: its bits are those of torch."""
    num_tokens = min(PROOF_TOKENS, loaded.context_window)
    chance = torch.Generator().manual_seed(5)
    try:
        for rotary, heads, dim in kinds:
            for start in (0, loaded.context_window - num_tokens):
                drawn = torch.randn(num_tokens, heads, dim, generator=chance)
                keys = drawn.to(loaded.device, loaded.dtype)
                # Every other slot, the last first: those between them are to stay as they are.
                region = keys.new_zeros(2 * num_tokens, heads, dim)
                slots = torch.arange(num_tokens, device=loaded.device).flip(0) * 2
                kernel(keys, rotary.tables(start, num_tokens), region, slots)
                expected = torch.zeros_like(region)
                expected[slots] = rotary.rotate(keys, start)
                if not torch.equal(region, expected):
                    return f"keys from position {start} on have other bits than those of torch"
    except Exception as error:  # noqa: BLE001 - what compilers and drivers raise is too much to foresee
        return reason_of(error)
    return ""
