"""Servers behind a balancer that share a store: conversations continue on every server."""

import shutil

import pytest

from tests.examples.balanced_pairs import BalancedPairs
from tests.examples.moving import BUSY_SHARE, run_checked

pytestmark = [
    pytest.mark.skipif(
        shutil.which("haproxy") is None, reason="needs haproxy: apt install haproxy"
    ),
    pytest.mark.timeout(1800),
]


@pytest.mark.parametrize("num_tales", [12, pytest.param(200, marks=pytest.mark.long)])
async def test_servers_leave_and_return(tiny_model, oracle, tmp_path, num_tales, capsys):
    """No turn fails; only what the lost server alone had is computed again."""
    store = tmp_path / "store"
    scene = await run_checked(BalancedPairs(tiny_model, tmp_path, store), oracle, num_tales, store)
    with capsys.disabled():
        print(scene)
    assert scene.excess <= scene.at_stake * BUSY_SHARE


@pytest.mark.long
async def test_servers_that_share_nothing(tiny_model, oracle, tmp_path, capsys):
    """Without a store: every conversation is computed again on its new server."""
    scene = await run_checked(BalancedPairs(tiny_model, tmp_path), oracle, 200, None)
    with capsys.disabled():
        print(scene)
    assert scene.moved > 0
    assert scene.lost > 0
