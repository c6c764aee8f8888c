"""Fixtures of the tiers' tests."""

import pytest

from kvd.tiers.faults import NoFaults
from kvd.tiers.manifest import Manifest
from tests.kvd.tiers.disk import Disk


@pytest.fixture
def disk(tmp_path):
    """Return volumes in an empty directory."""
    made = Disk(tmp_path)
    yield made
    made.close()


@pytest.fixture
def make(tmp_path):
    """Return a function that opens the index of a directory, repeatedly, as each start does."""
    made = []

    def manifest(faults=None):
        made.append(Manifest(tmp_path / "manifest.db", tmp_path / "volumes", faults or NoFaults()))
        made[-1].open()
        return made[-1]

    yield manifest
    for each in made:
        each.close()
