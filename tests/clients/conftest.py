"""Fixtures for the installations of `make test-clients`, and a pair with the demo model."""

import os
import shutil
from pathlib import Path

import pytest
import pytest_asyncio

from inference_svc.installation import SHIPPED_MODEL
from tests.clients.local_pair import LocalPair
from tests.clients.page import MODEL
from tests.clients.shells import Shell

ENVIRONMENTS = Path(os.environ.get("CLIENTS_DIR", ".venv-clients")).absolute()
AGENTS = ENVIRONMENTS / "npm" / "node_modules" / ".bin"


def libraries(name):
    """Return the programs of a Python environment: openai3 or openai2."""
    found = ENVIRONMENTS / name / "bin"
    assert found.is_dir(), (
        f"{found} is missing: run `make test-clients`, which installs the clients"
    )
    return found


@pytest.fixture
def shell(tmp_path):
    """Return a factory of shells with the programs of a directory."""

    def make(programs, setting=""):
        return Shell(tmp_path, [programs], setting)

    return make


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(tmp_path_factory):
    """Run the pair that all libraries share."""
    directory = tmp_path_factory.mktemp("pair")
    model = directory / MODEL
    shutil.copytree(SHIPPED_MODEL, model)
    async with LocalPair(model, directory) as pair:
        yield pair
