"""Attention of one sequence's new tokens over its slab, in torch.

Pure tensor functions over [1, heads, tokens, dim]; the last rows of keys and values are the new
tokens' own. A result depends on this one sequence alone, never on what else is in the batch.

Paths, all of them exact softmax attention:
- decode (one token): the query heads of a group become query rows, so that keys are read once per
  group, not copied;
- prefill: SDPA with a causal flag if there is no history, else with a boolean mask;
- softcap or attention sinks: plain matrix products, SDPA has neither.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class AttentionOptions:
    """What an attention call asks for besides its tensors.

    Attributes:
        scale: of query-key products; None: 1 / sqrt(dim).
        softcap: bound of the scores by tanh; None: none.
        sinks: [heads] one extra score per head that takes weight but has no value; None: none.
        window: number of latest keys a query sees, itself included; None: all.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    window: int | None = None

    @property
    def is_plain(self) -> bool:
        """SDPA can do it."""
        return self.softcap is None and self.sinks is None


def visible_mask(num_tokens: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return [num_tokens, length] bool: which keys the last `num_tokens` positions see."""
    distance = (
        torch.arange(length - num_tokens, length, device=device)[:, None]
        - torch.arange(length, device=device)[None, :]
    )
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return mask


def attend(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, mask: Tensor | None
) -> Tensor:
    """Attend new tokens to all rows given.

    Args:
        query: [1, heads, tokens, dim].
        keys: [1, kv_heads, length, dim].
        values: [1, kv_heads, length, value_dim].
        options: of the call; a window is already in `mask`.
        mask: [tokens, length] from `visible_mask`; None: no history, every token sees itself and
            those before.

    Returns:
        [1, heads, tokens, value_dim]
    """
    if not options.is_plain:
        if mask is None:
            mask = visible_mask(query.shape[2], keys.shape[2], None, query.device)
        return _plain_attention(query, keys, values, options, mask)
    return scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=options.scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )


def attend_one(query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """Attend one token to all rows given.

    Args:
        query: [1, kv_heads, group, dim], the query heads that share a key head side by side.
        keys: as for `attend`, already cut to the window.
        values: as for `attend`.
        scale: as in AttentionOptions.

    Returns:
        [1, kv_heads, group, value_dim]
    """
    return scaled_dot_product_attention(query, keys, values, scale=scale)


def _plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, mask: Tensor
) -> Tensor:
    """Attend with softcap and sinks; holds all scores at once, [heads, tokens, length]."""
    _, num_heads, num_tokens, dim = query.shape
    kv_heads, length = keys.shape[1:3]
    scale = dim**-0.5 if options.scale is None else options.scale
    grouped = query.reshape(kv_heads, -1, dim)  # [kv_heads, group * tokens, dim]
    scores = torch.matmul(grouped, keys[0].transpose(1, 2)) * scale
    scores = scores.view(num_heads, num_tokens, length)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(num_heads, 1, 1).expand(-1, num_tokens, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length].to(values.dtype)
    attended = torch.matmul(weights.reshape(kv_heads, -1, length), values[0])
    return attended.view(1, num_heads, num_tokens, -1)
