"""Where a model can be run: on Pythons that it was tested on."""

import sys
import tomllib
from pathlib import Path

import pytest

from inference_svc.installation import PYTHONS, UntestedPythonError, require_engine

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_this_python_is_one_of_them():
    """On which the tests run; and all are named by the package."""
    require_engine(sys.version_info[:2])
    named = tomllib.loads(PROJECT.read_text())["project"]["classifiers"]
    for major, minor in PYTHONS:
        assert f"Programming Language :: Python :: {major}.{minor}" in named


@pytest.mark.parametrize("python", [(3, 13), (3, 10)])
def test_another_python_is_refused_before_torch_is_looked_for(python):
    """In one line that says which ones there are."""
    with pytest.raises(UntestedPythonError, match=r"on Python 3\.11 or 3\.12, this is 3\.1") as no:
        require_engine(python)
    assert no.value.exit_code == 78
    assert "3.11 or 3.12" in no.value.remedy
