"""How much a batch takes where no setting says: a GPU is busy only with far more than a CPU. Pure.

A CPU computes a step in time that grows with its tokens, so that small steps lose little and keep
answers smooth. A GPU takes hardly longer for thousands of prompt tokens, or dozens of answers, than
it takes to be told of one.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BatchBounds:
    """Bounds of a batch, as `SchedulerLimits` has them."""

    max_running: int
    max_loading: int
    step_tokens: int
    mixed_step_tokens: int

    @property
    def num_active(self) -> int:
        """Most requests that are admitted at once."""
        return self.max_running + self.max_loading


ON_CPU = BatchBounds(max_running=8, max_loading=4, step_tokens=512, mixed_step_tokens=128)
ON_GPU = BatchBounds(max_running=64, max_loading=8, step_tokens=4096, mixed_step_tokens=1024)


def usual_bounds(device_type: str, most_active: int | None = None) -> BatchBounds:
    """Return the bounds for a device.

    Args:
        device_type: PyTorch's name of it, "cuda" or another.
        most_active: most requests that there is room for at once, of a model whose requests have
            states: the bounds are halved until they keep to it, but are never below a CPU's. None:
            states bound nothing.
    """
    bounds = ON_GPU if device_type == "cuda" else ON_CPU
    while most_active is not None and most_active < bounds.num_active > ON_CPU.num_active:
        bounds = replace(
            bounds,
            max_running=max(bounds.max_running // 2, ON_CPU.max_running),
            max_loading=max(bounds.max_loading // 2, ON_CPU.max_loading),
        )
    return bounds
