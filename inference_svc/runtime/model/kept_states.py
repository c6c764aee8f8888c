"""KeptStatesTap: for models that keep states in attributes of their modules instead of a cache.

Such an attribute holds the state of the sequence that ran last. A tap replaces the module's
forward: it sets the attributes to the active forward's states before the call, and reads the new
states from them after it. So these are states like all others: kept per sequence, stored and
loaded; and their modules are mixers (`mixers.py`). Without an active forward taps are transparent.
Model code is not modified.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from inference_svc.runtime.kv.states import StatePlace
from inference_svc.runtime.model.forward import active_forward


class KeptStatesTap:
    """Replaces the forward of a module that keeps states.

    Attributes:
        forward: the module's original forward.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], kept: Mapping[str, StatePlace]
    ) -> None:
        """Store the parts.

        Args:
            module: the module that keeps states.
            forward: its original forward.
            kept: the attributes that hold states, and the place of each.
        """
        self.forward = forward
        self._module = module
        self._kept = kept

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the original forward over the active forward's states, if there is one."""
        active = active_forward()
        if active is None:
            return self.forward(*args, **options)
        before = {name: getattr(self._module, name) for name in self._kept}
        try:
            for name, place in self._kept.items():
                setattr(self._module, name, active.state(place))
            result = self.forward(*args, **options)
            for name, place in self._kept.items():
                state = getattr(self._module, name)
                if isinstance(state, Tensor):
                    active.update_state(place, state)
            return result
        finally:
            for name, original in before.items():
                setattr(self._module, name, original)


def kept_tensors(model: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Return the tensor attributes of modules that are neither parameters nor buffers."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def has_taps(model: nn.Module) -> bool:
    """Whether a model has such taps, also below mixer taps."""
    forwards = [module.forward for module in model.modules()]
    inner = [getattr(forward, "forward", None) for forward in forwards]
    return any(isinstance(forward, KeptStatesTap) for forward in (*forwards, *inner))


def tap_kept_states(kept: Mapping[nn.Module, Mapping[str, StatePlace]]) -> None:
    """Install taps in modules that have none yet.

    Args:
        kept: by module, the attributes that hold states, and the place of each.
    """
    for module, places in kept.items():
        module.forward = KeptStatesTap(module, module.forward, places)
