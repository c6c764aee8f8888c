"""`kvd plan --observe` against a real daemon that was too small for its sessions."""

import asyncio
import json
from pathlib import Path
from typing import Any

from kvd.client.operator_client import connect
from tests.kvd_polling import eventually, reader_stats
from tests.processes import KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import SyntheticEngine, attached_engine, key_of

NUM_SESSIONS = 14  # blocks of three sessions: more than 32 blocks hold, fewer than 64 do
ROUNDS = 6
GROWTH = 8  # tokens per turn
FLAGS = ("--dram", "256KB", "--ssd", "0")
CONFIG = '[eviction]\npolicy = "lru"\n'


async def _turn(engine: SyntheticEngine, session: int, round_: int) -> int:
    """Run one turn; return how many tokens of its history were found."""
    key, first = key_of(f"s{session}"), 1000 * session
    history = GROWTH * round_
    tokens = list(range(first, first + history + GROWTH))
    loaded = await engine.load(key, tokens[:-1]) if history else None
    from_token = loaded.num_tokens // 16 * 16 if loaded else 0
    await engine.store(key, tokens, from_token)
    return loaded.num_tokens if loaded else 0


async def _observe(kvd: KvdProcess) -> Any:
    code, stdout, stderr = await run_cli(
        "plan", "--observe", "--json", "-", "--runtime-dir", str(kvd.runtime_dir)
    )
    assert code == 0, stderr
    return json.loads(stdout)


async def test_the_plan_shows_hits_with_more_memory(tmp_path: Path) -> None:
    """LRU loses what is used in a circle; twice the DRAM would have held everything."""
    (tmp_path / "kvd.toml").write_text(CONFIG)
    flags = (*FLAGS, "--config", str(tmp_path / "kvd.toml"))
    found = wanted = 0
    async with running_kvd(tmp_path, *flags) as kvd, attached_engine(kvd.runtime_dir) as engine:
        for round_ in range(ROUNDS):
            for session in range(NUM_SESSIONS):
                there = await _turn(engine, session, round_)
                if round_ >= ROUNDS // 2:
                    wanted += GROWTH * round_
                    found += there
        document = await _observe(kvd)
        code, table, _ = await run_cli("plan", "--observe", "--runtime-dir", str(kvd.runtime_dir))
    (layout,) = document["layouts"]
    assert (layout["num_turns"], layout["num_sessions"]) == (NUM_SESSIONS * ROUNDS, NUM_SESSIONS)
    assert layout["num_judged"] == NUM_SESSIONS * ROUNDS // 2
    assert (layout["policy"], layout["is_too_few"]) == ("lru", True)
    assert abs(layout["had"]["tok"] - found / wanted) < 0.01  # both count the granted tokens
    by_scale = {size["dram_scale"]: size for size in layout["reachable"]}
    assert list(by_scale) == [1, 2, 4]
    assert [by_scale[scale]["is_filled"] for scale in by_scale] == [True, False, False]
    assert layout["had"]["fu"] < 0.5
    assert by_scale[1]["rates"]["fu"] < 0.5
    assert by_scale[2]["rates"] == {"tok": 1.0, "fu": 1.0, "dram": 1.0}
    assert code == 0
    assert "as it was" in table
    assert "too few" in table


async def test_turns_are_known_from_the_queue(tmp_path: Path) -> None:
    """The queue of an engine says when a turn arrived, and how many tokens it needed."""
    flags = ("--dram", "1MB", "--ssd", "0")

    async def queue() -> tuple[int, int]:
        (engine_info,) = (await reader_stats(kvd)).engines
        return engine_info.queue_jobs, engine_info.running_jobs

    async with running_kvd(tmp_path, *flags) as kvd, attached_engine(kvd.runtime_dir) as engine:
        await _turn(engine, 1, 0)
        engine.queue.on_wait((0, 0.0, 7), key_of("s1"), GROWTH)
        await eventually(queue, (1, 0))
        engine.queue.on_run(7, key_of("s1"))
        await eventually(queue, (0, 1))
        await _turn(engine, 1, 1)
        engine.queue.on_leave(7)
        with connect(kvd.runtime_dir) as client:
            (told,) = await asyncio.to_thread(client.recent_turns, "")
    first, second = told.turns
    assert (first.session, first.turn, first.stored_tokens) == (second.session, 1, GROWTH)
    assert first.started_s >= second.arrived_s > second.started_s >= second.ended_s >= 0
    assert (second.turn, second.wanted_tokens, second.asked) == (2, GROWTH, True)
    assert (second.dram_tokens, second.ssd_tokens) == (GROWTH, 0)
    assert second.stored_tokens == 2 * GROWTH
    assert (told.ssd_bytes, told.policy) == (0, "predictive")


async def test_nothing_was_observed(tmp_path: Path) -> None:
    """Without a turn, and without a daemon, there is one line with the remedy."""
    async with running_kvd(tmp_path, "--dram", "1MB") as kvd:
        code, _, stderr = await run_cli("plan", "--observe", "--runtime-dir", str(kvd.runtime_dir))
        assert (code, len(stderr.strip().splitlines())) == (5, 1)
        assert "not seen any turn" in stderr
    code, _, stderr = await run_cli("plan", "--observe", "--runtime-dir", str(kvd.runtime_dir))
    assert code == 69
    assert "kvd serve" in stderr
