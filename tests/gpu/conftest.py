"""Fixtures of tests on a GPU (`make test-gpu`); `make test` runs fewer, on a stand-in."""

import os

import pytest
import torch

from inference_svc.runtime.cuda.driver import CudaDriver
from inference_svc.runtime.kv import copy_stream
from tests.simulated_device import SimulatedDevice

NAME = os.environ.get("GPU_TESTS_DEVICE", "cpu")


@pytest.fixture(scope="session")
def device():
    """Return the device under test."""
    torch.set_num_threads(1)
    return torch.device(NAME)


@pytest.fixture(scope="session")
def dtypes():
    """Return the dtypes that the device computes: the interpreter has no bfloat16."""
    return [torch.float32, torch.float16] + ([torch.bfloat16] if NAME != "cpu" else [])


@pytest.fixture
def driver(device, monkeypatch):
    """Return the device's driver."""
    if device.type == "cuda":
        return CudaDriver(device)
    simulated = SimulatedDevice()
    monkeypatch.setattr(copy_stream.torch, "get_device_module", lambda _device: simulated)
    return simulated
