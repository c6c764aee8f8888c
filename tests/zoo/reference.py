"""The reference: the stock model with its own cache and attention, and no code of this project.

The reference for a discard uses that RoPE is relative: a history whose rotary embedding gets
positions that are all `n` less has the same hidden states, and keys embedded `n` earlier. So for
each kept run of tokens the history is run such that this run comes out at its new positions, its
rows are cut from that cache, and the stock model continues over all of them.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

Range = tuple[int, int]


class Stock:
    """An uncalibrated model."""

    def __init__(self, model: Any) -> None:
        """Store the model, which is ours from now on."""
        self._model = model.eval()
        self._rotaries = [m for m in model.modules() if "rotary" in type(m).__name__.lower()]
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        config = model.config.get_text_config()
        if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
            for module in self._rotaries:
                _tell_longest(module, config.max_position_embeddings)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Run a whole sequence without a cache; return [tokens, vocab]."""
        found: Tensor = self._model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        return found.float()

    @torch.inference_mode()
    def after_discard(
        self, history: Sequence[int], kept: Sequence[Range], new: Sequence[int], *, up: int = 0
    ) -> Tensor:
        """Run `new` after the runs of `history` that were kept, put together.

        Args:
            history: tokens.
            kept: runs of it, in order.
            new: tokens that follow.
            up: added to all positions of a model that has no rotary module, and looks up its
                cosines in a table without negative ones.

        Returns:
            [new tokens, vocab]
        """
        end = 0
        parts = []
        for begin, run_end in kept:
            parts.append((self._run(history, shift=end - begin, up=up), begin, run_end))
            end += run_end - begin
        return self._go_on(_join_caches(parts), new, end + up)

    @torch.inference_mode()
    def with_stale_keys(
        self, history: Sequence[int], kept: Sequence[Range], new: Sequence[int]
    ) -> Tensor:
        """Do the same as `after_discard`, but leave keys embedded where they were."""
        cache = self._run(history)
        end = sum(run_end - begin for begin, run_end in kept)
        return self._go_on(_join_caches([(cache, *run) for run in kept]), new, end)

    def _run(self, token_ids: Sequence[int], *, shift: int = 0, up: int = 0) -> DynamicCache:
        """Run a history with keys embedded at positions from `shift` on; return its cache."""
        cache = _plain_cache()
        if self._rotaries:
            with self._told(shift):
                self._forward(token_ids, 0, cache)
        else:
            self._forward(token_ids, shift + up, cache)
        return cache

    @contextmanager
    def _told(self, shift: int) -> Iterator[None]:
        """Give other positions to rotary modules only: some models scale queries by positions."""

        def moved(value: Any) -> Any:
            is_positions = isinstance(value, Tensor) and not value.is_floating_point()
            return value + shift if is_positions else value

        def tell(_module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            return tuple(map(moved, args)), {name: moved(value) for name, value in options.items()}

        handles = [m.register_forward_pre_hook(tell, with_kwargs=True) for m in self._rotaries]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _go_on(self, cache: DynamicCache, new: Sequence[int], first: int) -> Tensor:
        found: Tensor = self._forward(new, first, cache).logits[0]
        return found.float()

    def _forward(self, token_ids: Sequence[int], first: int, cache: DynamicCache) -> Any:
        options = {}
        if self._takes_positions:
            options["position_ids"] = torch.arange(first, first + len(token_ids))[None]
        return self._model(
            input_ids=torch.tensor([token_ids]), past_key_values=cache, use_cache=True, **options
        )


def _tell_longest(rotary: nn.Module, window: int) -> None:
    """Have a rotary module choose its frequencies for a sequence that fills the window.

    It chooses by the largest position it is given, and so by the other sequences in the batch. The
    model is served with one choice, the one for the window; here the module is given the window's
    last position in addition.
    """

    def add(_module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        positions = options["position_ids"]
        last = torch.full_like(positions[:, :1], window - 1)
        return args, {**options, "position_ids": torch.cat((positions, last), dim=1)}

    rotary.register_forward_pre_hook(add, with_kwargs=True)
    rotary.register_forward_hook(lambda _module, _args, result: tuple(t[:, :-1] for t in result))


def _join_caches(parts: Sequence[tuple[DynamicCache, int, int]]) -> DynamicCache:
    """Make one cache of rows [begin, end) of others."""
    joined = _plain_cache()
    for index in range(len(parts[0][0].layers)):
        rows = [(cache.layers[index], begin, end) for cache, begin, end in parts]
        keys, values = (
            torch.cat([getattr(layer, name)[..., begin:end, :] for layer, begin, end in rows], -2)
            for name in ("keys", "values")
        )
        joined.update(keys, values, index)
        if rows[0][0].is_indexer_initialized:
            runs = [layer.indexer_keys[:, begin:end] for layer, begin, end in rows]
            joined.update_indexer(torch.cat(runs, 1), index)
    return joined


def _plain_cache() -> DynamicCache:
    """Make a cache of keys, values and index keys; no layer drops what left its window."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = DynamicIndexedLayer
    return cache
