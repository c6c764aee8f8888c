"""OwnForward: runs a model over its own cache, restored from working KV and saved back to it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.step_forward import StepForward
from inference_svc.runtime.compute.step_places import StepPlaces
from inference_svc.runtime.kv.layer_gate import StepClock
from inference_svc.runtime.kv.own_layers import OwnLayer
from inference_svc.runtime.kv.states import StatePlace
from inference_svc.runtime.positions.recipes import Calibration


class OwnForward(StepForward):
    """A forward of one sequence; `kv/own_layers.py` describes how its cache is stored."""

    def __init__(
        self,
        calibration: Calibration,
        chunk: Chunk,
        clock: StepClock | None,
        config: Any,
    ) -> None:
        """Make the model's cache, and restore the sequence's history into it.

        Args:
            calibration: the model's calibration.
            chunk: the chunk to compute.
            clock: a gate that is opened once the model has run; None: no save follows the step.
            config: the model's Transformers configuration, from which its cache is made.
        """
        super().__init__(calibration, [chunk], StepPlaces.of([chunk]), clock)
        self._own_layers = calibration.own_layers
        self._kv = chunk.kv
        self._tokens = (chunk.kv.num_tokens, chunk.end_token)
        self.cache = DynamicCache(config=config)
        if chunk.kv.num_tokens:
            self._restore_cache()

    def on_rotary(self, *_call: Any) -> None:
        """Ignore the call: keys are stored as the model's cache holds them."""

    def finish(self) -> None:
        """Write the contents of the cache to working KV and states.

        Raises:
            AssertionError: the cache holds something that calibration has not seen.
        """
        device, rows = self._kv.device, []
        for own, layer in self._layers_of_cache():
            for place, state in own.states(layer):
                self.update_state(place, state.to(device))
            rows += [part.to(device) for part in own.rows(layer, *self._tokens)]
        if rows:
            widths = [dim for _, dim in self._layers[0].shape.parts]
            side_by_side = torch.cat(rows, 1)[None, None]
            padded = pad(side_by_side, (0, sum(widths) - side_by_side.shape[-1]))
            self.update_cache(0, *padded.split_with_sizes(widths, -1))
        super().finish()

    def _restore_cache(self) -> None:
        """Fill the cache from working KV and states, once their load has arrived."""
        for gate in self._gates:
            gate.wait(0)
        parts = (self._kv.keys, self._kv.values)
        rows = torch.cat([part.read(0, 0, self._tokens[0])[:, 0] for part in parts], 1)
        first = 0
        for own, layer in self._layers_of_cache():
            own.fill(layer, self._read_state, rows[:, first : first + own.row_width])
            first += own.row_width

    def _layers_of_cache(self) -> Iterator[tuple[OwnLayer, Any]]:
        layers: Sequence[Any] = self.cache.layers
        for own in self._own_layers:
            yield own, layers[own.index]

    def _read_state(self, place: StatePlace) -> Tensor:
        state = self.state(place)
        if state is None:
            raise AssertionError(f"a sequence with tokens has no state at {place}")
        return state
