"""Tests on a GPU (`make test-gpu`), or with GPU_TESTS_DEVICE=cpu on what stands in for one."""

import os

import pytest
import torch

from inference_svc.runtime.cuda.driver import CudaDriver
from inference_svc.runtime.kv import copy_stream
from tests.simulated_device import SimulatedDevice

NAME = os.environ.get("GPU_TESTS_DEVICE", "cuda")


def pytest_collection_modifyitems(items):
    """Without a GPU nothing here runs, unless something is to stand in for it."""
    if NAME == "cuda" and not torch.cuda.is_available():
        for item in items:
            if "tests/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="there is no GPU: GPU_TESTS_DEVICE=cpu"))


@pytest.fixture(scope="session")
def device():
    """The device that is tested."""
    torch.set_num_threads(1)
    return torch.device(NAME)


@pytest.fixture(scope="session")
def dtypes():
    """Those that the device computes: the interpreter has no bfloat16."""
    return [torch.float32, torch.float16] + ([torch.bfloat16] if NAME != "cpu" else [])


@pytest.fixture
def driver(device, monkeypatch):
    """The device's driver."""
    if device.type == "cuda":
        return CudaDriver(device)
    simulated = SimulatedDevice()
    monkeypatch.setattr(copy_stream.torch, "get_device_module", lambda _device: simulated)
    return simulated
