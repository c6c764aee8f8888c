"""Packings are chosen by device, dtype and compiler; one that is named has to be usable."""

import pytest
import torch

from inference_svc.runtime.calibration import packing_choice
from inference_svc.runtime.calibration.packing_choice import usable_packings
from inference_svc.runtime.cpu.native_library import NativeLibraryError
from shared.types.errors import ConfigError

CPU = torch.device("cpu")


def names(choice, dtype=torch.float32, device=CPU):
    """Return the names of the packings for a choice, in their order."""
    return [packing.name for packing in usable_packings(choice, device, dtype)]


@pytest.fixture
def no_compiler(monkeypatch):
    def load():
        raise NativeLibraryError("there is no C++ compiler (g++)")

    monkeypatch.setattr(packing_choice.ProductKernel, "load", load)


def test_our_kernel_comes_first():
    assert names("auto") == ["cpp", "torch"]
    assert (names("cpp"), names("torch"), names("off")) == (["cpp"], ["torch"], [])


def test_without_a_compiler_torchs_is_left(no_compiler):
    assert names("auto") == ["torch"]
    with pytest.raises(ConfigError, match=r"packed_weights = cpp .* no C\+\+ compiler .*auto"):
        names("cpp")


def test_nothing_is_packed_where_there_is_no_kernel():
    assert names("auto", torch.float64) == []
    assert names("auto", device=torch.device("meta")) == []
    with pytest.raises(ConfigError, match=r"packed_weights = torch .* float64"):
        names("torch", torch.float64)
