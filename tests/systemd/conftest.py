"""The container, booted once; see prepare.sh, which `make test-systemd` runs before."""

import os
from pathlib import Path

import pytest
import pytest_asyncio

from tests.systemd.container import Container


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def booted():
    """A booted container in which kvd is installed."""
    cache = os.environ.get("SYSTEMD_CACHE")
    if not cache:
        pytest.skip("needs a prepared root file system: run it by `make test-systemd`")
    container = Container(Path(cache), os.environ.get("SYSTEMD_SUITE", "bookworm"))
    try:
        await container.boot()
        await container.install()
        yield container
    finally:
        await container.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def container(booted):
    """The container with a kvd that serves and has nothing stored."""
    await booted.fresh_kvd()
    return booted
