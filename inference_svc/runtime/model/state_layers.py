"""The layers of a cache that holds nothing, as models see them that look into these.

Transformers has moved from `cache.layers[i].conv_states[k]` to `cache.get_conv_state(i, k)`; models
of either way are answered, here as there by the forward under way. A model that embeds the index
keys of all tokens anew in each forward asks for their positions, and keeps them with its own: with
a layer, or with the cache itself in older versions.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from inference_svc.runtime.kv.states import StateKind, StatePlace
from inference_svc.runtime.model.forward import current_forward
from inference_svc.runtime.model.refusals import REMEDY, ModelModeMissingError


class StateLayers(list[Any]):
    """No layers to whoever counts them; at each index one that has states."""

    def __init__(self, cache: Cache) -> None:
        """Make the layers of a cache, which has to outlive what it is asked of them."""
        super().__init__()
        self._cache = ref(cache)  # no circle: there is a cache for every step

    def __getitem__(self, index: Any) -> Any:
        """Return what a model may look into of the layer that it numbers so."""
        cache = self._cache()
        if cache is None:
            raise AssertionError("a layer of a cache that is no more")
        return _StateLayer(cache, index)


class _StateLayer:
    """One layer.

    Attributes:
        conv_states: by number.
        recurrent_states: likewise.
        record_past: whether anything is ever taken back.
    """

    def __init__(self, cache: Cache, index: int) -> None:
        self._cache = cache
        self._index = index
        self.conv_states = _States(index, "conv")
        self.recurrent_states = _States(index, "recurrent")
        self.record_past = False

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """See `positions_before`. A model may keep others there: they are known without."""
        return positions_before()

    @indexer_position_ids.setter
    def indexer_position_ids(self, _positions: Tensor) -> None:
        """Drop them."""

    def get_seq_length(self) -> int:
        """Return what the cache's class says of this layer: a model may have bound another."""
        return type(self._cache).get_seq_length(self._cache, self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (key length, key offset), likewise."""
        return type(self._cache).get_mask_sizes(self._cache, query_length, self._index)

    def __getattr__(self, _name: str) -> Any:
        """Refuse a model that keeps anything else there."""
        raise ModelModeMissingError(
            "the model keeps more in its cache's layers than keys, values and states", REMEDY
        )


def positions_before() -> Tensor | None:
    """Return the positions of the tokens that stand before the new ones, [tokens].

    None: there are none.
    """
    before = current_forward().positions_before()
    return before if before is None else before.as_subclass(_Before)


class _Before(Tensor):
    """Positions, [tokens], that take the leading dimensions of those that are put behind them.

    A model that counts them in several (height, width) has told nobody how many, if this is the
    first forward since its sequence was loaded.
    """

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        _types: Any,
        args: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute as with any tensor, but for putting them together with others."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - its documented way
            if function is torch.cat and isinstance(args[0][0], cls):
                before, *others = args[0]
                args = ([before.expand(*others[0].shape[:-1], -1), *others], *args[1:])
            return function(*args, **(options or {}))


class _States:
    """The states of one kind that a layer has. A model may read them, and change them in place."""

    def __init__(self, layer_index: int, kind: StateKind) -> None:
        self._layer_index = layer_index
        self._kind = kind

    def __getitem__(self, number: int) -> Tensor | None:
        """Return one of them; None before the first token."""
        return current_forward().state(StatePlace(self._layer_index, self._kind, number))
