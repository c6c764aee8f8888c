"""Whether compiled kernels can serve on a device, and how their failures are reported."""

import importlib.util
import os

import torch


def is_gpu(device: torch.device) -> bool:
    """Whether kernels are compiled for this device."""
    return device.type == "cuda"


def no_kernels_on(device: torch.device) -> str:
    """Return why Triton's kernels cannot run on a device; "": they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not is_gpu(device) and os.environ.get("TRITON_INTERPRET") != "1":
        return f"device {device} is not a GPU"
    return ""


def reason_of(error: Exception) -> str:
    """Describe an error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
