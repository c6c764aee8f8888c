"""Attention over latents, which a layer caches in place of its heads' keys and values (MLA).

In every step, a model with latent attention expands each token that it attends to into keys and
values of all heads. That expansion is linear in the latent. So the query can be multiplied by the
key matrix first (weight absorption) and compared with the latents themselves. The weighted sum of
latents is then expanded into values: once per query, and not once per token of the history.

    score    = query . (keys @ latent) + rotated . rotated    = (query @ keys) . latent + ...
    attended = sum of weight * (values @ latent)              = values @ (sum of weight * latent)

Latent and rotated part, side by side, act as a single key head that all query heads share, and as
its value too: `softmax_attention.attend` has all the arithmetic.

*Source:* DeepSeek-V2 (2024), section 2.1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from inference_svc.runtime.attention.softmax_attention import AttentionOptions, Masks, attend


@dataclass(frozen=True, eq=False)
class Expansion:
    """The matrices that make keys and values of all heads from a token's latent.

    Attributes:
        keys: [heads, unrotated_dim, latent_dim], makes a head's key without its rotated part.
        values: [heads, latent_dim, value_dim], makes a head's value.
        rotated_dim: width of the rotated part, which is copied into each head's key.
        is_rotated_first: whether the rotated part is at the beginning of the key.
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
        """Multiply a query by the key matrices, to be compared with latents and rotated parts.

        Args:
            query: [1, heads, tokens, key_dim].

        Returns:
            [1, heads, tokens, latent_dim + rotated_dim]
        """
        unrotated_dim = self.keys.shape[1]
        first = self.rotated_dim if self.is_rotated_first else 0
        unrotated = query[0].narrow(2, first, unrotated_dim)
        rotated = query[0].narrow(
            2, 0 if self.is_rotated_first else unrotated_dim, self.rotated_dim
        )
        return torch.cat((torch.bmm(unrotated, self.keys), rotated), dim=2).unsqueeze(0)

    def values_of(self, attended: Tensor) -> Tensor:
        """Expand attended latents into values.

        Args:
            attended: [1, heads, tokens, latent_dim + rotated_dim], from `attend_absorbed`.

        Returns:
            [1, heads, tokens, value_dim]
        """
        return torch.bmm(attended[0, :, :, : self.latent_dim], self.values).unsqueeze(0)

    def pays(self, num_tokens: int, length: int) -> bool:
        """Whether attention over latents is faster than expanding them into keys and values.

        Decided by the number of multiplications of both, and not by a measurement: two starts of
        one model would round differently. With DeepSeek-V2-Lite's widths it is faster below 150
        tokens behind 1,024; measured on a CPU in float32: below 130.

        Args:
            num_tokens: number of the sequence's new tokens.
            length: number of all its tokens, the new ones included.
        """
        _, unrotated_dim, latent_dim = self.keys.shape
        value_dim = self.values.shape[2]
        # Multiplications of one head: to expand a token (or absorb a query); per query and key.
        expanding = latent_dim * (unrotated_dim + value_dim)
        over_latents = 2 * (latent_dim + self.rotated_dim)
        over_heads = 2 * max(unrotated_dim + self.rotated_dim, value_dim)
        absorbed = num_tokens * (expanding + length * over_latents)
        return absorbed < length * (expanding + num_tokens * over_heads)


def attend_absorbed(
    query: Tensor, latents: Tensor, options: AttentionOptions, masks: Masks
) -> Tensor:
    """Attend a sequence's absorbed queries to its latents.

    Args:
        query: [1, heads, tokens, latent_dim + rotated_dim], from `Expansion.absorb`.
        latents: [1, 1, length, latent_dim + rotated_dim], latents and rotated parts side by side.
        options: options of the call, with a scale: the default one depends on a head's key_dim.
        masks: cached masks; see `softmax_attention.attend`.

    Returns:
        [1, heads, tokens, latent_dim + rotated_dim]; only the first latent_dim elements have a
        meaning.
    """
    return attend(query, latents, latents, options, masks)


MAX_CHOSEN = 2**24  # most elements of chosen latents that are held at once: 64 MiB in float32


def attend_chosen(
    query: Tensor, latents: Tensor, chosen: Tensor, options: AttentionOptions
) -> Tensor:
    """Attend a sequence's absorbed queries to the latents that were chosen for each of them.

    Args:
        query: [1, heads, tokens, dim], as in `attend_absorbed`.
        latents: [1, 1, length, dim], where length is larger than the number of chosen tokens.
        chosen: [tokens, chosen] positions. For a query that sees fewer tokens, the model's index
            adds tokens that it must not see: later ones, or other sequences' (outside of length).
        options: scale and sinks of the call.

    Returns:
        [1, heads, tokens, dim]; only the first latent_dim elements have a meaning.
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
            # A mask is needed if some queries see fewer tokens than are chosen. A sink also needs
            # one: it is a key and value of zeros, whose score is added by the mask.
            mask = torch.zeros_like(unseen, dtype=query.dtype).masked_fill_(unseen, float("-inf"))
            mask = mask[:, None, None].expand(-1, -1, rows.shape[2], -1)
        if mask is not None and options.sinks is not None:
            sinks = options.sinks.to(mask).view(1, 1, -1, 1).expand(len(rows), -1, -1, -1)
            mask, found = torch.cat((mask, sinks), dim=-1), pad(found, (0, 0, 0, 1))
        attended.append(
            scaled_dot_product_attention(rows, found, found, attn_mask=mask, scale=options.scale)
        )
    return torch.cat(attended)[:, 0].transpose(0, 1).unsqueeze(0)
