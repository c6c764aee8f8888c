"""The real pair with little memory: the settings of a scene, and a check of its end."""

import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.faulty_kvd import FaultyKvd
from tests.inference_processes import InferenceProcess
from tests.pair import SLOT_BYTES, Pair, until

EXTENT_BYTES = SLOT_BYTES + 4096  # with its header
SCHEDULER = {
    "max_running": 3,
    "max_loading": 2,
    "step_tokens": 64,
    "mixed_step_tokens": 16,
    "kv_tokens": 1500,  # so a turn has room for 1,200 tokens, and two long ones fill all of it
    "answer_tokens": 4,
}
OVERFLOW = {"policy": "reject"}  # sessions start over instead: the oracle recomputes whole ones
CACHE = {"residents": False, "load_policy": "always", "save_group_tokens": 128}


@dataclass(frozen=True)
class Setting:
    """How both processes are configured in a scene.

    Attributes:
        cache, scheduler: settings that differ from those above.
        num_slots: blocks that fit into kvd's DRAM, which is lost with the process.
        num_extents: blocks that fit on its SSD.
        delay_s: added to the time of reading or writing one of them.
        num_kills: how often kvd is killed in the scene.
    """

    cache: dict[str, str | int | bool] = field(default_factory=dict)
    scheduler: dict[str, int | str] = field(default_factory=dict)
    num_slots: int = 6
    num_extents: int = 60
    delay_s: float = 0.0
    num_kills: int = 0

    def write(self, path: Path) -> list[str]:
        """Write the service's settings; return flags, which go before those of the tests."""
        cache = CACHE | self.cache
        path.write_text(
            _section("scheduler", SCHEDULER | self.scheduler)
            + _section("cache", cache)
            + _section("overflow", OVERFLOW)
        )
        residents = "--residents" if cache["residents"] else "--no-residents"
        return ["--config", str(path), "--load-policy", str(cache["load_policy"]), residents]


def _section(name: str, values: dict[str, str | int | bool]) -> str:
    return "\n".join([f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in values.items()), ""])


@asynccontextmanager
async def mixed_pair(model_dir: Path, setting: Setting) -> AsyncIterator[Pair]:
    """Run the pair of a scene, attached; kvd checks its own invariants meanwhile.

    If the scene fails, its directory with both logs stays.
    """
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    pair = Pair(model_dir, directory)
    flags = setting.write(directory / "settings.toml")
    sizes = (setting.num_slots * SLOT_BYTES, setting.num_extents * EXTENT_BYTES)
    tiers = ("--dram", str(sizes[0]), "--ssd", str(sizes[1]))
    kvd = pair.kvd = FaultyKvd(directory / "kvd", *tiers, keep="none")
    kvd.faults = {"delay_s": setting.delay_s}
    pair.service = InferenceProcess(model_dir, directory / "svc", kvd.runtime_dir, flags)
    try:
        await kvd.start()
        async with pair.service:
            await pair.until_kvd_is("attached")
            yield pair
    finally:
        exit_code = await kvd.stop()
    assert exit_code == 0, f"{kvd.log()[-2000:]}"
    assert not _errors(pair.service.log_path), f"see {pair.service.log_path}"
    shutil.rmtree(directory)


async def until_settled(pair: Pair) -> None:
    """Return when no memory is reserved, being saved or leased any more.

    Raises: AssertionError: something stays in use for good.
    """
    left: dict[str, float] = {}

    async def is_settled() -> bool:
        async with pair.service.client() as client:
            model = await client.get_model()
        gauges, tail_rows = model.gauges, model.block_tokens - 1  # rows of each resident
        used_rows = gauges["pool_token_slots"] - gauges["pool_free_token_slots"]
        kept_rows = gauges["resident_token_slots"] - gauges["shared_token_slots"]
        kept_rows += gauges["resident_sessions"] * tail_rows
        left.update({name: gauges[name] for name in ("reserved_token_slots", "saves_under_way")})
        left.update(running=model.running_turns, waiting=model.waiting_turns)
        left.update(rows=max(0, used_rows - kept_rows))
        return not any(left.values())

    try:
        await until(is_settled)
        await pair.until_kvd_is_idle()
    except TimeoutError as error:
        raise AssertionError(f"never given back: {left}, {await pair.stats()}") from error


def _errors(log_path: Path) -> list[str]:
    """Return the lines of the service's log that need somebody's attention."""
    lines = log_path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if '"level": "error"' in line or "Traceback" in line]
