"""States that a model keeps in its own modules, of whatever ran last, instead of asking a cache.

The forward of such a module has a tap: it puts there what the forward under way has of the states,
and takes from there what they have become. So these are states like all others: of as many
sequences as there are, stored and loaded, and their modules are mixers (`mixers.py`). Without a
forward under way taps are transparent. Model code is not touched.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from inference_svc.runtime.kv.states import StatePlace
from inference_svc.runtime.model.forward import forward_under_way


class KeptStatesTap:
    """Stands in for the forward of a module that keeps states.

    Attributes:
        forward: the module's own.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], kept: Mapping[str, StatePlace]
    ) -> None:
        """Store the parts.

        Args:
            module: which keeps them.
            forward: its own.
            kept: by attribute, which of the model's states it is.
        """
        self.forward = forward
        self._module = module
        self._kept = kept

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the module's forward over the states of the forward under way, if there is one."""
        under_way = forward_under_way()
        if under_way is None:
            return self.forward(*args, **options)
        before = {name: getattr(self._module, name) for name in self._kept}
        try:
            for name, place in self._kept.items():
                setattr(self._module, name, under_way.state(place))
            result = self.forward(*args, **options)
            for name, place in self._kept.items():
                state = getattr(self._module, name)
                if isinstance(state, Tensor):
                    under_way.new_state(place, state)
            return result
        finally:
            for name, was in before.items():
                setattr(self._module, name, was)


def kept_tensors(model: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Return what modules keep that is neither a parameter nor a buffer, by module and name."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def has_taps(model: nn.Module) -> bool:
    """Whether there are taps in a model, be it beneath those of mixers."""
    forwards = [module.forward for module in model.modules()]
    inner = [getattr(forward, "forward", None) for forward in forwards]
    return any(isinstance(forward, KeptStatesTap) for forward in (*forwards, *inner))


def tap_kept_states(kept: Mapping[nn.Module, Mapping[str, StatePlace]]) -> None:
    """Install taps in modules, which have none yet; by attribute, which state it is."""
    for module, places in kept.items():
        module.forward = KeptStatesTap(module, module.forward, places)
