"""oneDNN's packing says where it can be used. What it does is tested with its layers."""

import torch

from inference_svc.runtime.model.packing import OneDnnPacking

CPU = torch.device("cpu")


def test_where_torch_has_no_kernel():
    """Of doubles, and on other devices."""
    packing = OneDnnPacking()
    assert packing.why_unusable(CPU, torch.float32) == ""
    reason = packing.why_unusable(CPU, torch.float64)
    assert reason == "torch has no packed product of float64 here"
    assert packing.why_unusable(torch.device("meta"), torch.float32)
