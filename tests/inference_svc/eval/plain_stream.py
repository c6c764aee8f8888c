"""Streams a text through a window with stock Transformers, and RoPE by its formula.

Every function returns -ln p of all tokens but the first, as float64.
"""

import torch
from torch.nn import functional
from transformers import DynamicCache


@torch.no_grad()
def recompute(model, token_ids, window, drop, sinks=0):
    """Truncate tokens: each piece of text has its own forward, with the rest before it."""
    losses, context, done = [], [], 0
    while done < len(token_ids) - 1:
        if len(context) == window:
            context = context[:sinks] + context[sinks + drop :]
        new = token_ids[done : min(done + window - len(context), len(token_ids) - 1)]
        logits = model(torch.tensor([context + new])).logits[0, len(context) :]
        losses.append(_losses(logits, token_ids, done))
        context, done = context + new, done + len(new)
    return torch.cat(losses)


@torch.no_grad()
def keep_rows(model, token_ids, window, drop, *, turned):
    """Truncate KV: cached rows stay as they are, or keys are rotated back by `drop`."""
    cache, losses, num_rows, done = DynamicCache(), [], 0, 0
    while done < len(token_ids) - 1:
        if num_rows == window:
            cache, num_rows = _truncate(model, cache, drop, turned=turned), window - drop
        new = token_ids[done : min(done + window - num_rows, len(token_ids) - 1)]
        positions = torch.arange(num_rows, num_rows + len(new))[None]
        logits = model(torch.tensor([new]), position_ids=positions, past_key_values=cache).logits[0]
        losses.append(_losses(logits, token_ids, done))
        num_rows, done = num_rows + len(new), done + len(new)
    return torch.cat(losses)


def _losses(logits, token_ids, done):
    targets = torch.tensor(token_ids[done + 1 : done + 1 + len(logits)])
    return functional.cross_entropy(logits.double(), targets, reduction="none")


def _truncate(model, cache, drop, *, turned):
    left = DynamicCache()
    for index, layer in enumerate(cache.layers):
        keys = layer.keys[:, :, drop:]
        left.update(turn(model, keys, -drop) if turned else keys, layer.values[:, :, drop:], index)
    return left


def turn(model, keys, distance):
    """Rotate by Llama's RoPE formula: pairs (i, i + dim/2), theta^(-2i/dim) per position."""
    dim = keys.shape[-1]
    theta = model.config.rope_parameters["rope_theta"]
    angles = distance * theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    first, second = keys.double().chunk(2, dim=-1)
    return torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ),
        dim=-1,
    ).to(keys.dtype)
