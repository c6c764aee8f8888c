"""A soak test of kvd, run by hand: random sessions over tiny tiers, with kills.

    python -m tests.soak --minutes 20 [--kill-every-s 60] [--seed 1]

Several synthetic engines store, grow, fork, load (checking every byte), discard, end, flush and pin
random sessions. kvd is killed now and then and started again. Each minute a line has RSS, open
files, threads, slots and leases of kvd, and the turns so far; at the end everything is flushed, and
anything that is still in use then is a leak. Exit code 0: no wrong byte and no leak.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from kvd.client.operator_client import connect
from shared.pb.kvd.v1 import kvd_pb2
from shared.process.log import configure_logging
from shared.types.errors import ReportedError
from tests.kvd_polling import eventually, reader_stats
from tests.processes import KvdProcess
from tests.synthetic_engine import SyntheticEngine, attached_engine, key_of, small_layout

NUM_ENGINES = 3
NUM_SESSIONS = 60
MAX_TOKENS = 400
SLOTS, EXTENTS = 40, 120
REPORT_S = 60.0


class Soak:
    """Drives one kvd with a seeded random source."""

    def __init__(self, kvd: KvdProcess, seed: int) -> None:
        self.kvd = kvd
        self.random = random.Random(seed)  # noqa: S311  # test data
        self.tokens: dict[str, list[int]] = {}
        self.busy: set[str] = set()
        self.counts: Counter[str] = Counter()

    async def drive(self, engine: SyntheticEngine, until: float) -> None:
        """Run turns until the time is over; count refusals by kvd and continue."""
        while time.monotonic() < until:
            try:
                await engine.client.wait_attached(30)
                await self.turn(engine)
            except ReportedError as error:
                self.counts[f"error_{error.reason}"] += 1
                await asyncio.sleep(0.01)

    async def turn(self, engine: SyntheticEngine) -> None:
        """Run a turn of a session that no other turn uses: load all of it, grow it, store."""
        free = [f"s{n}" for n in range(NUM_SESSIONS) if f"s{n}" not in self.busy]
        name = self.random.choice(free)
        self.busy.add(name)
        try:
            await self._turn(engine, name)
        finally:
            self.busy.discard(name)

    async def _turn(self, engine: SyntheticEngine, name: str) -> None:
        key, die = key_of(name), self.random.random()
        tokens = self.tokens.get(name, [])
        if die < 0.03 or len(tokens) > MAX_TOKENS:
            await engine.client.end_session(key)
            tokens = []
        elif die < 0.06 and self.tokens:
            tokens = list(self.random.choice(list(self.tokens.values())))  # a fork
        elif die < 0.08:
            await self.operate(name)
        loaded = await engine.load(key, tokens) if tokens else None
        num_loaded = loaded.num_tokens if loaded else 0
        self.counts["tokens_loaded"] += num_loaded
        self.counts["tokens_missed"] += len(tokens) - num_loaded
        for tier in loaded.tiers if loaded else ():
            self.counts[f"loads_{tier}"] += 1
        tokens = [
            *tokens,
            *(self.random.randrange(1000) for _ in range(self.random.randint(1, 60))),
        ]
        await engine.store(key, tokens)
        self.tokens[name] = tokens
        self.counts["turns"] += 1

    async def operate(self, name: str) -> None:
        """Do what an operator does: flush and pin random sessions."""
        what = self.random.choice(("flush", "pin", "soft_pin", "list"))
        await asyncio.to_thread(_operate, self.kvd.runtime_dir, what, name)
        self.counts[what] += 1

    async def kill(self, every_s: float, until: float) -> None:
        """Kill kvd now and then."""
        while every_s and time.monotonic() + every_s < until:
            await asyncio.sleep(every_s)
            await self.kvd.kill()
            await self.kvd.start()
            self.counts["kills"] += 1

    async def report(self, until: float) -> None:
        """Print a line every minute."""
        started = time.monotonic()
        while time.monotonic() < until:
            try:
                stats = await reader_stats(self.kvd)
            except Exception:  # noqa: BLE001  # it is being killed
                await asyncio.sleep(1)
                continue
            process = stats.process
            layout = stats.layouts[0] if stats.layouts else None
            tiers = [f"{t.num_blocks}" for t in layout.tiers] if layout else []
            print(
                f"{time.monotonic() - started:6.0f}s rss {process.rss_bytes >> 20} MiB "
                f"files {process.open_files} threads {process.threads} "
                f"blocks {'/'.join(tiers)} leases {layout.leases if layout else 0} "
                f"orphans {layout.orphan_leases if layout else 0} {dict(self.counts)}",
                flush=True,
            )
            await asyncio.sleep(min(REPORT_S, max(0.1, until - time.monotonic())))


async def soak(minutes: float, kill_every_s: float, seed: int) -> int:
    """Run the soak; return the exit code."""
    layout = small_layout(num_layers=4)
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        flags = (
            *("--dram", str(SLOTS * layout.block_bytes)),
            *("--ssd", str(EXTENTS * (layout.block_bytes + 4096))),
        )
        kvd = KvdProcess(Path(directory), flags)
        await kvd.start()
        try:
            until = time.monotonic() + 60 * minutes
            driver = Soak(kvd, seed)
            async with asyncio.TaskGroup() as group:
                for number in range(NUM_ENGINES):
                    group.create_task(_engine(driver, kvd, layout, number, until))
                group.create_task(driver.kill(kill_every_s, until))
                group.create_task(driver.report(until))
            return await _leaks(kvd)
        finally:
            await kvd.stop()


async def _engine(driver, kvd, layout, number, until):
    async with attached_engine(kvd.runtime_dir, layout, f"engine-{number}") as engine:
        await driver.drive(engine, until)


def _operate(runtime_dir: Path, what: str, name: str) -> None:
    key = kvd_pb2.SessionKey(session_id=name)
    with connect(runtime_dir) as client:
        if what == "list":
            client.sessions(kvd_pb2.SessionFilter())
        elif what == "flush":
            client.flush(kvd_pb2.FlushRequest(session=key))
        else:
            client.pin(key, soft=what == "soft_pin")
            client.unpin(key)


async def _leaks(kvd: KvdProcess) -> int:
    """Flush everything; return what is still in use."""
    with connect(kvd.runtime_dir) as client:
        await asyncio.to_thread(client.flush, None, dry_run=False)

    async def left() -> list[int]:
        stats = (await reader_stats(kvd)).layouts[0]
        used = [tier.used_bytes for tier in stats.tiers]
        return [*used, stats.leases, stats.orphan_leases, stats.dirty_bytes, stats.num_sessions]

    try:
        await eventually(left, [0, 0, 0, 0, 0, 0])
    except AssertionError as error:
        print(f"leaked: {error}")
        return 1
    print("nothing leaked, no wrong byte")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--kill-every-s", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    configure_logging("error", json=False)  # kvd is killed on purpose now and then
    sys.exit(asyncio.run(soak(arguments.minutes, arguments.kill_every_s, arguments.seed)))
