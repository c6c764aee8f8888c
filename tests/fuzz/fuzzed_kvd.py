"""A kvd for fuzzing, with checks of its state afterwards."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.fault.ledger import nothing_leaks
from tests.faulty_kvd import FaultyKvd
from tests.fuzz.judged_log import JudgedLog
from tests.kvd_polling import eventually
from tests.synthetic_engine import SyntheticEngine, attached_engine, key_of

SIZES = {
    "KVD_DRAM__BYTES": "256KB",
    "KVD_SSD__BYTES": "4MB",
    "KVD_SSD__RESERVE_BYTES": "0",
    "KVD_SSD__SEGMENT_BYTES": "512KB",
    "KVD_INTEGRITY__VERIFY_ON_LOAD": "false",
    "KVD_LIMITS__MAX_LAYOUTS": "40",
    "KVD_LIMITS__LOAD_WAIT": "100ms",
    "KVD_LIMITS__STORE_WAIT": "100ms",
    "KVD_LIMITS__DRAIN": "300ms",
}


class FuzzedKvd(FaultyKvd):
    """Checks its invariants all the time, and ends when one is violated."""

    def __init__(self, directory: Path, **settings: str) -> None:
        super().__init__(directory, **(SIZES | settings))
        self._judged = JudgedLog(self.log_path)

    def is_unharmed(self) -> None:
        """Check that it runs, and has logged no unexpected error."""
        assert self.is_running, self.log()[-5000:]
        self._has_no_errors()

    def errors(self) -> list[str]:
        """Return log lines that no peer must be able to cause; each is returned once."""
        return self._judged.errors()

    async def leaves_nothing(self, before: Counter[str]) -> None:
        """Check that it holds nothing after a flush, and no more open connections than before."""
        await nothing_leaks(self)
        await self.has_no_more_than(before)
        self.is_unharmed()

    def is_over_unharmed(self) -> None:
        """Check the same of one that has been stopped."""
        self._has_no_errors()

    def _has_no_errors(self) -> None:
        errors = self.errors()
        assert not errors, "\n".join(errors[:3])

    def open_fds(self) -> list[int]:
        """Return the numbers of its descriptors."""
        return [int(fd.name) for fd in Path(f"/proc/{self.pid}/fd").iterdir()]

    async def has_no_more_than(self, before: Counter[str]) -> None:
        """Wait until it has no more open connections than before: some were about to end then."""

        async def added() -> Counter[str]:
            return await self.connections() - before

        await eventually(added, Counter())

    async def connections(self) -> Counter[str]:
        """Return its descriptors that are no files, by kind: sockets, pidfds, eventfds."""
        kinds: Counter[str] = Counter()
        for fd in Path(f"/proc/{self.pid}/fd").iterdir():  # noqa: ASYNC240  # in no file system
            with suppress(FileNotFoundError):  # the descriptor was closed in the meantime
                kind, _, which = str(fd.readlink()).partition(":")
                kinds[which if kind == "anon_inode" else kind] += 1
        return Counter({kind: n for kind, n in kinds.items() if not kind.startswith("/")})


@asynccontextmanager
async def kvd_beside_an_engine(
    directory: Path, **settings: str
) -> AsyncIterator[tuple[FuzzedKvd, SyntheticEngine]]:
    """Run a kvd and an engine that stays attached; at the end nothing is left of all others."""
    kvd = FuzzedKvd(directory, **settings)
    await kvd.start()
    before = await kvd.connections()
    try:
        async with attached_engine(kvd.runtime_dir) as engine:
            yield kvd, engine
        await kvd.leaves_nothing(before)
        assert await kvd.stop() == 0, "its invariants hold"
        kvd.is_over_unharmed()
    finally:
        await kvd.kill()


async def still_serves(kvd: FuzzedKvd, engine: SyntheticEngine) -> None:
    """Check that the engine that stays is served as before."""
    tokens = list(range(40))
    assert await engine.store(key_of("stays"), tokens) == len(tokens)
    assert (await engine.load(key_of("stays"), tokens)).num_tokens == len(tokens)
    kvd.is_unharmed()
