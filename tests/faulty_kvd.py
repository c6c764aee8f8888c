"""kvd as a process with injected failures that checks its invariants all the time.

    python -m tests.faulty_kvd --faults JSON [--dram SIZE] [--ssd SIZE] …

The JSON object may have
    kill_at: [POINT, NTH]   SIGKILL itself when a write point is reached for the NTH time
    fail_at: [POINT, ERRNO] fail once, the first time that a write point is reached
    read_errno, write_errno: the errno with which every read (write) of an extent fails
    delay_s: additional seconds of each read and write
Other settings come from the environment, as for `kvd serve`. Exit code 0 after a SIGTERM also
means that the invariants of every cache held to the end.
"""

import argparse
import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path

from kvd import config
from kvd.caches.caches import Caches
from kvd.daemon import Daemon
from kvd.host.clock import Clock
from kvd.tiers.faults import NoFaults, WritePoint
from kvd.tiers.manifest import Manifest
from shared.children.child_process import wait_serving
from shared.config.reload import fixed_settings
from shared.process.dumps import forbid_dumps
from shared.process.log import configure_logging
from shared.process.runtime_dir import OPERATOR_SOCKET
from tests.processes import KvdProcess

# Reached only with an encryption key: see tests/fault/test_erase_kills.py.
ERASE_POINTS = (WritePoint.SLOT_WIPED, WritePoint.KEYS_DROPPED, WritePoint.WAL_TRUNCATED)
CHECK_S = 0.1  # between two checks of the invariants; the caches of tests are small


class InjectedFaults(NoFaults):
    """Fails as its plan says; see the module docstring. Any thread may call it."""

    def __init__(
        self,
        kill_at: tuple[str, int] | None = None,
        fail_at: tuple[str, int] | None = None,
        read_errno: int = 0,
        write_errno: int = 0,
        delay_s: float = 0,
    ) -> None:
        self._point = WritePoint(kill_at[0]) if kill_at else None
        self._left = kill_at[1] if kill_at else 0
        self._failing = {WritePoint(fail_at[0]): fail_at[1]} if fail_at else {}
        self._read_errno, self._write_errno = read_errno, write_errno
        self._delay_s = delay_s
        self._lock = threading.Lock()

    def before_read(self, extent: int) -> None:
        """See kvd.tiers.faults.Faults."""
        self._transfer(self._read_errno)

    def before_write(self, extent: int) -> None:
        """See kvd.tiers.faults.Faults."""
        self._transfer(self._write_errno)

    def reach(self, point: WritePoint) -> None:
        """See kvd.tiers.faults.Faults."""
        if number := self._failing.pop(point, 0):
            raise OSError(number, "injected")
        if point is not self._point:
            return
        with self._lock:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)

    def _transfer(self, number: int) -> None:
        time.sleep(self._delay_s)
        if number:
            raise OSError(number, "injected")


class CheckedDaemon(Daemon):
    """A daemon that stops as soon as an invariant does not hold."""

    async def _wait_until_stopped(
        self, stop: asyncio.Event, manifest: Manifest, clock: Clock, caches: Caches
    ) -> None:
        checking = asyncio.create_task(_check_for_ever(caches))
        try:
            await super()._wait_until_stopped(stop, manifest, clock, caches)
        finally:
            checking.cancel()
        _check(caches)


async def _check_for_ever(caches: Caches) -> None:
    while True:
        await asyncio.sleep(CHECK_S)
        _check(caches)


def _check(caches: Caches) -> None:
    for cache in caches:
        cache.act(lambda core: core.check())


class FaultyKvd(KvdProcess):
    """The process; `faults` take effect at its next start."""

    def __init__(self, directory: Path, *flags: str, keep: str = "file", **settings: str) -> None:
        super().__init__(directory, flags, keep)
        self._environment |= settings
        self.faults: dict[str, object] = {}

    @property
    def is_running(self) -> bool:
        """Return whether it has been started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def kill_it(self) -> bool:
        """Kill it; return False if it had already ended otherwise than by SIGKILL."""
        assert self._process is not None
        await self.kill()
        return self._process.returncode == -signal.SIGKILL

    async def serves_or_is_killed(self) -> bool:
        """Wait until it serves or is killed; return whether it serves."""
        serving = asyncio.ensure_future(wait_serving(f"unix:{self.runtime_dir / OPERATOR_SOCKET}"))
        ended = asyncio.ensure_future(self.exit_code())
        await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        ended.cancel()
        await asyncio.gather(serving, ended, return_exceptions=True)
        return self.is_running

    def _command(self) -> list[str]:
        return ["tests.faulty_kvd", "--faults", json.dumps(self.faults)]


async def _main(settings: config.Settings, faults: InjectedFaults) -> None:
    stop = asyncio.Event()
    daemon = CheckedDaemon(fixed_settings(settings), faults)

    def interrupt() -> None:
        daemon.keeps_dram = False
        stop.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
    await daemon.run(stop)


def main() -> None:
    """Run the daemon as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=json.loads, default={})
    names = ("runtime_dir", "state_dir", "dram.bytes", "ssd.bytes", "log.level", "log.format")
    for name in names:
        flag = "--" + name.removesuffix(".bytes").replace(".", "-").replace("_", "-")
        parser.add_argument(flag, dest=name)
    given = vars(parser.parse_args())
    faults = InjectedFaults(**given.pop("faults"))
    settings = config.load(None, given).settings
    if not settings.process.dumps:
        forbid_dumps()
    configure_logging(settings.log.level, json=True)
    asyncio.run(_main(settings, faults))


if __name__ == "__main__":
    main()
