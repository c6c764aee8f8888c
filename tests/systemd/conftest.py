"""Fixtures for containers, each booted once; `make test-systemd` runs prepare.sh before."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from tests.systemd.container import Container


@asynccontextmanager
async def _booted(name: str) -> AsyncIterator[Container]:
    cache = os.environ.get("SYSTEMD_CACHE")
    if not cache:
        pytest.skip("needs a prepared root file system: run it by `make test-systemd`")
    container = Container(Path(cache), os.environ.get("SYSTEMD_SUITE", "bookworm"), name)
    try:
        await container.boot()
        yield container
    finally:
        await container.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def booted():
    """Boot a container in which the pair is installed."""
    async with _booted("kvd-test") as container:
        await container.install()
        yield container


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def bare():
    """Boot a container in which nothing is installed yet."""
    async with _booted("kvd-bare") as container:
        yield container


@pytest_asyncio.fixture(loop_scope="session")
async def container(booted):
    """Return the container with an empty, running kvd."""
    await booted.fresh_kvd()
    return booted
