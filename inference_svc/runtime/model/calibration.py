"""Calibration: find out how a model caches keys by running it, and prove that we run it right.

1. *Probe* (`probe.py`): one forward of a few tokens under capture records what each layer caches,
   which apply call made its key, which rotary module made the cosines, and what each attention call
   may see.
2. *Recipes* (`layer_recipes.py`): per layer, where its key before RoPE is seen, and the table that
   re-embeds it.
3. *Decoupled*: the first layer's keys before RoPE and values must not change when all positions
   shift.
4. *Proof* (`proof.py`): chunked prefill, a ragged batch, decode, and store -> load give the stock
   model's logits.

No list of architectures. A model that does not pass is refused with the reason; it is never served
wrongly.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from inference_svc.runtime.model import capture
from inference_svc.runtime.model.layer_recipes import SAME, distance, free_rows, layer_recipes
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.probe import Probe, run_probe
from inference_svc.runtime.model.proof import prove, stock_logits
from inference_svc.runtime.model.recipes import AttentionCall, Calibration, LayerRecipe
from inference_svc.runtime.model.refusals import (
    REMEDY,
    ModelModeMissingError,
    ModelNotRotaryError,
    ModelRecurrentError,
)
from inference_svc.runtime.model.rotary import RotaryTable
from shared.errors import ReportedError
from shared.kv_layout import Component, KVLayout, Layer, choose_block_tokens

__all__ = ["Calibration", "calibrate"]

PROBE_LENGTHS = (11, 13, 17, 19, 23)  # tokens; the first that no dimension of the model equals
SHIFT_TOKENS = 50
MIN_CONTEXT_WINDOW = 32  # tokens; below it there is nothing to probe with


def calibrate(loaded: LoadedModel) -> Calibration:
    """Calibrate a model and leave it set to our attention.

    Raises:
        UnsupportedModelError: one of `refusals`, with the reason.
    """
    _check_family(loaded)
    with _refused_if_it_fails(loaded, "at all"):
        reference = stock_logits(loaded)
    capture.install(loaded.model)
    loaded.model.set_attn_implementation(capture.PROBE_ATTENTION_NAME)
    probe, shifted = _probe_twice(loaded)
    _check_probe(loaded, probe)
    with _refused_if_it_fails(loaded, "its rotary embedding apart from a forward"):
        layers = layer_recipes(loaded, probe)
    _check_decoupled(loaded, layers, probe, shifted)
    calls = tuple(AttentionCall(seen.layer_index or 0, seen.window) for seen in probe.attended)
    calibration = Calibration("paged", _layout(loaded, layers), layers, calls)
    loaded.model.set_attn_implementation(capture.ATTENTION_NAME)
    prove(loaded, calibration, reference)
    return calibration


def _check_family(loaded: LoadedModel) -> None:
    """Refuse what must not even be run: recurrent models and attention that cannot be replaced."""
    model_class = type(loaded.model)
    if getattr(model_class, "_is_stateful", False):
        raise ModelRecurrentError(f"{loaded.architecture} keeps a recurrent state", REMEDY)
    if not model_class._can_set_attn_implementation():  # noqa: SLF001 - the only way to ask
        raise ModelModeMissingError(
            f"the attention of {loaded.architecture} cannot be replaced; "
            "the mode it needs (single) does not exist yet",
            REMEDY,
        )
    if loaded.context_window < MIN_CONTEXT_WINDOW:
        raise ModelModeMissingError(
            f"the config of {loaded.architecture} states a context window of "
            f"{loaded.context_window} tokens",
            f"set max_position_embeddings to at least {MIN_CONTEXT_WINDOW}",
        )


def _probe_twice(loaded: LoadedModel) -> tuple[Probe, Probe]:
    """Probe at positions from 0 on, and again shifted."""
    config = loaded.model.config.get_text_config()
    sizes = {value for value in vars(config).values() if isinstance(value, int)}
    num_tokens = next((length for length in PROBE_LENGTHS if length not in sizes), PROBE_LENGTHS[0])
    shift = min(SHIFT_TOKENS, loaded.context_window - num_tokens)
    token_ids = [(7 * i + 3) % loaded.vocab_size for i in range(num_tokens)]
    with _refused_if_it_fails(loaded, "with a cache of keys and values alone"):
        first = run_probe(loaded.model, token_ids, 0, loaded.context_window)
        second = run_probe(loaded.model, token_ids, shift, loaded.context_window)
    return first, second


@contextmanager
def _refused_if_it_fails(loaded: LoadedModel, how: str) -> Iterator[None]:
    """Turn whatever a model raises that we run in a way it was not made for into a refusal."""
    try:
        yield
    except ReportedError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        raise ModelModeMissingError(
            f"{loaded.architecture} does not run {how} ({cause})", REMEDY
        ) from error


def _check_probe(loaded: LoadedModel, probe: Probe) -> None:
    """Refuse caching or attention of another form than ours."""
    name = loaded.architecture
    if not probe.layers:
        raise ModelRecurrentError(f"{name} caches no keys and values", REMEDY)
    if (
        not probe.attended
        or any(seen.layer_index is None for seen in probe.attended)
        or probe.num_repeated
    ):
        raise ModelModeMissingError(
            f"{name} attends to other tensors than it caches; "
            "the mode it needs (gather) does not exist yet",
            REMEDY,
        )
    if sorted(probe.layers) != list(range(len(probe.layers))):
        raise ModelModeMissingError(
            f"{name} numbers its cached layers {sorted(probe.layers)}", REMEDY
        )
    if not all(seen.is_windowed for seen in probe.attended):
        raise ModelModeMissingError(f"{name} masks keys other than by a sliding window", REMEDY)


def _check_decoupled(
    loaded: LoadedModel, layers: Sequence[LayerRecipe], probe: Probe, shifted: Probe
) -> None:
    """Refuse a model that adds positions before its attention."""
    seen, moved = probe.layers[0], shifted.layers[0]
    before, after = (free_rows(layers[0].source, layer) for layer in (seen, moved))
    if distance(after, before) > SAME or distance(moved.value, seen.value) > SAME:
        raise ModelNotRotaryError(
            f"keys of {loaded.architecture} depend on absolute positions, not on rotary ones",
            REMEDY,
        )


def _layout(loaded: LoadedModel, recipes: Sequence[LayerRecipe]) -> KVLayout:
    """Lay out the stored KV."""
    dtype = str(loaded.dtype).removeprefix("torch.")
    layers = tuple(
        Layer(
            (
                Component("k", recipe.shape.key, dtype, _rotary_digest(recipe.rotary)),
                Component("v", recipe.shape.value, dtype),
            )
        )
        for recipe in recipes
    )
    layout = KVLayout(loaded.fingerprint, layers, choose_block_tokens(layers))
    layout.check()
    return layout


def _rotary_digest(rotary: RotaryTable | None) -> str:
    return (
        ""
        if rotary is None
        else hashlib.blake2b(rotary.signature.encode(), digest_size=8).hexdigest()
    )
