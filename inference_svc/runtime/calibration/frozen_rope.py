"""Rotary frequencies that follow the length of a forward, frozen for the served context window.

Dynamic NTK scaling and longrope take their frequencies from the longest position of a forward, and
some keep them for the next: a session's keys would depend on whoever shares its batch, and keys
stored under one frequency could not be used under another. As other servers do, we choose the
frequencies once, for the longest sequence that is served, and keep them: for longrope the long
factors if the window is longer than the original one. The model's own modules are set so, on this
instance alone; forward and tables then agree, and so does the "stock" model that calibration
compares with, which is the model frozen the same way.

What cannot be frozen stays as it is: `layer_recipes` tries all frequencies and refuses those that
vary. Source: the `dynamic_rope_update` decorator of transformers' modeling_rope_utils.py, which
leaves modules alone whose `rope_type` is none of those that follow the length.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from inference_svc.runtime.model.model_loader import LoadedModel

FROZEN = "frozen"  # in place of a rope type; any name does that the decorator does not know


@torch.no_grad()
def freeze_rotary(loaded: LoadedModel) -> tuple[str, ...]:
    """Freeze the model's length-dependent frequencies; repeating it is harmless.

    Returns:
        The rope types that were frozen, sorted; () for most models.
    """
    last = torch.tensor([[loaded.context_window - 1]], device=loaded.device)
    frozen = set()
    for module in loaded.model.modules():
        for layer_type, rope_type in _varying_types(module):
            states = torch.zeros((1, 1, 1), device=loaded.device)
            layer_types = () if layer_type is None else (layer_type,)
            module(states, last, *layer_types)  # updates its frequencies
            if layer_type is None:
                module.rope_type = FROZEN
            else:
                module.rope_type = {**module.rope_type, layer_type: FROZEN}
            frozen.add(rope_type)
    return tuple(sorted(frozen))


def _varying_types(module: nn.Module) -> Iterator[tuple[str | None, str]]:
    """Yield (layer type, rope type) of a rotary module's frequencies that follow the length."""
    rope_type: Any = getattr(module, "rope_type", None)
    by_layer = list(rope_type.items()) if isinstance(rope_type, dict) else [(None, rope_type)]
    for layer_type, name in by_layer:
        if isinstance(name, str) and ("dynamic" in name or name == "longrope"):
            yield layer_type, name
