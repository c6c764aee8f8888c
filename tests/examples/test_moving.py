"""Servers behind a balancer that share a store: conversations go on wherever they come."""

import asyncio
import shutil

import pytest

from tests.examples.balanced_pairs import BalancedPairs
from tests.examples.moving import Front, Scene, play

pytestmark = [
    pytest.mark.skipif(
        shutil.which("haproxy") is None, reason="needs haproxy: apt install haproxy"
    ),
    pytest.mark.timeout(1800),
]


async def played(front, oracle, num_tales, store) -> Scene:
    """The scene of tests/examples/moving.py; each answer is that of recomputation."""
    try:
        await front.start()
        scene = await play(front, num_tales, store)
        await check(front, oracle, scene)
    finally:
        await front.stop()
    return scene


async def check(front: Front, oracle, scene: Scene) -> None:
    """Look at every conversation where it is."""
    for tale in scene.tales:
        turns = []
        for pair in front.pairs.values():
            session = await pair.session(tale.name) if pair.is_running else None
            if session is not None and session.turns > len(turns):
                turns = [(turn.input_ids, turn.output_ids) for turn in session.turn_records]
        verdict = await asyncio.to_thread(oracle.judge, turns)
        assert verdict.num_tokens
        assert verdict.is_identical


@pytest.mark.parametrize("num_tales", [12, pytest.param(200, marks=pytest.mark.long)])
async def test_servers_that_go_and_come(tiny_model, oracle, tmp_path, num_tales, capsys):
    """No turn fails; only what the lost server alone had is computed anew."""
    store = tmp_path / "store"
    scene = await played(BalancedPairs(tiny_model, tmp_path, store), oracle, num_tales, store)
    with capsys.disabled():
        print(scene)
    assert scene.moved == 0
    assert scene.lost <= scene.unpushed
    assert scene.back == 0


@pytest.mark.long
async def test_servers_that_share_nothing(tiny_model, oracle, tmp_path, capsys):
    """What it costs without a store: every conversation is computed anew where it comes."""
    scene = await played(BalancedPairs(tiny_model, tmp_path), oracle, 200, None)
    with capsys.disabled():
        print(scene)
    assert scene.moved > 0
    assert scene.lost > 0
