"""A record of what was stored in a kvd that is killed or damaged, and checks of its promises.

After any fault each stored session is served with the right bytes, or a prefix of it is and the
miss has a reason; every copy that kvd has agrees with its checksums; after a flush nothing is left.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc

from shared.types.errors import ReportedError
from tests.kvd_polling import all_clean, eventually, reader_stats
from tests.processes import KvdProcess, run_cli
from tests.synthetic_engine import SyntheticEngine, key_of

FULL_BLOCK = 16


class Ledger:
    """The sessions that one engine has stored."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self._acknowledged: dict[str, int] = {}
        self.durable: dict[str, int] = {}  # tokens in full blocks that must not be lost any more

    async def store(self, engine: SyntheticEngine, name: str, tokens: list[int]) -> None:
        """Store a session; an earlier state of it must be a prefix."""
        self.tokens[name] = tokens
        self._acknowledged.setdefault(name, 0)
        self._acknowledged[name] = await engine.store(key_of(name), tokens)

    async def grow(self, engine: SyntheticEngine, name: str, num_tokens: int) -> None:
        """Load the stored part of a session, as an engine does before a turn, and add to it."""
        old = self.tokens.get(name, [])
        first = 1000 * (1 + int(name[1:])) + len(old)
        if old:
            await engine.load(key_of(name), old)
        await self.store(engine, name, old + list(range(first, first + num_tokens)))

    async def settle(self, kvd: KvdProcess) -> None:
        """Wait until everything is on SSD: from here on a kill alone may lose none of it."""
        await all_clean(kvd)
        self.durable = {n: num // FULL_BLOCK * FULL_BLOCK for n, num in self._acknowledged.items()}

    async def work(self, engine: SyntheticEngine, names: list[str]) -> None:
        """Grow sessions until kvd stops answering."""
        for name in names:
            with self.until_refused() as refused:
                await self.grow(engine, name, 21)
            if refused:
                return

    @contextmanager
    def until_refused(self) -> Iterator[list[Exception]]:
        """Catch the error of a kvd that has gone, or refuses."""
        refused: list[Exception] = []
        try:
            yield refused
        except (ReportedError, grpc.RpcError) as error:
            refused.append(error)

    async def judge(self, engine: SyntheticEngine, kvd: KvdProcess) -> Counter[str]:
        """Load everything; return how many sessions were served from where, cut and missed."""
        outcome: Counter[str] = Counter()
        before = await _misses(kvd)
        for name, tokens in self.tokens.items():
            load = await engine.load(key_of(name), tokens)  # compares the bytes
            promised = self._acknowledged[name]
            assert load.num_tokens >= self.durable.get(name, 0), "what was durable is served"
            if load.num_tokens >= promised:
                outcome["+".join(sorted(load.tiers)) or "not stored"] += 1
            elif load.num_tokens:
                outcome["cut"] += 1
                assert load.num_tokens % FULL_BLOCK == 0 or load.num_tokens <= promised
            else:
                outcome["missed"] += 1
                assert load.miss_reason, "a miss has a reason"
            self._acknowledged[name] = load.num_tokens
        assert await _misses(kvd) - before >= outcome["missed"], "misses are counted"
        return outcome

    def forget_missed(self) -> None:
        """Drop sessions from the record of which kvd has nothing left."""
        for name in [n for n, num in self._acknowledged.items() if not num]:
            del self.tokens[name], self._acknowledged[name]


async def everything_verifies(kvd: KvdProcess) -> None:
    """Check that every copy in both tiers agrees with its checksums."""
    code, stdout, stderr = await run_cli("verify", "--runtime-dir", str(kvd.runtime_dir))
    assert code == 0, stdout + stderr


async def nothing_leaks(kvd: KvdProcess) -> None:
    """Flush everything: then no slot, extent, lease, session or file is in use.

    Only idle engines may be attached.
    """
    flush = ("flush", "--all", "--yes", "--runtime-dir", str(kvd.runtime_dir))
    code, stdout, stderr = await run_cli(*flush)
    assert code == 0, stdout + stderr

    async def left() -> dict[str, int]:
        found: Counter[str] = Counter()
        for layout in (await reader_stats(kvd)).layouts:
            for tier in layout.tiers:
                found[f"bytes in tier {tier.tier}"] += tier.used_bytes
            found["leases"] += layout.leases
            found["quarantined slots"] += layout.quarantined_slots
            found["dirty bytes"] += layout.dirty_bytes
            found["sessions"] += layout.num_sessions
        return dict(+found)

    await eventually(left, {})
    num_layouts = sum(bool(layout.arena.arena_id) for layout in (await reader_stats(kvd)).layouts)
    arenas = [path for path in (kvd.log_path.parent / "shm").rglob("*") if path.is_file()]
    assert len(arenas) in {0, 2 * num_layouts}, "an arena is two files"
    removed = [link for link in _open_files(kvd.pid) if link.endswith("(deleted)")]
    assert not removed, "no descriptor of a removed file is kept"


def _open_files(pid: int) -> list[str]:
    """Return the targets of a process's descriptors, without memfds, which have no path."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor was closed in the meantime
            links.append(str(fd.readlink()))
    return [link for link in links if "memfd:" not in link]


async def _misses(kvd: KvdProcess) -> int:
    return sum(layout.counters["load_misses"] for layout in (await reader_stats(kvd)).layouts)


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
