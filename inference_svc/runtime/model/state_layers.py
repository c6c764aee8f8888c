"""The layers of a cache that holds nothing, as models see them that look into these for states.

Transformers has moved from `cache.layers[i].conv_states[k]` to `cache.get_conv_state(i, k)`; models
of either way are answered, here as there by the forward under way.
"""

from typing import Any

from torch import Tensor

from inference_svc.runtime.kv.states import StateKind, StatePlace
from inference_svc.runtime.model.forward import current_forward
from inference_svc.runtime.model.refusals import REMEDY, ModelModeMissingError


class StateLayers(list[Any]):
    """No layers to whoever counts them; at each index one that has states."""

    def __getitem__(self, index: Any) -> Any:
        """Return what a model may look into of the layer that it numbers so."""
        return _StateLayer(index)


class _StateLayer:
    """One layer.

    Attributes:
        conv_states: by number.
        recurrent_states: likewise.
        record_past: whether anything is ever taken back.
    """

    def __init__(self, index: int) -> None:
        self.conv_states = _States(index, "conv")
        self.recurrent_states = _States(index, "recurrent")
        self.record_past = False

    def __getattr__(self, _name: str) -> Any:
        """Refuse a model that keeps anything else there."""
        raise ModelModeMissingError(
            "the model keeps more in its cache's layers than keys, values and states", REMEDY
        )


class _States:
    """The states of one kind that a layer has. A model may read them, and change them in place."""

    def __init__(self, layer_index: int, kind: StateKind) -> None:
        self._layer_index = layer_index
        self._kind = kind

    def __getitem__(self, number: int) -> Tensor | None:
        """Return one of them; None before the first token."""
        return current_forward().state(StatePlace(self._layer_index, self._kind, number))
