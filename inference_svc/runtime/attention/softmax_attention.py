"""Exact softmax attention of one sequence's new tokens over its KV, in torch.

Pure tensor functions over [1, heads, tokens, dim]; the last keys and values are the new tokens'
own. A result depends on this one sequence alone.

The reasons for each path, measured on one core of an EPYC (Zen 5) with 64-wide heads:
- one token: the query heads of a group become query rows, so that keys are read once per group
  (0.6 of the time of `enable_gqa` in float32, 0.2 in bfloat16, for groups of four);
- tokens after a history: attention over the history without a mask, and over the new tokens with
  the causal flag, merged by their log-sum-exps. A mask costs 5 % at 1K to 12 % at 28K, more as
  booleans, and prevents packing the heads of a group (another 8 % at 28K);
- long chunks: tiles, because the kernel also computes what the causal flag hides. They take 0.8 of
  the time for 512 tokens without history. Smaller tiles read a long history more often and lose;
- a window: a mask over the tile's window;
- chunked attention: tiles that end where a chunk does, without a mask;
- softcap: plain matrix products, since no kernel supports it;
- devices other than the CPU: a mask, since their log-sum-exps have no portable interface.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

TILE_TOKENS = 256  # query rows computed together
MAX_SCORES = 2**24  # most scores of a tile that are held at once: 64 MiB

# Masks of one dtype and device by (query rows, key rows, window).
Masks = dict[tuple[int, int, int | None], Tensor]
_flash_kernel = torch._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001


class AttentionOptions(NamedTuple):
    """The options of an attention call, besides its tensors.

    Attributes:
        scale: factor of query-key products; None: 1 / sqrt(dim).
        softcap: bound of the scores by tanh; None: none.
        sinks: [heads], an extra score per head that takes weight but has no value; None: none.
        window: number of latest keys that a query sees, its own included; None: all.
        chunk: a query sees keys from the last multiple of this number on; None: all.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    window: int | None = None
    chunk: int | None = None

    def first_visible(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position - position % self.chunk)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    options: AttentionOptions,
    masks: Masks,
    first: int = 0,
) -> Tensor:
    """Attend a sequence's new tokens to all its tokens up to themselves.

    Args:
        query: [1, heads, tokens, head_dim].
        keys: [1, kv_heads, length, head_dim], length >= tokens.
        values: [1, kv_heads, length, value_dim].
        options: scale, softcap, sinks and window of the call.
        masks: cached masks for this dtype and device; new ones are added.
        first: position of the first key; no new token sees an earlier one.

    Returns:
        [1, heads, tokens, value_dim]
    """
    num_heads, num_tokens = query.shape[1:3]
    needs_scores = _needs_scores(query, values, options)
    tile_tokens = TILE_TOKENS
    if needs_scores:
        tile_tokens = max(1, min(TILE_TOKENS, MAX_SCORES // (num_heads * keys.shape[2])))
    attended: list[Tensor] = []
    for new, seen in tiles(num_tokens, keys.shape[2], tile_tokens, options, first):
        tile = (query[:, :, new], keys[:, :, seen], values[:, :, seen])
        if needs_scores:
            attended.append(_by_scores(*tile, options))
        elif new.stop - new.start == 1:
            attended.append(_attend_lone(*tile, options))
        elif _has_flash(query, values):
            attended.append(_by_flash(*tile, options, masks))
        else:
            attended.append(_by_mask(*tile, options, masks))
    return attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)


def tiles(
    num_tokens: int, length: int, tile_tokens: int, options: AttentionOptions, first: int = 0
) -> Iterator[tuple[slice, slice]]:
    """Divide a sequence's new tokens into tiles, each of which attends in one call.

    Args:
        num_tokens: number of the sequence's new tokens.
        length: number of all its tokens, the new ones included.
        tile_tokens: most tokens of a tile, which also ends where a chunk of attention does.
        options: window and chunk of the call.
        first: position of the first key.

    Yields:
        (slice of the new tokens, slice of the keys that any of these sees).
    """
    past = length - num_tokens
    begin = end = 0
    while end < num_tokens:
        begin, end = end, min(end + tile_tokens, num_tokens)
        if options.chunk is not None:
            end = min(end, begin + options.chunk - (first + past + begin) % options.chunk)
        seen_from = options.first_visible(first + past + begin) - first
        assert seen_from >= 0, "a token sees others that are not there"  # noqa: S101
        yield slice(begin, end), slice(seen_from, past + end)


def attend_one(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Attend one token to all given keys; only if `can_attend_one`.

    Args:
        query: [1, kv_heads, group, head_dim], query heads grouped by the key head that they share.
        keys: [1, kv_heads, length, head_dim], already cut to the window.
        values: [1, kv_heads, length, value_dim].
        options: scale, softcap and sinks of the call.

    Returns:
        [1, kv_heads, group, value_dim]
    """
    if not _has_flash(query, values):
        return scaled_dot_product_attention(query, keys, values, scale=options.scale)
    attended: Tensor
    log_sums: Tensor
    attended, log_sums = _flash_kernel(query, keys, values, scale=options.scale)
    if options.sinks is not None:
        attended = _with_sinks(attended, log_sums, options.sinks.view(log_sums.shape))
    return attended


def can_attend_one(query: Tensor, values: Tensor, options: AttentionOptions) -> bool:
    """Whether `attend_one` supports a call with such tensors, for any number of tokens."""
    return not _needs_scores(query, values, options)


def visible_mask(num_tokens: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return the keys that the last `num_tokens` positions see, [num_tokens, length] bool."""
    distance = (
        torch.arange(length - num_tokens, length, device=device)[:, None]
        - torch.arange(length, device=device)[None, :]
    )
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return mask


def _has_flash(query: Tensor, values: Tensor) -> bool:
    """Whether the kernel that returns log-sum-exps supports these tensors."""
    return query.device.type == "cpu" and query.shape[3] == values.shape[3]


def _needs_scores(query: Tensor, values: Tensor, options: AttentionOptions) -> bool:
    """Whether no kernel supports the call, so that scores have to be computed by products."""
    return options.softcap is not None or (
        options.sinks is not None and not _has_flash(query, values)
    )


def _attend_lone(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Attend one token, [1, heads, 1, dim], by the same arithmetic as in a decode step."""
    _, num_heads, _, dim = query.shape
    grouped = query.reshape(1, keys.shape[1], -1, dim)
    return attend_one(grouped, keys, values, options).reshape(1, num_heads, 1, -1)


def _by_flash(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, masks: Masks
) -> Tensor:
    """Attend a tile with the kernel that returns log-sum-exps, [1, heads, tokens].

    Shapes are as in `attend`.
    """
    num_tokens, length = query.shape[2], keys.shape[2]
    past, scale = length - num_tokens, options.scale
    attended: Tensor
    log_sums: Tensor
    if options.window is not None and options.window < length:
        mask = _mask(query, length, options.window, masks)
        attended, log_sums = _flash_kernel(query, keys, values, attn_mask=mask, scale=scale)
    else:
        attended, log_sums = _flash_kernel(
            query, keys[:, :, past:], values[:, :, past:], is_causal=True, scale=scale
        )
        if past:
            packed = query.reshape(1, keys.shape[1], -1, query.shape[3])
            seen, seen_sums = _flash_kernel(
                packed, keys[:, :, :past], values[:, :, :past], scale=scale
            )
            seen_sums = seen_sums.reshape(log_sums.shape)
            share = torch.sigmoid(seen_sums - log_sums)[..., None].to(seen.dtype)
            attended = torch.lerp(attended, seen.reshape(attended.shape), share)
            if options.sinks is not None:
                log_sums = torch.logaddexp(log_sums, seen_sums)
    if options.sinks is not None:
        attended = _with_sinks(attended, log_sums, options.sinks[None, :, None])
    return attended


def _by_mask(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, masks: Masks
) -> Tensor:
    """Attend a tile with the kernel that torch chooses for the device; shapes as in `attend`."""
    num_tokens, length = query.shape[2], keys.shape[2]
    is_causal = num_tokens == length and (options.window is None or options.window >= length)
    return scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=None if is_causal else _mask(query, length, options.window, masks),
        is_causal=is_causal,
        scale=options.scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )


def _by_scores(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Attend a tile by plain products, with softcap and sinks; shapes as in `attend`.

    Holds all scores of the tile at once.
    """
    _, num_heads, num_tokens, dim = query.shape
    kv_heads, length = keys.shape[1:3]
    scale = dim**-0.5 if options.scale is None else options.scale
    grouped = query.reshape(kv_heads, -1, dim)  # [kv_heads, group * tokens, dim]
    scores = torch.matmul(grouped, keys[0].transpose(1, 2)) * scale
    scores = scores.view(num_heads, num_tokens, length)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    mask = visible_mask(num_tokens, length, options.window, query.device)
    scores = scores.float().masked_fill_(~mask, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(num_heads, 1, 1).expand(-1, num_tokens, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length].to(values.dtype)
    attended = torch.matmul(weights.reshape(kv_heads, -1, length), values[0])
    return attended.view(1, num_heads, num_tokens, -1)


def _with_sinks(attended: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Give each row's sink its part of the weight; `sinks` fits `log_sums` [1, heads, rows]."""
    return attended * torch.sigmoid(log_sums - sinks)[..., None].to(attended.dtype)


def _mask(query: Tensor, length: int, window: int | None, masks: Masks) -> Tensor:
    """Return the additive mask of a tile, [tokens, length] in the query's dtype."""
    key = (query.shape[2], length, window)
    if key not in masks:
        visible = visible_mask(*key, query.device)
        masks[key] = torch.zeros_like(visible, dtype=query.dtype).masked_fill_(
            ~visible, float("-inf")
        )
    return masks[key]
