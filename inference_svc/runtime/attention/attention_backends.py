"""The table of attention back-ends, by the name that `model.attention` gives them."""

from collections.abc import Callable

import torch

from inference_svc.runtime.attention.attention import AttentionBackend
from inference_svc.runtime.attention.torch_attention import TorchAttention
from shared.types.errors import ConfigError

AUTO = "auto"  # the best there is for the device
_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch": TorchAttention}


def make_attention(name: str, _device: torch.device) -> AttentionBackend:
    """Make the back-end of that name for a device.

    Raises:
        ConfigError: if there is none of that name.
    """
    make = _BACKENDS.get("torch" if name == AUTO else name)
    if make is None:
        raise ConfigError(
            f"there is no attention back-end {name!r}",
            f"set model.attention to {' or '.join((AUTO, *_BACKENDS))}",
        )
    return make()
