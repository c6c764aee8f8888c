"""What the stock model answers after the first tokens were taken out of its cache.

RoPE counts differences only: a history whose rotary embedding is told positions that are all `n`
less has the same hidden states, and keys embedded `n` earlier. So the history is run like that, its
first rows are cut off, and the stock model goes on at the new positions. The rotary modules alone
are told: some models scale queries by their position besides.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from inference_svc.runtime.model.forward_call import ForwardCall


def truncated_logits(model: Any, token_ids: Tensor, num_stored: int, num_dropped: int) -> Tensor:
    """Return the logits of the tokens behind `num_stored`, [tokens - num_stored, vocab].

    A model without rotary modules goes on at unchanged positions: the differences are the same.

    Args:
        model: set to its own attention.
        token_ids: [1, tokens].
        num_stored: tokens of the history.
        num_dropped: first tokens of the history that are taken out.

    Raises:
        whatever a model raises whose cache cannot do that.
    """
    rotaries = [module for module in model.modules() if "rotary" in type(module).__name__.lower()]
    history, new = token_ids[:, :num_stored], token_ids[:, num_stored:]
    call, device = ForwardCall(model), token_ids.device
    whole = DynamicCache()  # without a config: no layer forgets what left its window
    none = torch.arange(0, device=device)
    with _told(rotaries, -num_dropped):
        call(history, torch.arange(num_stored, device=device)[None], none, whole)
    first = num_stored - num_dropped if rotaries else num_stored
    positions = torch.arange(first, first + new.shape[1], device=device)[None]
    wanted = torch.arange(new.shape[1], device=device)
    return call(new, positions, wanted, _without_first(whole, num_dropped))


def _without_first(cache: DynamicCache, num_dropped: int) -> DynamicCache:
    cut = DynamicCache()
    layers: list[Any] = list(cache.layers)
    for layer_index, layer in enumerate(layers):
        keys, values = layer.keys, layer.values
        cut.update(keys[..., num_dropped:, :], values[..., num_dropped:, :], layer_index)
    return cut


@contextmanager
def _told(rotaries: list[Any], shift: int) -> Iterator[None]:
    """Have the rotary modules see positions that are `shift` more, inside the block."""

    def moved(value: Any) -> Any:
        is_positions = isinstance(value, Tensor) and not value.is_floating_point()
        return value + shift if is_positions else value

    def tell(_module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return tuple(map(moved, args)), {name: moved(value) for name, value in options.items()}

    handles = [module.register_forward_pre_hook(tell, with_kwargs=True) for module in rotaries]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
