"""Calibration: finds out how a model caches keys by running it, and proves that we run it right.

First, rotary frequencies that depend on the sequence's length are frozen (`rope_tables.py`), and
weights are packed, once the stock model has answered with its original ones (`packing_choice.py`).
Then modes are tried in the order of their speed (`recipes.Mode`); the first that is proven is used.
Each attempt has these steps:

1. *Probe* (`mode_probe.py`): a captured forward of a few tokens records what each layer caches,
   which rotary call made it, and which keys each attention call may see. In a second forward the
   cache claims another length. If that changes the answer, the model counts positions itself, and a
   forward over several sequences would answer wrongly.
2. *Recipes* (`layer_recipes.py`): for each layer, where its KV before RoPE can be captured, and the
   table that re-embeds it.
3. *Decoupled*: the same token at two positions has the same KV in the first layer, before RoPE.
   A model that fails is served with KV as it is cached, at the positions it was cached at. So is a
   model with states (`state_probe.py`), whose layers in between have seen all earlier tokens. So
   are all models in mode "own": it uses no hooks, and `own_cache_probe.py` replaces steps 1 and 2.
4. *Proof* (`proof.py`): every path of a turn gives the stock model's logits.

There is no list of architectures. A model that does not pass is refused with the reason; it is
never served wrongly.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from inference_svc.core.errors import UnsupportedModelError
from inference_svc.runtime.attention.latents import Expansion
from inference_svc.runtime.calibration.expansions import find_expansions
from inference_svc.runtime.calibration.layer_recipes import before_rope, layer_recipes, shape_of
from inference_svc.runtime.calibration.mode_probe import (
    REPEATED_TOKENS,
    probe_mode,
    refused_if_it_fails,
)
from inference_svc.runtime.calibration.own_cache_probe import own_recipes
from inference_svc.runtime.calibration.packing_choice import PackingName, choose_packing
from inference_svc.runtime.calibration.probe import Probe
from inference_svc.runtime.calibration.proof import prove
from inference_svc.runtime.calibration.rope_tables import freeze_rotary
from inference_svc.runtime.calibration.state_probe import find_kept_states, find_states
from inference_svc.runtime.calibration.stock import (
    SAME,
    StockLogits,
    can_set_attention,
    distance,
    stock_attentions,
    stock_logits,
    use_attention,
)
from inference_svc.runtime.kv.own_layers import state_shapes
from inference_svc.runtime.kv.states import packed_bytes
from inference_svc.runtime.model import capture
from inference_svc.runtime.model.capture import ForwardCall
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.refusals import (
    FINAL,
    REMEDY,
    CalibrationMismatchError,
    ModelEncoderError,
    ModelModeMissingError,
    ModelRecurrentError,
    ModelUncachedError,
    NotDecoupledError,
)
from inference_svc.runtime.positions.recipes import (
    EMPTY_LAYER,
    LATENT_MODES,
    AttentionCall,
    Calibration,
    ComponentRecipe,
    LayerRecipe,
    Mode,
    Positions,
)
from shared.types.kv_layout import WHOLE_EVERY, Component, KVLayout, Layer, choose_block_tokens

PositionsChoice = Literal["auto", "decoupled", "coupled", "naive"]
COMPONENT_NAMES = ("k", "v", "index")  # in the layout
MIN_CONTEXT_WINDOW = 32  # tokens; a smaller one has no room for a probe


def calibrate(
    loaded: LoadedModel, positions: PositionsChoice = "auto", packing: PackingName = "off"
) -> Calibration:
    """Calibrate a model and leave it set to the attention of its mode.

    Args:
        loaded: the model.
        positions: how positions are stored with KV, see `Calibration.positions`. "auto": decoupled
            if that is proven, else coupled.
        packing: whether and how to pack linear layers, if the model's answers stay the same;
            everything that follows is proven with them.

    Raises:
        ConfigError: the named packing cannot be used here.
        UnsupportedModelError: one of `refusals`; if no mode is proven, with the reason for each.
    """
    _check_family(loaded)
    with refused_if_it_fails(loaded, "at all"):
        freeze_rotary(loaded)
        reference = stock_logits(loaded)
    choose_packing(packing, loaded, reference)
    _install(loaded)
    refusals = _Refusals(loaded.architecture)
    for mode, attention in _candidates(loaded):
        probe = None
        # Later modes (gather, masked) fail for the same reasons as latent ones, and report them.
        with refusals.recording(mode, is_reported=mode not in LATENT_MODES):
            probe = probe_mode(loaded, mode, attention)
        if probe is None:
            continue
        with refusals.recording(mode):
            use_attention(loaded.model, attention)
            expansions = _expansions(loaded, mode, probe)
            for choice in ("decoupled", "coupled") if positions == "auto" else (positions,):
                with refusals.recording(f"{mode} {choice}"):
                    found = _calibration(loaded, mode, probe, choice, refusals.reasons())
                    calibration = replace(found, expansions=expansions, rounding=reference.rounding)
                    with refused_if_it_fails(loaded, "step by step"):
                        return _prove(loaded, calibration, reference)
    if not reference.is_causal:
        raise ModelEncoderError(
            f"answers of {loaded.architecture} depend on later tokens: it is an encoder", REMEDY
        )
    raise refusals.error(is_stateful=_is_stateful(loaded))


def _prove(loaded: LoadedModel, calibration: Calibration, reference: StockLogits) -> Calibration:
    """Prove a calibration and return it; if need be with a single token at a time over a state.

    Raises:
        CalibrationMismatchError: see `prove`.
    """
    try:
        prove(loaded, calibration, reference)
    except CalibrationMismatchError as error:
        if not calibration.state_shapes or calibration.own_layers:
            raise
        notes = (*calibration.notes, f"several tokens over a state: {error.message}")
        calibration = replace(calibration, is_one_by_one=True, notes=notes)
        prove(loaded, calibration, reference)
    return calibration


def calibration_by(
    loaded: LoadedModel, mode: Mode, attention: str, positions: Positions, notes: tuple[str, ...]
) -> Calibration:
    """Calibrate a model in a given mode, without a proof.

    The model is left set to this attention.

    Args:
        loaded: the model.
        mode: the mode to probe.
        attention: name of the attention function that the mode runs with.
        positions: how positions are stored with KV.
        notes: the calibration's notes.

    Raises:
        UnsupportedModelError: the model cannot be run in this mode.
    """
    with refused_if_it_fails(loaded, "at all"):
        freeze_rotary(loaded)
    _install(loaded)
    probe = probe_mode(loaded, mode, attention)
    use_attention(loaded.model, attention)
    found = _calibration(loaded, mode, probe, positions, notes)
    return replace(found, expansions=_expansions(loaded, mode, probe))


class _Refusals:
    """The attempts so far that were refused, and the reasons."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self._errors: list[tuple[str, UnsupportedModelError]] = []

    @contextmanager
    def recording(self, attempt: str, *, is_reported: bool = True) -> Iterator[None]:
        """Record a refusal inside the block, and suppress it unless no other mode can change it.

        Args:
            attempt: name of the attempt.
            is_reported: whether to report its refusal; False: another attempt reports the same.
        """
        try:
            yield
        except FINAL:
            raise
        except UnsupportedModelError as error:
            if is_reported:
                self._errors.append((attempt, error))

    def reasons(self) -> tuple[str, ...]:
        """Return the reasons of all attempts; attempts with the same reason share a string."""
        attempts: dict[str, list[str]] = {}
        for attempt, error in self._errors:
            reason = error.message.replace(self._architecture, "the model")
            attempts.setdefault(reason, []).append(attempt)
        return tuple(
            f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in attempts.items()
        )

    def error(self, *, is_stateful: bool) -> UnsupportedModelError:
        """Return an error that says in one line why each mode failed."""
        kinds = {type(error) for _, error in self._errors}
        kind = kinds.pop() if len(kinds) == 1 else ModelModeMissingError
        return (ModelRecurrentError if is_stateful else kind)(
            f"{self._architecture} cannot be served ({'; '.join(self.reasons())})",
            self._errors[-1][1].remedy,
        )


def _check_family(loaded: LoadedModel) -> None:
    """Refuse a model without running it.

    Raises:
        UnsupportedModelError: it caches no keys and values, or its window is too small.
    """
    if not ForwardCall(loaded.model).takes_cache:
        if _is_stateful(loaded):
            raise ModelRecurrentError(f"{loaded.architecture} keeps a recurrent state", REMEDY)
        raise ModelUncachedError(f"{loaded.architecture} caches no keys and values", REMEDY)
    if loaded.context_window < MIN_CONTEXT_WINDOW:
        raise ModelModeMissingError(
            f"the config of {loaded.architecture} states a context window of "
            f"{loaded.context_window} tokens",
            f"set max_position_embeddings to at least {MIN_CONTEXT_WINDOW}",
        )


def _install(loaded: LoadedModel) -> None:
    """Install the hooks, and taps for states that a model keeps in its own modules."""
    capture.install(loaded.model)
    if _is_stateful(loaded):
        find_kept_states(loaded)


def _is_stateful(loaded: LoadedModel) -> bool:
    """Whether the model's class declares states; a config may have no such layer though."""
    return bool(getattr(type(loaded.model), "_is_stateful", False))


def _candidates(loaded: LoadedModel) -> Iterator[tuple[Mode, str]]:
    """Yield modes and the names of the attention functions they run with, fastest first."""
    if can_set_attention(loaded.model):
        yield "ragged", capture.ATTENTION_NAME
        yield "latent", capture.ATTENTION_NAME
        yield "indexed", capture.ATTENTION_NAME
        yield "gather", capture.ATTENTION_NAME
    elif _is_stateful(loaded):  # it may have no attention at all
        yield "ragged", stock_attentions(loaded.model)[0]
    for attention in stock_attentions(loaded.model):
        yield "masked", attention
    for attention in stock_attentions(loaded.model):
        yield "single", attention
    for attention in stock_attentions(loaded.model):
        yield "own", attention


def _recipes(loaded: LoadedModel, probe: Probe, positions: Positions) -> tuple[LayerRecipe, ...]:
    """Return how each layer's KV is stored.

    Raises:
        UnsupportedModelError: it is to be stored without positions, and cannot be.
    """
    if positions != "decoupled":
        cached = tuple(_as_cached(probe, layer_index) for layer_index in probe.layers)
        cached += own_recipes(probe.own_layers)
        return cached or (EMPTY_LAYER,)
    with refused_if_it_fails(loaded, "its rotary embedding apart from a forward"):
        layers = layer_recipes(loaded, probe)
    _check_decoupled(loaded, layers, probe)
    return layers


def _as_cached(probe: Probe, layer_index: int) -> LayerRecipe:
    """Return the recipe that stores a layer's KV as it is cached."""
    index = probe.indexes.get(layer_index)
    shape = shape_of(probe.layers[layer_index], index)
    return LayerRecipe(shape, *(ComponentRecipe() for _ in shape.parts))


def _check_decoupled(loaded: LoadedModel, layers: Sequence[LayerRecipe], probe: Probe) -> None:
    """Refuse a model that adds positions before its attention."""
    for component in before_rope(layers[0], probe.layers[0]):  # [tokens, kv_heads, dim]
        if distance(component[-REPEATED_TOKENS:], component[:REPEATED_TOKENS]) > SAME:
            raise NotDecoupledError(
                f"keys of {loaded.architecture} have absolute positions instead of rotary ones",
                "serve it with model.positions = coupled",
            )


def _calibration(
    loaded: LoadedModel, mode: Mode, probe: Probe, positions: Positions, notes: tuple[str, ...]
) -> Calibration:
    """Build the calibration of a probe, and the layout of stored KV; nothing is proven yet."""
    states = state_shapes(probe.own_layers) or find_states(loaded, probe)
    if states and positions != "coupled":
        raise NotDecoupledError(
            f"{loaded.architecture} has recurrent states, which are usable at their own "
            "position only",
            "serve it with model.positions = coupled",
        )
    recipes = _recipes(loaded, probe, positions)
    if mode in LATENT_MODES:
        recipes = tuple(
            replace(recipe, shape=replace(recipe.shape, is_latent=True)) for recipe in recipes
        )
    calls = tuple(
        AttentionCall(seen.layer_index, seen.mask.window, seen.mask.chunk)
        for seen in probe.attended
    )
    dtype = str(loaded.dtype).removeprefix("torch.")
    windows = [0] * len(recipes)
    if mode == "ragged" and not states:
        windows = _windows(loaded, calls, len(recipes))
    layers = tuple(
        Layer(
            tuple(
                Component(name, shape, dtype, _digest(part.signature))
                for name, shape, part in zip(
                    COMPONENT_NAMES, recipe.shape.parts, recipe.components, strict=False
                )
            ),
            window,
        )
        for recipe, window in zip(recipes, windows, strict=True)
    )
    layout = KVLayout(
        loaded.fingerprint,
        layers,
        choose_block_tokens(layers),
        positions,
        state_bytes=packed_bytes(states),
    )
    layout.check()
    return Calibration(
        mode,
        positions,
        layout,
        recipes,
        calls,
        notes=notes,
        state_shapes=states,
        is_new_last=mode == "masked" and probe.asks_positions,
        own_layers=probe.own_layers,
    )


def _windows(loaded: LoadedModel, calls: Sequence[AttentionCall], num_layers: int) -> list[int]:
    """Return the number of last tokens of which each layer's KV is attended to; 0: all tokens.

    KV of earlier tokens is not read, so it need not be stored (`Layer.window`). The last token of a
    chunk sees the whole chunk, so a chunk counts as a window of its size. A block has to store
    something, though: if all layers have a window, some count as having none.
    """
    most = loaded.context_window
    reaches: dict[int, list[int]] = {}  # by layer: several calls may read the KV of one
    for call in calls:
        reaches.setdefault(call.layer_index, []).append(call.window or call.chunk or most)
    widest = [max(reaches.get(layer_index, [most])) for layer_index in range(num_layers)]
    windows = [window if window < most else 0 for window in widest]
    if 0 in windows:
        return windows
    return [window if index % WHOLE_EVERY else 0 for index, window in enumerate(windows)]


def without_windows(calibration: Calibration) -> Calibration:
    """Return a calibration by which layers with a window store KV of all tokens too."""
    layers = tuple(replace(layer, window=0) for layer in calibration.layout.layers)
    return replace(calibration, layout=replace(calibration.layout, layers=layers))


def _expansions(loaded: LoadedModel, mode: Mode, probe: Probe) -> tuple[Expansion, ...]:
    """Find how keys and values are made of latents, in modes that attend over latents."""
    return find_expansions(loaded, mode, probe) if mode in LATENT_MODES else ()


def _digest(signature: str) -> str:
    """Return a short digest of a component's signature; "" if that is empty."""
    return signature and hashlib.blake2b(signature.encode(), digest_size=8).hexdigest()
