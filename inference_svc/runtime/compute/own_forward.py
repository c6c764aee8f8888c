"""The forward of a model over its own cache: made of what is stored, and taken apart behind it."""

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
    """Runs one sequence; what is kept of it is described in `kv/own_layers.py`."""

    def __init__(
        self,
        calibration: Calibration,
        chunk: Chunk,
        clock: StepClock | None,
        config: Any,
    ) -> None:
        """Make the model's cache, and have it hold what the sequence has by now.

        Args:
            calibration: what is known of the model.
            chunk: what the forward computes.
            clock: the gate that it opens, once the model has run; None: nobody follows it.
            config: the model's, by which Transformers makes its cache.
        """
        super().__init__(calibration, [chunk], StepPlaces.of([chunk]), clock)
        self._own_layers = calibration.own_layers
        self._kv = chunk.kv
        self._tokens = (chunk.kv.num_tokens, chunk.end_token)
        self.cache = DynamicCache(config=config)
        if chunk.kv.num_tokens:
            self._fill()

    def rotated(self, *_call: Any) -> None:
        """Keep nothing: what is stored is as the model's cache has it."""

    def finish(self) -> None:
        """Write what the cache holds by now to working KV and states.

        Raises:
            AssertionError: it keeps something else than calibration has seen.
        """
        device, rows = self._kv.device, []
        for own, layer in self._layers_of_cache():
            for place, state in own.states(layer):
                self.new_state(place, state.to(device))
            rows += [part.to(device) for part in own.rows(layer, *self._tokens)]
        if rows:
            widths = [dim for _, dim in self._layers[0].shape.parts]
            side_by_side = torch.cat(rows, 1)[None, None]
            padded = pad(side_by_side, (0, sum(widths) - side_by_side.shape[-1]))
            self.cached(0, *padded.split_with_sizes(widths, -1))
        super().finish()

    def _fill(self) -> None:
        """Put together what is stored, once loads have brought it."""
        for gate in self._gates:
            gate.wait(0)
        parts = (self._kv.keys, self._kv.values)
        rows = torch.cat([part.read(0, 0, self._tokens[0])[:, 0] for part in parts], 1)
        first = 0
        for own, layer in self._layers_of_cache():
            own.fill(layer, self._read, rows[:, first : first + own.row_width])
            first += own.row_width

    def _layers_of_cache(self) -> Iterator[tuple[OwnLayer, Any]]:
        layers: Sequence[Any] = self.cache.layers
        for own in self._own_layers:
            yield own, layers[own.index]

    def _read(self, place: StatePlace) -> Tensor:
        state = self.state(place)
        if state is None:
            raise AssertionError(f"a sequence with tokens has no state at {place}")
        return state
