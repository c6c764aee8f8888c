"""Mode probe: probes a model in one mode, and refuses models that the mode does not support."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from inference_svc.runtime.calibration.own_cache_probe import find_own_layers
from inference_svc.runtime.calibration.probe import Probe, run_probe
from inference_svc.runtime.calibration.stock import (
    SAME,
    can_set_attention,
    distance,
    use_attention,
)
from inference_svc.runtime.compute.gathered_forward import causal_block
from inference_svc.runtime.model import capture
from inference_svc.runtime.model.mixers import tap_mixers
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.refusals import REMEDY, ModelModeMissingError, ModelUncachedError
from inference_svc.runtime.positions.recipes import LATENT_MODES, MASKED_MODES, Mode
from shared.types.errors import ReportedError

PROBE_LENGTHS = (11, 13, 17, 19, 23)  # tokens; the first one that is no dimension of the model
REPEATED_TOKENS = 4  # a probe's last tokens, which repeat its first ones
_REACH = re.compile(r"window|chunk|local_att")  # names of configs for the reach of an attention


@contextmanager
def refused_if_it_fails(loaded: LoadedModel, how: str) -> Iterator[None]:
    """Turn any error of a model inside the block into a refusal.

    A model that is run in a way that it was not written for may raise anything.
    """
    try:
        yield
    except ReportedError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        raise ModelModeMissingError(
            f"{loaded.architecture} does not run {how} ({cause})", REMEDY
        ) from error


def probe_mode(loaded: LoadedModel, mode: Mode, attention: str) -> Probe:
    """Probe a model in a mode, and check that the mode supports it.

    Args:
        loaded: the model, with our hooks installed; it is left set to another attention.
        mode: the mode to probe.
        attention: name of the attention function that the mode runs with.

    Raises:
        UnsupportedModelError: the mode does not support this model.
    """
    is_ours = mode not in {"masked", "single", "own"}
    if is_ours and can_set_attention(loaded.model):
        attention = capture.PROBE_ATTENTION_NAME
    use_attention(loaded.model, attention)
    if mode == "own":
        with refused_if_it_fails(loaded, "over a cache of its own"):
            found = find_own_layers(loaded)
        return Probe(loaded.context_window, loaded.device, own_layers=found)
    if mode == "masked":
        _check_reach(loaded)
    with refused_if_it_fails(loaded, "with a cache of keys and values alone"):
        probe = _run(loaded, mode, 0)
    _check_layers(loaded, probe)
    _tap_mixers(loaded, mode, probe)
    if is_ours:
        _check_attention(loaded, mode, probe)
    if mode != "single":
        claimed_tokens = loaded.context_window - len(probe_tokens(loaded))
        with refused_if_it_fails(loaded, "in a batch of several sequences"):
            misled = _run(loaded, mode, claimed_tokens)
        if distance(misled.logits, probe.logits) > SAME:
            raise ModelModeMissingError(
                f"{loaded.architecture} derives positions from the length of its cache", REMEDY
            )
    return probe


def probe_tokens(loaded: LoadedModel) -> list[int]:
    """Return the tokens of a probe."""
    config = loaded.model.config.get_text_config()
    sizes = {value for value in vars(config).values() if isinstance(value, int)}
    num_tokens = next((length for length in PROBE_LENGTHS if length not in sizes), PROBE_LENGTHS[0])
    token_ids = [(7 * i + 3) % loaded.vocab_size for i in range(num_tokens - REPEATED_TOKENS)]
    return token_ids + token_ids[:REPEATED_TOKENS]


def probe_mask(loaded: LoadedModel, mode: Mode) -> dict[str, Tensor]:
    """Return the model's mask argument for a probe; {} in modes without a mask."""
    if mode not in MASKED_MODES:
        return {}
    size = len(probe_tokens(loaded))
    return {"attention_mask": causal_block(size, size, loaded.dtype, loaded.device)[None, None]}


def _run(loaded: LoadedModel, mode: Mode, claimed_tokens: int) -> Probe:
    return run_probe(
        loaded.model,
        probe_tokens(loaded),
        loaded.context_window,
        claimed_tokens=claimed_tokens,
        attention_mask=probe_mask(loaded, mode).get("attention_mask"),
    )


def _check_reach(loaded: LoadedModel) -> None:
    """Refuse a model whose own mask may hide more than later tokens, since ours replaces it."""
    config = loaded.model.config.get_text_config()
    for key, value in vars(config).items():
        if _REACH.search(key) and value and not isinstance(value, bool):
            raise ModelModeMissingError(
                f"the config of {loaded.architecture} limits how far its attention reaches ({key})",
                REMEDY,
            )


def _check_layers(loaded: LoadedModel, probe: Probe) -> None:
    """Refuse a model that caches in a form that we do not support."""
    name, num_tokens = loaded.architecture, len(probe_tokens(loaded))
    if not probe.layers and not probe.states:
        raise ModelUncachedError(f"{name} caches no keys and values", REMEDY)
    if probe.num_repeated:
        raise ModelModeMissingError(f"{name} caches a layer more than once in a forward", REMEDY)
    if probe.num_misplaced or not probe.indexes.keys() <= probe.layers.keys():
        raise ModelModeMissingError(f"{name} caches index keys separately from their layer", REMEDY)
    for layer_index, seen in probe.layers.items():
        index = probe.indexes.get(layer_index)
        for cached in (seen.key, seen.value, *([] if index is None else [index.key])):
            if cached.dim() != 4 or cached.shape[0] != 1 or cached.shape[2] != num_tokens:
                raise ModelModeMissingError(
                    f"layer {layer_index} of {name} caches a tensor of shape {tuple(cached.shape)} "
                    f"for {num_tokens} tokens",
                    REMEDY,
                )


def _tap_mixers(loaded: LoadedModel, mode: Mode, probe: Probe) -> None:
    """Install taps that run recurrent modules sequence by sequence.

    Raises:
        ModelModeMissingError: this is not possible, and the mode is one of several sequences.
    """
    try:
        tap_mixers(probe.mixer_calls(len(probe_tokens(loaded))))
    except ModelModeMissingError:
        if mode != "single":
            raise


def _check_attention(loaded: LoadedModel, mode: Mode, probe: Probe) -> None:
    """Refuse a model whose attention ours cannot replace."""
    name = loaded.architecture
    if not probe.layers:  # the model has states only
        return
    if not probe.attended:
        raise ModelModeMissingError(
            f"{name} does not call the attention function it is set to", REMEDY
        )
    is_by_head = any(seen.key.shape[1] * seen.value.shape[1] > 1 for seen in probe.layers.values())
    if mode in LATENT_MODES and is_by_head:
        raise ModelModeMissingError(f"{name} caches keys of each head instead of latents", REMEDY)
    if mode == "indexed":
        if not all(seen.is_chosen for seen in probe.attended):
            raise ModelModeMissingError(
                f"{name} does not reveal which keys its index chooses", REMEDY
            )
        return
    if probe.indexes:
        raise ModelModeMissingError(f"{name} chooses the keys to attend to by an index", REMEDY)
    if mode == "ragged" and not all(seen.is_cached for seen in probe.attended):
        raise ModelModeMissingError(
            f"{name} attends to other tensors than those that it caches", REMEDY
        )
    if not all(seen.mask.is_understood for seen in probe.attended):
        raise ModelModeMissingError(
            f"{name} masks keys in a way other than by a window or by chunks", REMEDY
        )
