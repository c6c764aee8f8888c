"""Triton's interpreter with a GPU's rounding."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture
def rounding_as_a_gpu(monkeypatch):
    """Round float32 to the nearest bfloat16; the interpreter itself truncates."""
    convert = interpreter._convert_float

    def converted(data, source, target, rounding):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, rounding)
        wide = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
        return wide.bfloat16().view(torch.uint16).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
