"""StateLayers: `CaptureCache.layers`, for models that access a cache's layers directly.

Transformers has moved from `cache.layers[i].conv_states[k]` to `cache.get_conv_state(i, k)`. Both
are served from the active forward: the former here, the latter by `CaptureCache`. A model that
embeds the index keys of all tokens again in each forward needs their positions, and looks for them
in a layer, or in the cache itself in older versions.
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
    """A list of length 0 that returns a layer with states at any index."""

    def __init__(self, cache: Cache) -> None:
        """Make the layers of a cache, which has to outlive their use."""
        super().__init__()
        # Weak, to avoid a reference cycle: there is a new cache in every step.
        self._cache = ref(cache)

    def __getitem__(self, index: Any) -> Any:
        """Return a view of the layer with the model's index."""
        cache = self._cache()
        if cache is None:
            raise AssertionError("a layer of a cache that is no more")
        return _StateLayer(cache, index)


class _StateLayer:
    """One layer of a cache, with the attributes that models access.

    Attributes:
        conv_states: convolution states by number.
        recurrent_states: recurrent states by number.
        record_past: False: tokens are never taken back.
    """

    def __init__(self, cache: Cache, index: int) -> None:
        self._cache = cache
        self._index = index
        self.conv_states = _States(index, "conv")
        self.recurrent_states = _States(index, "recurrent")
        self.record_past = False

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """The positions of the tokens before the new ones; see `history_positions`."""
        return history_positions()

    @indexer_position_ids.setter
    def indexer_position_ids(self, _positions: Tensor) -> None:
        """Ignore them: the forward knows the positions."""

    def get_seq_length(self) -> int:
        """Return the cache's length for this layer.

        By the method of its class: a model may have replaced that of the cache itself, to call this
        one.
        """
        return type(self._cache).get_seq_length(self._cache, self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (key length, key offset), by the method of the cache's class."""
        return type(self._cache).get_mask_sizes(self._cache, query_length, self._index)

    def __getattr__(self, _name: str) -> Any:
        """Refuse: a model that uses any other attribute of a layer is not supported."""
        raise ModelModeMissingError(
            "the model caches more than keys, values and states in its layers", REMEDY
        )


def history_positions() -> Tensor | None:
    """Return the positions of the tokens before the new ones, [tokens]; None: there are none."""
    before = current_forward().history_positions()
    return before if before is None else before.as_subclass(_Before)


class _Before(Tensor):
    """Positions, [tokens], which torch.cat expands to the leading dimensions of what follows them.

    Some models have positions in several dimensions (height, width). In the first forward after a
    load their number is not known before the model concatenates its own positions to these.
    """

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        _types: Any,
        args: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Behave like any tensor, except in torch.cat."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - its documented way
            if function is torch.cat and isinstance(args[0][0], cls):
                before, *following = args[0]
                args = ([before.expand(*following[0].shape[:-1], -1), *following], *args[1:])
            return function(*args, **(options or {}))


class _States:
    """The states of one kind of a layer, by number; a model may change them in place."""

    def __init__(self, layer_index: int, kind: StateKind) -> None:
        self._layer_index = layer_index
        self._kind = kind

    def __getitem__(self, number: int) -> Tensor | None:
        """Return a state; None before the first token."""
        return current_forward().state(StatePlace(self._layer_index, self._kind, number))
