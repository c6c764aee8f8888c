"""Where a model can be run: on tested versions of Python."""

import sys
import tomllib
from pathlib import Path

import pytest

from inference_svc.installation import (
    PYTHONS,
    UntestedPythonError,
    keep_kernels_in,
    require_engine,
)

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_this_python_is_supported():
    """The package names all tested versions."""
    require_engine(sys.version_info[:2])
    named = tomllib.loads(PROJECT.read_text())["project"]["classifiers"]
    for major, minor in PYTHONS:
        assert f"Programming Language :: Python :: {major}.{minor}" in named


@pytest.mark.parametrize("python", [(3, 13), (3, 10)])
def test_another_python_is_refused_before_torch_is_looked_for(python):
    """In one line that says which ones there are."""
    with pytest.raises(
        UntestedPythonError, match=r"on Python 3\.11 or 3\.12, but this is Python 3\.1"
    ) as no:
        require_engine(python)
    assert no.value.exit_code == 78
    assert "3.11 or 3.12" in no.value.remedy


def test_compiled_kernels_are_stored_beside_the_state(tmp_path):
    """A service has no home directory; an explicit place has precedence."""
    environ = {"TRITON_CACHE_DIR": "/elsewhere"}
    keep_kernels_in(tmp_path, environ)
    assert environ == {
        "CACHEDATTENTION_KERNEL_DIR": f"{tmp_path}/kernels/native",
        "TRITON_CACHE_DIR": "/elsewhere",
        "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/kernels/inductor",
    }
