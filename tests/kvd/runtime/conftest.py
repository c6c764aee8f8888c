"""Fixtures of the runtime's tests."""

import pytest

from tests.kvd.runtime.performer_world import World


@pytest.fixture
async def world(tmp_path):
    made = World(tmp_path)
    made.start()
    yield made
    await made.close()
