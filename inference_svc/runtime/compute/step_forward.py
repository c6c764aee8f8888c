"""StepForward: the forward of one step, which writes new tokens to working KV and attends.

For each layer it
1. writes the new tokens' keys and values (and index keys, if the layer has some) to sequences and
   write buffers,
2. opens its clock, so that a save may follow it,
3. waits for the gates of sequences that are still being loaded,
4. attends. The classes differ in how:

    RaggedForward    each part to its own sequence's KV, in place
    DecodeForward    the same with one token a part, driven by tensors only
    GatheredForward  to history and new tokens, gathered from all (`gathered_forward.py`)
    LatentForward    to latents in place, or expanded, by part (beside it)
    OwnForward       the model's own attention over its own cache (`own_forward.py`)

The code makes few Python and torch calls: at decode they cost as much as the arithmetic. So views
of all layers are cut at once, new tokens of all sequences are copied in one call, and so are those
of all write buffers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from inference_svc.runtime.attention.attention import (
    AttentionBackend,
    NewKv,
    Part,
    StepAttention,
    WritingAttention,
)
from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.step_places import StepPlaces
from inference_svc.runtime.compute.step_states import StepStates
from inference_svc.runtime.kv.layer_gate import StepClock
from inference_svc.runtime.kv.states import StatePlace
from inference_svc.runtime.model.forward import TokenGroup
from inference_svc.runtime.positions.recipes import AttentionCall, Calibration


class StepForward:
    """The part that the forwards of all modes share: writes new tokens to working KV."""

    def __init__(
        self,
        calibration: Calibration,
        chunks: Sequence[Chunk],
        places: StepPlaces,
        clock: StepClock | None,
    ) -> None:
        """Store the parts; nothing is written yet.

        Args:
            calibration: the model's calibration.
            chunks: the chunks to compute.
            places: where their tokens go.
            clock: a gate that is opened layer by layer; None: no save follows the step.
        """
        self._chunks = chunks
        self._is_scored = any(chunk.scores is not None for chunk in chunks)
        self._layers = calibration.layers
        self._attention_calls = calibration.attention_calls
        self._clock = clock
        self._sizes = [len(chunk.token_ids) for chunk in chunks]
        self._gates = [chunk.kv.gate for chunk in chunks if chunk.kv.gate is not None]
        self._places = places
        # Calls of rotary functions (arguments, result) since a layer was cached last.
        self._calls: list[tuple[tuple[Any, ...], Any]] = []
        self._num_cached = 0  # layers
        self._last_indexed = -1  # layer
        self._num_attended = 0  # attention calls
        self._states = StepStates(chunks, is_one_by_one=calibration.is_one_by_one)

    def on_rotary(
        self,
        _apply: Callable[..., Any],
        args: tuple[Any, ...],
        _options: dict[str, Any],
        result: Any,
    ) -> None:
        """Keep the call until the layer caches: write buffers need the keys before RoPE."""
        self._calls.append((args, result))

    def update_cache(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new tokens of all sequences, then open the clock for a save of them.

        If the layer has index keys, the clock is opened only when these are written too.

        Args:
            layer_index: the layer's index; layers come in order.
            key: [1, kv_heads, tokens, head_dim], after RoPE, the chunks one after another.
            value: [1, kv_heads, tokens, value_dim].

        Returns:
            The tensors that the model continues with: `key` and `value` themselves.
        """
        unrotated = self._unrotated(layer_index, key, value) if self._places.buffered else ()
        self._write(layer_index, key, value, unrotated)
        return key, value

    def _unrotated(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's new keys and values before RoPE, [tokens, kv_heads, dim] each."""
        recipe = self._layers[layer_index]
        unrotated_key = recipe.key.before_rope(self._calls, key)
        return unrotated_key, recipe.value.before_rope(self._calls, value)

    def _write(
        self, layer_index: int, key: Tensor, value: Tensor, unrotated: Sequence[Tensor]
    ) -> None:
        """Write as `update_cache` does; `unrotated` is not read if no write buffer needs it."""
        self._begin(layer_index)
        self._places.new_tokens.write(layer_index, key, value)
        for buffered in self._places.buffered:
            buffered.write(layer_index, *unrotated)
        self._calls.clear()
        self._open_clock(layer_index)

    def _begin(self, layer_index: int) -> None:
        """Count a layer that is being written."""
        if layer_index != self._num_cached:
            raise AssertionError(f"layer {layer_index} is cached after {self._num_cached} layers")
        self._num_cached += 1

    def _open_clock(self, layer_index: int) -> None:
        """Open the clock for a layer whose keys and values are written, if its index keys are."""
        is_whole = self._layers[layer_index].index is None or layer_index == self._last_indexed
        if self._clock is not None and is_whole:
            self._clock.on_enqueued(self._num_cached)

    def update_index(self, layer_index: int, index: Tensor) -> Tensor:
        """Write a layer's new index keys of all sequences, then open the clock; return them.

        If the layer's keys and values are not written yet, writing them opens the clock.

        Args:
            layer_index: the layer that was cached last, or the next one.
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
            unrotated = recipe.before_rope(self._calls, cached)
            for buffered in self._places.buffered:
                buffered.write(layer_index, unrotated, first=2)
        self._calls.clear()
        if self._clock is not None and layer_index < self._num_cached:
            self._clock.on_enqueued(self._num_cached)
        return index

    def history_positions(self) -> Tensor | None:
        """Return None: the model receives the new tokens only."""
        return None

    def token_groups(self) -> Iterator[TokenGroup]:
        """Yield the groups of tokens for which a recurrent module is called; see `StepStates`."""
        return self._states.token_groups()

    def has_states(self) -> bool:
        """Whether the current group's sequences have states; if not, its tokens are the first."""
        return self._states.num_tokens > 0

    def state(self, place: StatePlace) -> Tensor | None:
        """Return a tensor of the current group's states, once it is loaded; None: there is none."""
        return self._states.read(place)

    def update_state(self, place: StatePlace, state: Tensor) -> None:
        """Keep a new tensor of the state; `commit_chunks` makes it current."""
        self._states.put(place, state)

    def finish(self) -> None:
        """Check the new states, and open the clock if no layer has opened it.

        Raises:
            AssertionError: a tensor of a state is missing, so that the state is unusable.
        """
        self._states.check()
        if self._clock is not None and self._num_cached == 0:  # the model has states only
            self._clock.on_enqueued(len(self._layers))

    def attend(
        self, _query: Tensor, _key: Tensor, _value: Tensor, _mask: Any, _options: dict[str, Any]
    ) -> Tensor:
        """Refuse: this forward runs under the model's own attention."""
        raise AssertionError("a forward with stock attention was asked to attend")

    def make_mask(self, _allowed: Callable[..., Tensor]) -> None:
        """Refuse: our attention implementation has no mask function, so no mask is requested."""
        raise AssertionError("our attention name has no mask function")

    def _next_call(self, arguments: dict[str, Any]) -> tuple[AttentionCall, AttentionOptions]:
        """Return the attention call that the model makes now, and its options; count it.

        Args:
            arguments: the model's keyword arguments of the call.
        """
        call = self._attention_calls[self._num_attended]
        self._num_attended += 1
        return call, call.options(arguments)

    def _report(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor], options: AttentionOptions
    ) -> None:
        """Report the last attention call to the chunks' score keepers.

        Args:
            queries: per chunk [1, heads, tokens, head_dim].
            keys: per chunk [1, kv_heads, keys, head_dim], as `ScoreKeeper.note` takes them.
            options: the call's options.
        """
        for chunk, query, key in zip(self._chunks, queries, keys, strict=True):
            if chunk.scores is not None:
                chunk.scores.note(
                    self._num_attended - 1, query[0], key[0], options, chunk.kv.num_tokens
                )


class RaggedForward(StepForward):
    """Attends each part to its own sequence's KV, in place."""

    def __init__(
        self,
        calibration: Calibration,
        attention: AttentionBackend,
        chunks: Sequence[Chunk],
        clock: StepClock | None,
    ) -> None:
        """Plan the step's attention."""
        super().__init__(calibration, chunks, StepPlaces.of(chunks), clock)
        self._attention = attention
        self._step_attention = attention.prepare(
            [
                Part(chunk.kv, len(chunk.token_ids), write_buffer=chunk.receiving_buffer)
                for chunk in chunks
            ]
        )
        self._writing = None
        if isinstance(self._step_attention, WritingAttention) and not self._is_scored:
            self._writing = self._step_attention
        self._num_tokens = sum(self._sizes)
        self._num_wanted = sum(chunk.num_rows for chunk in chunks)
        self._wants_all = self._num_wanted == self._num_tokens
        self._keys = [chunk.kv.keys.cut(0, chunk.end_token) for chunk in chunks if self._is_scored]

    def attend(
        self, query: Tensor, _key: Tensor, _value: Tensor, _mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attend each part to its own KV.

        Args:
            query: [1, heads, tokens, head_dim], the parts one after another.
            _key: the new tokens' keys; not read, since they are in working KV already.
            _value: the new tokens' values; not read either.
            _mask: None: our attention has no mask function.
            options: the model's arguments of the call (scale, softcap, sinks).

        Returns:
            [1, tokens, heads, value_dim]
        """
        call, call_options = self._await_call(options)
        attended = self._step_attention.attend(query, call.layer_index, call_options)
        if self._is_scored:
            keys = [cut[call.layer_index] for cut in self._keys]
            self._report(query.split_with_sizes(self._sizes, 2), keys, call_options)
        return attended

    def write_and_attend(
        self,
        query: Tensor,
        new: NewKv,
        layer_index: int,
        options: dict[str, Any],
        *,
        is_whole: bool,
    ) -> Tensor:
        """Do the work of `update_cache` and `attend` in one call: a traced forward has one a layer.

        Where the attention can write, it is one call of its kernel, too.

        Args:
            query: as `attend` takes it, or `attend_wanted`.
            new: the layer's new tokens.
            layer_index: the layer's index; layers come in order.
            options: as `attend` takes them.
            is_whole: whether the query is that of all tokens, and not of wanted ones only.

        Returns:
            [1, tokens of the query, heads, value_dim]; contiguous, and none of the tensors given.
        """
        is_all = query.shape[2] == self._num_tokens and (is_whole or self._wants_all)
        if self._writing is not None and is_all and _have_one_dtype(query, *new):
            self._begin(layer_index)
            _, given = self._await_call(options)
            attended = self._writing.write_and_attend(query, new, layer_index, given)
            self._open_clock(layer_index)
            return attended
        self._write(layer_index, new.key, new.value, new[2:])
        if is_whole:
            return self.attend(query, new.key, new.value, None, options)
        return self.attend_wanted(query, new.key, new.value, options)

    def attend_wanted(
        self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Attend the tokens whose logits are wanted, each part's last ones, to their part's KV.

        Args:
            query: [1, heads, rows, head_dim], theirs one part after another, and perhaps further
                rows: a graph may not hold for as few as are wanted.
            key: not read, as in `attend`.
            value: [1, kv_heads, tokens, value_dim]; only its shape is read.
            options: as `attend` takes them.

        Returns:
            [1, rows, heads, value_dim], zeros in further rows
        """
        _, num_heads, num_rows, _ = query.shape
        wanted = [
            Part(chunk.kv, chunk.num_rows, len(chunk.token_ids) - chunk.num_rows)
            for chunk in self._chunks
            if chunk.num_rows
        ]
        if self._wants_all and num_rows == self._num_tokens:  # as where all sequences decode
            return self.attend(query, key, value, None, options)
        call, call_options = self._await_call(options)
        attended = query.new_zeros(1, num_rows, num_heads, value.shape[3])
        if wanted:
            step = self._attention.prepare(wanted)
            attended[:, : self._num_wanted] = step.attend(
                query[:, :, : self._num_wanted], call.layer_index, call_options
            )
        return attended

    def _await_call(self, options: dict[str, Any]) -> tuple[AttentionCall, AttentionOptions]:
        """Return the attention call that the model makes now once its layer is loaded; count it."""
        call, call_options = self._next_call(options)
        for gate in self._gates:
            gate.wait(call.layer_index)
        return call, call_options


def _have_one_dtype(*tensors: Tensor) -> bool:
    return len({tensor.dtype for tensor in tensors}) == 1


class DecodeForward(StepForward):
    """Attends each token to its own sequence's KV; knows no sequences, only tensors.

    So its work can be captured as a graph (`decode_graphs.py`).
    """

    def __init__(
        self, calibration: Calibration, places: StepPlaces, step_attention: StepAttention
    ) -> None:
        """Store the parts."""
        super().__init__(calibration, (), places, None)
        self._step_attention = step_attention

    def attend(
        self, query: Tensor, _key: Tensor, _value: Tensor, _mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attend each token to its own KV, like `RaggedForward`; [1, tokens, heads, value_dim]."""
        call, call_options = self._next_call(options)
        return self._step_attention.attend(query, call.layer_index, call_options)
