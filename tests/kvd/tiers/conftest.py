"""Fixtures of the tiers' tests."""

import pytest

from tests.kvd.tiers.disk import Disk


@pytest.fixture
def disk(tmp_path):
    """Volumes in an empty directory."""
    made = Disk(tmp_path)
    yield made
    made.close()
