"""ForwardCall: calls a causal language model the way its class wants to be called.

Signatures differ: models without position embeddings take no `position_ids`, a few compute the
logits of all tokens whether or not they are wanted. Knows no architecture: it asks the signature.
"""

import inspect
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache


class ForwardCall:
    """Calls one model's forward over a batch of one."""

    def __init__(self, model: Any) -> None:
        """Read the signature."""
        self._model = model
        self._parameters = frozenset(inspect.signature(type(model).forward).parameters)

    @property
    def takes_cache(self) -> bool:
        """Whether the model has a cache of keys and values at all."""
        return "past_key_values" in self._parameters

    @property
    def takes_positions(self) -> bool:
        """Whether positions can be given; else the model counts them, or has none."""
        return "position_ids" in self._parameters

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        wanted: Tensor,
        cache: Cache,
        **options: Any,
    ) -> Tensor:
        """Run a forward; returns logits [wanted, vocab].

        Args:
            token_ids: [1, tokens].
            positions: [1, tokens].
            wanted: [wanted] indices of tokens. A tensor even if empty: an int makes some models
                drop queries of layers that share KV.
            cache: takes what layers cache.
            options: of the model's own.
        """
        if self.takes_positions:
            options["position_ids"] = positions
        is_sparing = "logits_to_keep" in self._parameters
        if is_sparing:
            options["logits_to_keep"] = wanted
        answer = self._model(input_ids=token_ids, past_key_values=cache, use_cache=True, **options)
        logits: Tensor = answer.logits[0]
        return logits if is_sparing else logits[wanted]
