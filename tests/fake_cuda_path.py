"""The path of the stand-in for CUDA's driver, and the environment that makes a process use it."""

import os
from pathlib import Path

FAKE_CUDA = Path(__file__).parent / "fake_cuda"
GPUS = [f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in (1, 2)]


def fake_cuda(copy_s=0.0):
    """Return the environment of a process on a machine with GPUS whose copies take `copy_s`."""
    path = os.environ.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": f"{FAKE_CUDA}:{path}" if path else str(FAKE_CUDA),
        "FAKE_CUDA_DEVICES": ",".join(GPUS),
        "FAKE_CUDA_COPY_S": str(copy_s),
    }
