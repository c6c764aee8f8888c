"""Servers behind Ray Serve that share a store: conversations continue on every server."""

import pytest

from tests.examples.moving import BUSY_SHARE, run_checked

pytest.importorskip("ray", reason="needs the extra `ray`: make test-ray")

from tests.examples.ray_cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]


async def test_servers_leave_and_return(tiny_model, oracle, tmp_path_factory, capsys):
    """No turn fails; only what the lost server alone had is computed again."""
    directory, store = tmp_path_factory.mktemp("ray"), tmp_path_factory.mktemp("store")
    cluster = RayCluster(tiny_model, directory, 3, store)
    scene = await run_checked(cluster, oracle, 200, store)
    with capsys.disabled():
        print(scene)
    assert scene.excess <= scene.at_stake * BUSY_SHARE
