"""How far two tensors are apart that calibration wants to be the same."""

from torch import Tensor

SAME = 1e-4  # relative; what should not change at all differs by rounding at most


def distance(value: Tensor, reference: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    reference = reference.float()
    return float((value.float() - reference).abs().max() / reference.abs().max().clamp_min(1e-30))
