"""The forward of one step: writes each layer's new tokens to working KV, and attends.

Layer by layer it 1. writes the new tokens' keys and values (and index keys, if the layer has some)
to sequences and write buffers, 2. opens its clock, so that a save may follow it, 3. waits for the
gates of sequences that are still being loaded, 4. attends. How it attends is what the classes
differ in:

    RaggedForward    each part to its own sequence's KV, where it lies
    DecodeForward    the same of one token a part, all of it by tensors that are given
    GatheredForward  to history and new tokens, gathered from all (`gathered_forward.py`)
    LatentForward    to latents where they lie, or gathered, by part (`latent_forward.py`)

Written for few Python and torch calls: at decode they cost as much as the arithmetic. Hence views
of all layers are cut at once, new tokens of all sequences are copied in one call, and so are those
of all write buffers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from inference_svc.runtime.attention.attention import AttentionBackend, Part, StepAttention
from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.step_places import StepPlaces
from inference_svc.runtime.compute.step_states import StepStates
from inference_svc.runtime.kv.layer_gate import StepClock
from inference_svc.runtime.kv.states import StatePlace
from inference_svc.runtime.model.forward import TokenGroup
from inference_svc.runtime.positions.recipes import AttentionCall, Calibration


class StepForward:
    """Writes new tokens to working KV: what the forwards of all modes share."""

    def __init__(
        self,
        calibration: Calibration,
        chunks: Sequence[Chunk],
        places: StepPlaces,
        clock: StepClock | None,
    ) -> None:
        """Store the parts; nothing is written yet.

        Args:
            calibration: what is known of the model.
            chunks: what the forward computes.
            places: where its tokens go.
            clock: the gate that it opens; None: nobody follows it.
        """
        self._chunks = chunks
        self._is_scored = any(chunk.scores is not None for chunk in chunks)
        self._layers = calibration.layers
        self._attention_calls = calibration.attention_calls
        self._clock = clock
        self._sizes = [len(chunk.token_ids) for chunk in chunks]
        self._gates = [chunk.kv.gate for chunk in chunks if chunk.kv.gate is not None]
        self._places = places
        self._calls: list[tuple[tuple[Any, ...], Any]] = []  # since something was cached
        self._num_cached = 0
        self._last_indexed = -1  # layer
        self._num_attended = 0
        self._states = StepStates(chunks, is_one_by_one=calibration.is_one_by_one)

    def rotated(
        self,
        _apply: Callable[..., Any],
        args: tuple[Any, ...],
        _options: dict[str, Any],
        result: Any,
    ) -> None:
        """Keep the call until the layer caches what was embedded."""
        self._calls.append((args, result))

    def cached(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the layer's new tokens of all sequences, then open the clock for copies of them.

        If the layer has index keys, the clock is opened when these are written, too.

        Args:
            layer_index: the layer's index; layers come in order.
            key: [1, kv_heads, tokens, head_dim], after RoPE, the chunks one after another.
            value: [1, kv_heads, tokens, value_dim].

        Returns:
            What the model attends to: `key` and `value` themselves.
        """
        if layer_index != self._num_cached:
            raise AssertionError(f"layer {layer_index} is cached after {self._num_cached} layers")
        self._num_cached += 1
        self._places.new_tokens.write(layer_index, key, value)
        if self._places.buffered:
            recipe = self._layers[layer_index]
            keys = recipe.key.before_rope(self._calls, key)
            values = recipe.value.before_rope(self._calls, value)
            for buffered in self._places.buffered:
                buffered.write(layer_index, keys, values)
        self._calls.clear()
        is_whole = self._layers[layer_index].index is None or layer_index == self._last_indexed
        if self._clock is not None and is_whole:
            self._clock.enqueued(self._num_cached)
        return key, value

    def indexed(self, layer_index: int, index: Tensor) -> Tensor:
        """Write the layer's new index keys of all sequences, then open the clock; return them.

        If keys and values are yet to come, the clock is opened when these are written.

        Args:
            layer_index: the layer that was cached last, or the one that comes next.
            index: [1, tokens, index_dim], after RoPE, the chunks one after another.
        """
        recipe = self._layers[layer_index].index
        is_beside = layer_index in (self._num_cached - 1, self._num_cached)
        if recipe is None or not is_beside or layer_index == self._last_indexed:
            raise AssertionError(f"layer {layer_index} is indexed after {self._num_cached} layers")
        self._last_indexed = layer_index
        cached = index.unsqueeze(1)
        self._places.new_tokens.write_index(layer_index, cached)
        if self._places.buffered:
            free = recipe.before_rope(self._calls, cached)
            for buffered in self._places.buffered:
                buffered.write(layer_index, free, first=2)
        self._calls.clear()
        if self._clock is not None and layer_index < self._num_cached:
            self._clock.enqueued(self._num_cached)
        return index

    def positions_before(self) -> Tensor | None:
        """Return none: the model is given no tokens but the new ones."""
        return None

    def token_groups(self) -> Iterator[TokenGroup]:
        """Yield how a module that goes on from states is given tokens; see `StepStates`."""
        return self._states.token_groups()

    def has_states(self) -> bool:
        """Whether the states that are gone on from now are there; else tokens are the first."""
        return self._states.num_tokens > 0

    def state(self, place: StatePlace) -> Tensor | None:
        """Return a tensor of the state, once it is there."""
        return self._states.read(place)

    def new_state(self, place: StatePlace, state: Tensor) -> None:
        """Keep a tensor of the state; `commit_chunks` makes it current."""
        self._states.put(place, state)

    def finish(self) -> None:
        """Check what the forward has left, and open the clock for what no layer has opened it for.

        Raises:
            AssertionError: a tensor of a state is missing, so that it is of no use.
        """
        self._states.check()
        if self._clock is not None and self._num_cached == 0:  # nothing but states
            self._clock.enqueued(len(self._layers))

    def attend(
        self, _query: Tensor, _key: Tensor, _value: Tensor, _mask: Any, _options: dict[str, Any]
    ) -> Tensor:
        """Refuse: this forward runs under the model's own attention."""
        raise AssertionError("a forward with stock attention was asked to attend")

    def masked(self, _allowed: Callable[..., Tensor]) -> None:
        """Refuse: our attention has no mask function, so nobody asks for a mask."""
        raise AssertionError("our attention name has no mask function")

    def _next_call(self, given: dict[str, Any]) -> tuple[AttentionCall, AttentionOptions]:
        """Return the attention call that is made now, and its options; count it."""
        call = self._attention_calls[self._num_attended]
        self._num_attended += 1
        return call, call.options(given)

    def _report(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor], asked: AttentionOptions
    ) -> None:
        """Report the attention call that was made to the chunks' score keepers.

        Args:
            queries: per chunk [1, heads, tokens, head_dim].
            keys: per chunk [1, kv_heads, keys, head_dim], as `ScoreKeeper.note` takes them.
            asked: the call's options.
        """
        for chunk, query, key in zip(self._chunks, queries, keys, strict=True):
            if chunk.scores is not None:
                chunk.scores.note(
                    self._num_attended - 1, query[0], key[0], asked, chunk.kv.num_tokens
                )


class RaggedForward(StepForward):
    """Attends each part to its own KV, where it lies."""

    def __init__(
        self,
        calibration: Calibration,
        attention: AttentionBackend,
        chunks: Sequence[Chunk],
        clock: StepClock | None,
    ) -> None:
        """Plan the step."""
        super().__init__(calibration, chunks, StepPlaces.of(chunks), clock)
        self._step_attention = attention.prepare(
            [Part(chunk.kv, len(chunk.token_ids)) for chunk in chunks]
        )
        self._keys = [chunk.kv.keys.cut(0, chunk.end_token) for chunk in chunks if self._is_scored]

    def attend(
        self, query: Tensor, _key: Tensor, _value: Tensor, _mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attend each part to its own KV.

        Args:
            query: [1, heads, tokens, head_dim], the parts one after another.
            _key: the new tokens' keys, which are in working KV by now: not read.
            _value: the new tokens' values, likewise.
            _mask: None: our attention has no mask function.
            options: the model's arguments of the call (scale, softcap, sinks).

        Returns:
            [1, tokens, heads, value_dim]
        """
        call, asked = self._next_call(options)
        for gate in self._gates:
            gate.wait(call.layer_index)
        attended = self._step_attention.attend(query, call.layer_index, asked)
        if self._is_scored:
            keys = [cut[call.layer_index] for cut in self._keys]
            self._report(query.split_with_sizes(self._sizes, 2), keys, asked)
        return attended


class DecodeForward(StepForward):
    """Attends each token to its own sequence's KV; knows no sequences, only tensors."""

    def __init__(
        self, calibration: Calibration, places: StepPlaces, step_attention: StepAttention
    ) -> None:
        """Store the parts."""
        super().__init__(calibration, (), places, None)
        self._step_attention = step_attention

    def attend(
        self, query: Tensor, _key: Tensor, _value: Tensor, _mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attend each token to its own KV, [1, tokens, heads, value_dim]; as `RaggedForward`."""
        call, asked = self._next_call(options)
        return self._step_attention.attend(query, call.layer_index, asked)
