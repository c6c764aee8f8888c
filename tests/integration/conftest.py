"""Fixtures of contexts that overflow: a model with a small window, and services for it."""

import pytest
import pytest_asyncio

from tests.integration.overflowing import WINDOW_TOKENS
from tests.models import narrow_model
from tests.pair import Pair, resident_pair
from tests.truncation_oracle import TruncationOracle


@pytest.fixture(scope="module")
def model_dir(tiny_model, tmp_path_factory):
    """Build the tiny model with a small window."""
    return narrow_model(tiny_model, tmp_path_factory.mktemp("narrow") / "tiny", WINDOW_TOKENS)


@pytest.fixture(scope="module")
def judge(model_dir):
    return TruncationOracle(model_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(model_dir, tmp_path_factory):
    """Run a service that keeps no sessions in memory: reused tokens come from kvd."""
    pair = Pair(model_dir, tmp_path_factory.mktemp("narrow-pair"))
    async with pair.service:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def resident(model_dir, tmp_path_factory):
    """Run a service whose sessions stay in memory, which is too small for four of them."""
    pair = resident_pair(model_dir, tmp_path_factory.mktemp("resident-pair"))
    async with pair.service:
        yield pair
