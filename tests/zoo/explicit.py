"""The reference where a weighted norm follows the rotary embedding (Hunyuan).

Scores of such a model depend on absolute positions, a little: a history at shifted positions
has other hidden states. So keys are taken before the embedding, from a history at
unshifted positions, and embedded and normed for the new ones by the model's own functions: the
paper's formula (CachedAttention, section 3.4).
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tests.zoo.reference import Stock

APPLY = "apply_rotary_pos_emb"


class ExplicitStock(Stock):
    """See the module docstring; its layers have `self_attn.key_layernorm`."""

    def _run(self, token_ids: Sequence[int], *, shift: int = 0, up: int = 0) -> DynamicCache:
        """Run a history; return its cache, with keys embedded at positions from `shift` on."""
        namespace = vars(sys.modules[type(self._model).__module__])
        with _collect_keys(namespace) as seen:
            cache = super()._run(token_ids)
        positions = torch.arange(shift, shift + len(token_ids))[None]
        base = self._model.model
        cosines, sines = base.rotary_emb(seen[0], position_ids=positions)
        for layer, key, cached in zip(base.layers, seen, cache.layers, strict=True):
            _, turned = namespace[APPLY](key, key, cosines, sines)
            cached.keys = layer.self_attn.key_layernorm(turned)
        return cache


@contextmanager
def _collect_keys(namespace: dict[str, Any]) -> Iterator[list[Tensor]]:
    """Collect the keys of each layer before they are embedded."""
    apply, seen = namespace[APPLY], []

    def note(query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
        seen.append(key)
        return apply(query, key, *args, **options)

    namespace[APPLY] = note
    try:
        yield seen
    finally:
        namespace[APPLY] = apply
