"""Rotation choice: what embeds loaded keys, by device, installed packages and proof.

    torch   rotates keys in place after they were copied, in several calls; supports every recipe
    cpp     one kernel that copies tokens and rotates keys on the way, on a CPU; supports float32
            and bfloat16. Needs g++
    triton  one kernel that rotates keys while it writes them to their token slots. Needs Triton,
            and a GPU (TRITON_INTERPRET=1 runs it on a CPU, slowly)

Both kernels support keys without a norm after RoPE; others are left to torch.

Before it serves, a kernel embeds random keys by each of the model's own rotary tables, at the first
and the last positions of the window. If a single bit differs from torch's result, or it fails,
torch serves: loaded KV has to equal the computed KV.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import structlog
import torch
from torch import Tensor

from inference_svc.runtime.calibration.kernels import is_gpu, no_kernels_on, reason_of
from inference_svc.runtime.cpu.native_library import NativeLibraryError
from inference_svc.runtime.cpu.token_kernel import TokenKernel
from inference_svc.runtime.kv.layer_tensors import TokenRoom
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.positions.rotary import RotaryTable
from inference_svc.runtime.positions.rotation import (
    BY_TORCH,
    EmbedKernel,
    LoadKernel,
    LoadKernels,
    Tables,
    TokenCopy,
)
from shared.types.errors import ConfigError

RotationName = Literal["auto", "torch", "cpp", "triton"]
PROOF_TOKENS = 100  # tokens at each end of the window
# Positions of a longer window that a CPU proves: tables up to its end would take memory at start.
CPU_WINDOW = 1 << 14

# Loads keys, [n, heads, dim], with the factors of their positions, to every other row of a region,
# [2 n, heads, dim]; returns the row of each. The rows between them must not change.
_Load = Callable[[Tensor, Tables | None, Tensor], Tensor]

log = structlog.get_logger()


def choose_rotation(
    name: RotationName, loaded: LoadedModel, calibration: Calibration
) -> LoadKernels:
    """Return the kernels that load a model's KV.

    Args:
        name: "cpp", "triton" or "torch", or "auto" for the device's kernel if it is proven.
        loaded: the model.
        calibration: the model's calibration.

    Raises:
        ConfigError: the kernel is named and cannot serve here, or its results differ.
    """
    if name == "torch":
        return BY_TORCH
    on_gpu = is_gpu(loaded.device)
    if name == "auto" and on_gpu and not any(_is_embedded(kind) for kind in _kinds(calibration)):
        return BY_TORCH
    fastest: RotationName = "triton" if on_gpu else "cpp"
    wanted = fastest if name == "auto" else name
    found = (_prove_triton if wanted == "triton" else _prove_cpp)(loaded, calibration)
    if not isinstance(found, str):
        log.info("rotation_chosen", rotation=wanted)
        return found
    if name == wanted:
        raise ConfigError(
            f"model.rotation = {name} cannot be used: {found}", "set it to auto or torch"
        )
    report = log.warning if on_gpu else log.info
    report("rotation_chosen", rotation="torch", reason=found)
    return BY_TORCH


class _Kind(NamedTuple):
    """A kind of token that a model stores.

    Attributes:
        rotary: the table that embeds it; None: it is only copied.
        has_norm: whether a norm follows.
        shape: (heads, dim).
    """

    rotary: RotaryTable | None
    has_norm: bool
    shape: tuple[int, int]


def _kinds(calibration: Calibration) -> list[_Kind]:
    """Return the kinds of tokens of all layers, each once."""
    return list(
        dict.fromkeys(
            _Kind(recipe.rotary, recipe.post is not None, shape)
            for layer in calibration.layers
            for recipe, shape in zip(layer.components, layer.shape.parts, strict=True)
        )
    )


def _is_embedded(kind: _Kind) -> bool:
    """Whether an `EmbedKernel` embeds these tokens."""
    return kind.rotary is not None and not kind.has_norm


def _prove_triton(loaded: LoadedModel, calibration: Calibration) -> LoadKernels | str:
    """Return the triton kernel, or why it cannot serve."""
    kinds = [kind for kind in _kinds(calibration) if _is_embedded(kind)]
    if not kinds:
        return "the model has no keys that it could rotate"
    reason = no_kernels_on(loaded.device)
    if reason:
        return reason
    kernel = _embed_kernel()

    def embed(keys: Tensor, tables: Tables | None, region: Tensor) -> Tensor:
        slots = torch.arange(len(keys), device=keys.device).flip(0) * 2
        if tables is not None:  # true of all these kinds
            kernel(keys, tables, region, slots)
        return slots

    return _why_refuted(loaded, kinds, embed, loaded.context_window) or LoadKernels(embed=kernel)


def _prove_cpp(loaded: LoadedModel, calibration: Calibration) -> LoadKernels | str:
    """Return the cpp kernel, or why it cannot serve."""
    if loaded.device.type != "cpu":
        return f"device {loaded.device} is not a CPU"
    try:
        kernel = _load_kernel()
    except NativeLibraryError as error:
        return str(error)

    def load(keys: Tensor, tables: Tables | None, region: Tensor) -> Tensor:
        backwards = torch.arange(len(keys)).flip(0)
        stored = keys[backwards].unsqueeze(1)  # slots of one token
        room = TokenRoom(region, 0, slots=backwards * 2)
        kernel([TokenCopy(stored, backwards * stored.stride(0), room, tables)])
        return backwards * 2

    kinds = [kind for kind in _kinds(calibration) if not kind.has_norm]
    window = min(loaded.context_window, CPU_WINDOW)
    return _why_refuted(loaded, kinds, load, window) or LoadKernels(load=kernel)


def _embed_kernel() -> EmbedKernel:
    """Return the kernel in Triton, which may not be installed."""
    from inference_svc.runtime.cuda.key_rotation import embed_on_device

    return embed_on_device


def _load_kernel() -> LoadKernel:
    """Return the kernel in C++."""
    return TokenKernel.load()


@torch.inference_mode()
def _why_refuted(loaded: LoadedModel, kinds: Sequence[_Kind], load: _Load, window: int) -> str:
    """Return why a kernel must not serve the model; "": its results are torch's to the bit.

    Args:
        loaded: the model.
        kinds: the kinds of tokens that the kernel would load.
        load: loads tokens with it.
        window: number of positions, of which the first and the last are tried.
    """
    num_tokens = min(PROOF_TOKENS, window)
    chance = torch.Generator().manual_seed(5)
    try:
        for rotary, _, (heads, dim) in kinds:
            for start in (0, window - num_tokens):
                drawn = torch.randn(num_tokens, heads, dim, generator=chance)
                keys = drawn.to(loaded.device, loaded.dtype)
                region = keys.new_zeros(2 * num_tokens, heads, dim)
                tables = None if rotary is None else rotary.tables(start, num_tokens)
                places = load(keys, tables, region)
                expected = torch.zeros_like(region)
                expected[places] = keys if rotary is None else rotary.rotate(keys, start)
                if not torch.equal(region, expected):
                    return f"keys from position {start} on differ from those of torch in some bits"
    except Exception as error:  # noqa: BLE001 - compilers and drivers may raise anything
        return reason_of(error)
    return ""
