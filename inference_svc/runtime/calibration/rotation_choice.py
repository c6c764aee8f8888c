"""Rotation choice: what embeds loaded keys, by device, installed packages and proof.

    torch   rotates keys in place after they were copied, in several calls; supports every recipe
    triton  one kernel that rotates keys while it writes them to their token slots; supports keys
            without a norm after RoPE (others are left to torch). Needs Triton, and a GPU
            (TRITON_INTERPRET=1 runs it on a CPU, slowly)

Before it serves, the kernel embeds random keys by each of the model's own rotary tables, at the
first and the last positions of the window. If a single bit differs from torch's result, or it
fails, torch serves: loaded KV has to equal the computed KV.
"""

from collections.abc import Iterator
from typing import Literal

import structlog
import torch

from inference_svc.runtime.calibration.kernels import is_gpu, no_kernels_on, reason_of
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.positions.rotary import RotaryTable
from inference_svc.runtime.positions.rotation import EmbedKernel
from shared.types.errors import ConfigError

RotationName = Literal["auto", "torch", "triton"]
PROOF_TOKENS = 100  # tokens at each end of the window

log = structlog.get_logger()


def choose_rotation(
    name: RotationName, loaded: LoadedModel, calibration: Calibration
) -> EmbedKernel | None:
    """Return the kernel that embeds keys without a norm after RoPE; None: torch embeds them.

    Args:
        name: "triton" or "torch", or "auto" for the kernel if it is proven.
        loaded: the model.
        calibration: the model's calibration.

    Raises:
        ConfigError: the kernel is named and cannot serve here, or its results differ.
    """
    if name == "torch" or (name == "auto" and not is_gpu(loaded.device)):
        return None
    kinds = dict.fromkeys(_kinds(calibration))
    if name == "auto" and not kinds:
        return None
    reason = no_kernels_on(loaded.device) if kinds else "the model has no keys that it could rotate"
    if not reason:
        kernel = _kernel()
        reason = _why_refuted(loaded, kernel, list(kinds))
        if not reason:
            log.info("rotation_chosen", rotation="triton")
            return kernel
    if name == "triton":
        raise ConfigError(
            f"model.rotation = triton cannot be used: {reason}", "set it to auto or torch"
        )
    log.warning("rotation_chosen", rotation="torch", reason=reason)
    return None


def _kinds(calibration: Calibration) -> Iterator[tuple[RotaryTable, int, int]]:
    """Yield (table, number of heads, head_dim) of all keys that the kernel would embed."""
    for layer in calibration.layers:
        for recipe, (heads, dim) in zip(layer.components, layer.shape.parts, strict=True):
            if recipe.rotary is not None and recipe.post is None:
                yield recipe.rotary, heads, dim


def _kernel() -> EmbedKernel:
    """Return the kernel; imports Triton, which may not be installed."""
    from inference_svc.runtime.cuda.key_rotation import embed_on_device

    return embed_on_device


@torch.inference_mode()
def _why_refuted(
    loaded: LoadedModel, kernel: EmbedKernel, kinds: list[tuple[RotaryTable, int, int]]
) -> str:
    """Return why the kernel must not serve the model; "": its results are torch's to the bit."""
    num_tokens = min(PROOF_TOKENS, loaded.context_window)
    chance = torch.Generator().manual_seed(5)
    try:
        for rotary, heads, dim in kinds:
            for start in (0, loaded.context_window - num_tokens):
                drawn = torch.randn(num_tokens, heads, dim, generator=chance)
                keys = drawn.to(loaded.device, loaded.dtype)
                # Every other slot, in reverse order: the slots between them must not change.
                region = keys.new_zeros(2 * num_tokens, heads, dim)
                slots = torch.arange(num_tokens, device=loaded.device).flip(0) * 2
                kernel(keys, rotary.tables(start, num_tokens), region, slots)
                expected = torch.zeros_like(region)
                expected[slots] = rotary.rotate(keys, start)
                if not torch.equal(region, expected):
                    return f"keys from position {start} on differ from those of torch in some bits"
    except Exception as error:  # noqa: BLE001 - compilers and drivers may raise anything
        return reason_of(error)
    return ""
