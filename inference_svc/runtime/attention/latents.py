"""Attention over latents: what a layer caches in the place of its heads' keys and values (MLA).

A model of latent attention makes keys and values of all heads of every token that it attends to, in
every step. That is linear in the latent. So a query can be multiplied with what makes the keys
(absorbed) and be compared with latents themselves, and what it attends to are latents, of which the
values are made last: once per query, and not once per token of the history.

    score    = query . (keys @ latent) + rotated . rotated    = (query @ keys) . latent + ...
    attended = sum of weight * (values @ latent)              = values @ (sum of weight * latent)

Latent and rotated part, side by side, are then the one key head of all query heads, and its value
too: `softmax_attention.attend` has all the arithmetic.

*Source:* DeepSeek-V2 (2024), section 2.1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from inference_svc.runtime.attention.softmax_attention import AttentionOptions, Masks, attend


@dataclass(frozen=True, eq=False)
class Expansion:
    """How keys and values of all heads are made of a token's latent and its rotated part.

    Attributes:
        keys: [heads, free_dim, latent_dim], what a head's key has of a latent.
        values: [heads, latent_dim, value_dim], what a head's value has of it.
        rotated_dim: width of the rotated part, which each head's key has as it is cached.
        is_rotated_first: whether it comes before the rest of the key.
    """

    keys: Tensor
    values: Tensor
    rotated_dim: int
    is_rotated_first: bool

    @property
    def latent_dim(self) -> int:
        """Width of a latent."""
        return self.keys.shape[2]

    def absorb(self, query: Tensor) -> Tensor:
        """Return what is compared with latents and rotated parts side by side.

        Args:
            query: [1, heads, tokens, key_dim].

        Returns:
            [1, heads, tokens, latent_dim + rotated_dim]
        """
        free_dim = self.keys.shape[1]
        first = self.rotated_dim if self.is_rotated_first else 0
        free = query[0].narrow(2, first, free_dim)
        rotated = query[0].narrow(2, 0 if self.is_rotated_first else free_dim, self.rotated_dim)
        return torch.cat((torch.bmm(free, self.keys), rotated), dim=2).unsqueeze(0)

    def values_of(self, attended: Tensor) -> Tensor:
        """Return the values of attended latents, [1, heads, tokens, value_dim].

        Args:
            attended: [1, heads, tokens, latent_dim + rotated_dim], as `attend_absorbed` returns it.
        """
        return torch.bmm(attended[0, :, :, : self.latent_dim], self.values).unsqueeze(0)

    def pays(self, num_tokens: int, length: int) -> bool:
        """Whether attending over latents takes less time than making keys and values of them.

        By the number of products of either way, and by nothing that is measured: two starts of one
        model would round differently. At DeepSeek-V2-Lite's widths that is below 150 tokens behind
        1,024; measured on a CPU in float32: below 130.

        Args:
            num_tokens: number of the sequence's new tokens.
            length: number of all its tokens, the new ones included.
        """
        _, free_dim, latent_dim = self.keys.shape
        value_dim = self.values.shape[2]
        expanding = latent_dim * (free_dim + value_dim)  # of one token, or one query, of one head
        over_latents = 2 * (latent_dim + self.rotated_dim)  # of one query and one token
        over_heads = 2 * max(free_dim + self.rotated_dim, value_dim)
        absorbed = num_tokens * (expanding + length * over_latents)
        return absorbed < length * (expanding + num_tokens * over_heads)


def attend_absorbed(
    query: Tensor, latents: Tensor, options: AttentionOptions, masks: Masks
) -> Tensor:
    """Attend a sequence's absorbed queries to its latents.

    Args:
        query: [1, heads, tokens, latent_dim + rotated_dim], as `Expansion.absorb` returns it.
        latents: [1, 1, length, latent_dim + rotated_dim], latents and rotated parts side by side.
        options: of the call, its scale named: it is that of a head's key.
        masks: as `softmax_attention.attend` takes them.

    Returns:
        [1, heads, tokens, latent_dim + rotated_dim], of which the latents are to be used.
    """
    return attend(query, latents, latents, options, masks)


MAX_CHOSEN = 2**24  # elements of chosen latents that are held at once: 64 MiB in float32


def attend_chosen(
    query: Tensor, latents: Tensor, chosen: Tensor, options: AttentionOptions
) -> Tensor:
    """Attend a sequence's absorbed queries to the latents that were chosen for each of them.

    Args:
        query: [1, heads, tokens, dim], as in `attend_absorbed`.
        latents: [1, 1, length, dim], longer than `chosen` is wide.
        chosen: [tokens, chosen] positions. A query that sees fewer tokens is given all of them, and
            others that it must not see: other sequences' (outside of `length`), or later ones.
        options: of the call: its scale and sinks.

    Returns:
        [1, heads, tokens, dim], of which the latents are to be used.
    """
    _, _, num_tokens, dim = query.shape
    length, num_chosen = latents.shape[2], chosen.shape[1]
    size = max(1, MAX_CHOSEN // (num_chosen * dim))
    positions = torch.arange(length - num_tokens, length, device=query.device)
    hidden = (chosen < 0) | (chosen > positions[:, None])
    attended = []
    for first in range(0, num_tokens, size):
        tile = slice(first, first + size)
        rows, unseen = query[0, :, tile].transpose(0, 1).unsqueeze(1), hidden[tile]
        places = chosen[tile].masked_fill(unseen, 0)
        found = latents[0, 0].index_select(0, places.flatten()).view(len(rows), 1, -1, dim)
        mask = None
        if num_chosen > length - num_tokens or options.sinks is not None:
            # Some see fewer than are chosen; or there is a key of zeros, whose score is the sink's.
            mask = torch.zeros_like(unseen, dtype=query.dtype).masked_fill_(unseen, float("-inf"))
            mask = mask[:, None, None].expand(-1, -1, rows.shape[2], -1)
        if mask is not None and options.sinks is not None:
            sinks = options.sinks.to(mask).view(1, 1, -1, 1).expand(len(rows), -1, -1, -1)
            mask, found = torch.cat((mask, sinks), dim=-1), pad(found, (0, 0, 0, 1))
        attended.append(
            scaled_dot_product_attention(rows, found, found, attn_mask=mask, scale=options.scale)
        )
    return torch.cat(attended)[:, 0].transpose(0, 1).unsqueeze(0)
