"""The driver's calls: results and errors; and the stand-in's similarity to the real package."""

import importlib
import inspect
import os
import sys

import pytest

from shared.cuda.driver_calls import DriverCalls, DriverError
from shared.cuda.shared_memory import SharedGpuMemory
from tests.fake_cuda_path import FAKE_CUDA, GPUS


@pytest.fixture
def fake(monkeypatch):
    """Use the stand-in in this process, with two GPUs."""
    monkeypatch.setenv("FAKE_CUDA_DEVICES", ",".join(GPUS))
    yield from _import_anew(monkeypatch)


def _import_anew(monkeypatch):
    monkeypatch.syspath_prepend(str(FAKE_CUDA))
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_cuda(name)}
    importlib.invalidate_caches()
    yield importlib.import_module("cuda.bindings.driver")
    for name in [name for name in sys.modules if _is_cuda(name)]:
        del sys.modules[name]
    sys.modules.update(hidden)


def _is_cuda(name):
    return name == "cuda" or name.startswith("cuda.")


def test_a_machine_without_gpus_is_reported(monkeypatch):
    """With the driver's error, or the package's if there is no driver."""
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "")
    for driver in _import_anew(monkeypatch):
        with pytest.raises(DriverError, match="cuInit failed: CUDA_ERROR_NO_DEVICE"):
            DriverCalls()

        def missing(_flags):
            raise RuntimeError("no libcuda")

        monkeypatch.setattr(driver, "cuInit", missing)
        with pytest.raises(DriverError, match="no CUDA driver"):
            DriverCalls()


def test_memory_is_shared_by_its_descriptor(fake):
    """Two mappings have the same bytes; the memory outlives the first."""
    calls = DriverCalls()
    calls.call("cuCtxSetCurrent", "context 0")
    ours = SharedGpuMemory(calls, 0, 5000)
    theirs = SharedGpuMemory(calls, 0, 5000, ours.fd)
    assert ours.num_bytes == theirs.num_bytes == fake.GRANULARITY
    assert ours.address != theirs.address
    fake.ctypes.memset(ours.address + 4999, 7, 1)
    fd = ours.fd
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert fake.ctypes.string_at(theirs.address + 4999, 1) == b"\7"
    theirs.close()
    assert not fake._mapped
    assert not fake._handles


def test_a_failed_import_leaves_nothing(fake):
    """A descriptor with less memory than announced is refused."""
    calls = DriverCalls()
    calls.call("cuCtxSetCurrent", "context 0")
    small = SharedGpuMemory(calls, 0, 5000)
    with pytest.raises(DriverError, match="cuMemMap failed: CUDA_ERROR_INVALID_VALUE"):
        SharedGpuMemory(calls, 0, 3 * fake.GRANULARITY, small.fd)
    assert not fake._handles
    small.close()


def test_the_stand_in_has_the_drivers_functions(fake):
    """Every function has as many arguments as the real one, and every constant exists."""
    ours = {name: getattr(fake, name) for name in dir(fake) if name.startswith(("cu", "CU"))}
    sys.path.remove(str(FAKE_CUDA))
    for name in [name for name in sys.modules if _is_cuda(name)]:
        del sys.modules[name]
    importlib.invalidate_caches()
    real = importlib.import_module("cuda.bindings.driver")
    assert real is not fake
    for name, stand_in in ours.items():
        if name.startswith("cu"):
            described = getattr(real, name).__doc__.partition("\n")[0]
            arguments = described.removeprefix(f"{name}(").removesuffix(")")
            depth = num_arguments = 0
            for letter in arguments:
                depth += (letter in "[(") - (letter in ")]")
                num_arguments += letter == "," and depth == 0
            num_arguments += bool(arguments)
            assert num_arguments == len(inspect.signature(stand_in).parameters), described
        elif isinstance(stand_in, type):
            fields = [field for field in vars(stand_in) if not field.startswith("_")]
            for field in fields:
                assert hasattr(getattr(real, name), field), f"{name}.{field}"
        else:
            assert getattr(real, name) == stand_in, name
