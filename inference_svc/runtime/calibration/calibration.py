"""Calibration: find out how a model caches keys by running it, and prove that we run it right.

Frequencies that follow the length of a sequence are frozen first (`rope_tables.py`), and weights
are packed once the stock model has answered with those it came with (`packed_linear.py`). Modes
are tried in the order of their speed (`recipes.Mode`); the first that is proven is taken. Each
attempt has these steps:

1. *Probe* (`mode_probe.py`): a forward of a few tokens under capture records what each layer
   caches, which apply call made it, and what each attention call may see. In a second one the
   cache claims another length: if that changes the answer, the model counts positions itself, and
   several sequences in one such forward would be answered wrongly.
2. *Recipes* (`layer_recipes.py`): per layer, where its KV before RoPE is seen, and the table
   that re-embeds it.
3. *Decoupled*: the same token at two places has the same KV in the first layer, before RoPE. A
   model that fails is served with KV as it is cached, at the positions it was cached at. So is one
   with states (`state_probe.py`), whose layers in between have seen all tokens before; and in mode
   "own" all are: there no hook is used, and 1. and 2. are what `own_cache_probe.py` does.
4. *Proof* (`proof.py`): every path of a turn gives the stock model's logits.

No list of architectures. A model that does not pass is refused with the reason; it is never served
wrongly.
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
from inference_svc.runtime.calibration.probe import Probe
from inference_svc.runtime.calibration.proof import prove
from inference_svc.runtime.calibration.rope_tables import freeze_rotary
from inference_svc.runtime.calibration.state_probe import find_kept_states, find_states
from inference_svc.runtime.calibration.stock import (
    SAME,
    StockLogits,
    answers_as,
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
from inference_svc.runtime.model.packed_linear import pack_weights, unpack_weights
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
MIN_CONTEXT_WINDOW = 32  # tokens; below it there is nothing to probe with


def calibrate(
    loaded: LoadedModel, positions: PositionsChoice = "auto", *, packs_weights: bool = False
) -> Calibration:
    """Calibrate a model and leave it set to the attention of its mode.

    Args:
        loaded: the model.
        positions: how stored KV has its positions, see `Calibration.positions`. "auto": decoupled
            if that is proven, else coupled.
        packs_weights: let packed layers take the place of its linear ones, if its answers stay as
            they are; all that follows is proven with them.

    Raises:
        UnsupportedModelError: one of `refusals`; if no mode is proven, with the reason for each.
    """
    _check_family(loaded)
    with refused_if_it_fails(loaded, "at all"):
        freeze_rotary(loaded)
        reference = stock_logits(loaded)
    if packs_weights:
        _pack_weights(loaded, reference)
    _install(loaded)
    refused = _Refused(loaded.architecture)
    for mode, attention in _ways(loaded):
        probe = None
        with refused.noting(mode, is_told=mode not in LATENT_MODES):  # gather, masked fail alike
            probe = probe_mode(loaded, mode, attention)
        if probe is None:
            continue
        with refused.noting(mode):
            use_attention(loaded.model, attention)
            expansions = _expansions(loaded, mode, probe)
            for choice in ("decoupled", "coupled") if positions == "auto" else (positions,):
                with refused.noting(f"{mode} {choice}"):
                    found = _calibration(loaded, mode, probe, choice, refused.reasons())
                    calibration = replace(found, expansions=expansions, rounding=reference.rounding)
                    with refused_if_it_fails(loaded, "step by step"):
                        return _proven(loaded, calibration, reference)
    if not reference.is_causal:
        raise ModelEncoderError(
            f"answers of {loaded.architecture} depend on tokens after them: an encoder", REMEDY
        )
    raise refused.error(is_stateful=_is_stateful(loaded))


def _proven(loaded: LoadedModel, calibration: Calibration, reference: StockLogits) -> Calibration:
    """Return the calibration once it is proven: with states, if need be token by token.

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
    """Find out how a model caches keys in a mode that is named, and prove nothing.

    The model is left set to this attention.

    Args:
        loaded: the model.
        mode: to be probed.
        attention: name of the attention function that it runs with.
        positions: how stored KV has its positions.
        notes: the calibration's notes.

    Raises:
        UnsupportedModelError: if the mode is none for this model.
    """
    with refused_if_it_fails(loaded, "at all"):
        freeze_rotary(loaded)
    _install(loaded)
    probe = probe_mode(loaded, mode, attention)
    use_attention(loaded.model, attention)
    found = _calibration(loaded, mode, probe, positions, notes)
    return replace(found, expansions=_expansions(loaded, mode, probe))


def _pack_weights(loaded: LoadedModel, reference: StockLogits) -> None:
    """Pack the model's weights, unless it then fails or answers otherwise."""
    if not pack_weights(loaded.model):
        return
    try:
        is_same_model = answers_as(loaded, reference)
    except Exception:  # noqa: BLE001 - what models do with their layers is too much to foresee
        is_same_model = False
    if not is_same_model:
        unpack_weights(loaded.model)


class _Refused:
    """The attempts so far, and why each was refused."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self._errors: list[tuple[str, UnsupportedModelError]] = []

    @contextmanager
    def noting(self, attempt: str, *, is_told: bool = True) -> Iterator[None]:
        """Record a refusal of this attempt, and resume; raise one that no mode can change.

        Args:
            attempt: what it is called.
            is_told: whether its refusal is to be told; False: another attempt's says the same.
        """
        try:
            yield
        except FINAL:
            raise
        except UnsupportedModelError as error:
            if is_told:
                self._errors.append((attempt, error))

    def reasons(self) -> tuple[str, ...]:
        """Return what to report of the attempts: those that failed alike in one string."""
        attempts: dict[str, list[str]] = {}
        for attempt, error in self._errors:
            reason = error.message.replace(self._architecture, "the model")
            attempts.setdefault(reason, []).append(attempt)
        return tuple(
            f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in attempts.items()
        )

    def error(self, *, is_stateful: bool) -> UnsupportedModelError:
        """Return the refusal that says in one line why each mode failed."""
        kinds = {type(error) for _, error in self._errors}
        kind = kinds.pop() if len(kinds) == 1 else ModelModeMissingError
        return (ModelRecurrentError if is_stateful else kind)(
            f"{self._architecture} cannot be served ({'; '.join(self.reasons())})",
            self._errors[-1][1].remedy,
        )


def _check_family(loaded: LoadedModel) -> None:
    """Refuse a model that need not even be run.

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
    """Install the hooks, and taps of what a stateful model keeps in its own modules."""
    capture.install(loaded.model)
    if _is_stateful(loaded):
        find_kept_states(loaded)


def _is_stateful(loaded: LoadedModel) -> bool:
    """Whether the class says that it may keep a state; its config may have no such layer."""
    return bool(getattr(type(loaded.model), "_is_stateful", False))


def _ways(loaded: LoadedModel) -> Iterator[tuple[Mode, str]]:
    """Yield modes and the names of the attention they run with, fastest first."""
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
        UnsupportedModelError: if it cannot be stored without its position.
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
                f"keys of {loaded.architecture} depend on absolute positions, not on rotary ones",
                "serve it with model.positions = coupled",
            )


def _calibration(
    loaded: LoadedModel, mode: Mode, probe: Probe, positions: Positions, notes: tuple[str, ...]
) -> Calibration:
    """Put together what was found, and lay out the stored KV; nothing of it is proven."""
    states = state_shapes(probe.own_layers) or find_states(loaded, probe)
    if states and positions != "coupled":
        raise NotDecoupledError(
            f"{loaded.architecture} keeps states, which are of use at their own position only",
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
    """Return how many of the last tokens each layer's KV is attended for; 0: all of them.

    As nothing else reads it, KV of tokens before need not be there (`Layer.window`). A chunk's last
    token sees all of it: so many. Blocks of tokens have to hold something, though: where all layers
    have a window, some count as without.
    """
    most = loaded.context_window
    seen: dict[int, list[int]] = {}  # by layer: several calls may be over the KV of one
    for call in calls:
        seen.setdefault(call.layer_index, []).append(call.window or call.chunk or most)
    widest = [max(seen.get(layer_index, [most])) for layer_index in range(num_layers)]
    windows = [window if window < most else 0 for window in widest]
    if 0 in windows:
        return windows
    return [window if index % WHOLE_EVERY else 0 for index, window in enumerate(windows)]


def without_windows(calibration: Calibration) -> Calibration:
    """Return a calibration by which KV of all tokens is stored, of layers with a window too."""
    layers = tuple(replace(layer, window=0) for layer in calibration.layout.layers)
    return replace(calibration, layout=replace(calibration.layout, layers=layers))


def _expansions(loaded: LoadedModel, mode: Mode, probe: Probe) -> tuple[Expansion, ...]:
    """Find what keys and values are made by, in modes that attend over latents."""
    return find_expansions(loaded, mode, probe) if mode in LATENT_MODES else ()


def _digest(signature: str) -> str:
    """Return a short form of what loading does to a component; empty: nothing."""
    return signature and hashlib.blake2b(signature.encode(), digest_size=8).hexdigest()
