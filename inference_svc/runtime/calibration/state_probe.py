"""State probe: finds the shapes of a model's recurrent states, and which it changes in place.

States that modules keep in their own attributes instead of a cache are also found by running them.

A state is stored as one piece of fixed size, so sequences of two lengths have to leave tensors of
the same shapes. Tensors that the model changes in place when a sequence continues are passed to it
as copies.
"""

from contextlib import suppress

import torch
from torch import nn

from inference_svc.runtime.calibration.mode_probe import probe_tokens, refused_if_it_fails
from inference_svc.runtime.calibration.probe import Probe, run_probe
from inference_svc.runtime.calibration.stock import stock_attentions, use_attention
from inference_svc.runtime.kv.states import StatePlace, StateShape
from inference_svc.runtime.model.kept_states import has_taps, kept_tensors, tap_kept_states
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.refusals import REMEDY, ModelRecurrentError

FEWER_TOKENS = 2  # the second length; fewer than any convolution's kernel spans
NEXT_TOKENS = (1, 3)  # tokens after a state: models decode by other code than they prefill


@torch.inference_mode()
def find_kept_states(loaded: LoadedModel) -> None:
    """Find the tensors that a forward leaves in the model's own modules, and tap these modules.

    If the forward fails, no taps are installed, and the modes report why. Existing taps are kept.

    Args:
        loaded: the model, with our hooks installed; it is left set to its first stock attention.
    """
    model = loaded.model
    if has_taps(model):
        return
    use_attention(model, stock_attentions(model)[0])
    before = {module: dict(vars(module)) for module in model.modules()}
    copies = {what: tensor.clone() for what, tensor in kept_tensors(model).items()}
    with suppress(Exception):
        run_probe(model, probe_tokens(loaded), loaded.context_window)
    changed: dict[nn.Module, list[str]] = {}
    for (module, name), tensor in kept_tensors(model).items():
        original, copied = before[module].get(name), copies.get((module, name))
        if tensor is original and copied is not None and tensor.equal(copied):
            continue
        changed.setdefault(module, []).append(name)
        setattr(module, name, original if copied is None else copied)
    tap_kept_states(
        {
            module: {name: StatePlace(owner, "kept", number) for number, name in enumerate(names)}
            for owner, (module, names) in enumerate(changed.items())
        }
    )


def find_states(loaded: LoadedModel, probe: Probe) -> tuple[StateShape, ...]:
    """Return the shapes of the tensors of a sequence's state; (): the model has none.

    Args:
        loaded: the model, set to the attention that it was probed with.
        probe: a probe of the model.

    Raises:
        ModelRecurrentError: the shapes depend on the number of tokens.
    """
    if not probe.states:
        return ()
    token_ids = probe_tokens(loaded)
    with refused_if_it_fails(loaded, "on from a state"):
        short = run_probe(loaded.model, token_ids[:FEWER_TOKENS], loaded.context_window)
        overwritten = _find_overwritten(loaded, probe)
    facts = [
        {place: (state.shape, state.dtype) for place, state in found.states.items()}
        for found in (probe, short)
    ]
    if facts[0] != facts[1]:
        raise ModelRecurrentError(
            f"the states of {loaded.architecture} grow with the number of tokens", REMEDY
        )
    return tuple(
        StateShape(*place, tuple(state.shape), state.dtype, place in overwritten)
        for place, state in sorted(probe.states.items(), key=lambda item: item[0])
    )


@torch.inference_mode()
def _find_overwritten(loaded: LoadedModel, probe: Probe) -> frozenset[StatePlace]:
    """Return the state tensors that the model changes in place.

    Those of convolutions are always included: some kernels change them in place, and others do not.
    """
    found = {place for place in probe.states if place.kind == "conv"}
    for count in NEXT_TOKENS:
        given = {place: state.clone() for place, state in probe.states.items()}
        token_ids = probe_tokens(loaded)[:count]
        run_probe(loaded.model, token_ids, loaded.context_window, states=given)
        found.update(place for place in given if not given[place].equal(probe.states[place]))
    return frozenset(found)
