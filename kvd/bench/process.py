"""A kvd of the bench's own: a real `kvd serve` in the bench's directories."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvd.bench.workspace import Workspace
from shared.children.child_kvd import ChildKvd, running_child_kvd
from shared.kvd_client.client import KvdClient
from shared.types.kv_layout import KVLayout

ATTACH_S = 60.0


@dataclass(frozen=True)
class KvdSizes:
    """What one kvd of the bench is given; everything else is as the bench's settings say."""

    dram_bytes: int
    ssd_bytes: int
    segment_bytes: int
    io_threads: int
    prefault: bool = True
    admission: str = "write_through"
    key_file: Path | None = None

    def toml(self) -> str:
        """Settings: nothing expires, nothing outlives the process but what is on SSD."""
        return f"""
[dram]
bytes = {self.dram_bytes}
prefault = {str(self.prefault).lower()}
keep = "none"
[ssd]
bytes = {self.ssd_bytes}
segment_bytes = {self.segment_bytes}
io_threads = {self.io_threads}
reserve_bytes = 0
admission = "{self.admission}"
[encryption]
key_file = "{self.key_file or ""}"
[sessions]
default_ttl = "never"
max_sessions = 10000000
[log]
level = "warning"
format = "json"
"""


@asynccontextmanager
async def running_kvd(
    work: Workspace, name: str, sizes: KvdSizes, state_dir: Path | None = None
) -> AsyncIterator[ChildKvd]:
    """A kvd that serves, killed at the end; it keeps its state in `state_dir`, or a new one."""
    directory, runtime_dir = work.state / name, work.runtime / name
    state_dir = state_dir or directory / "state"
    for path in (directory, runtime_dir, state_dir):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with running_child_kvd(sizes.toml(), directory, runtime_dir, state_dir) as kvd:
        yield kvd


@asynccontextmanager
async def attached_client(kvd: ChildKvd, layout: KVLayout) -> AsyncIterator[KvdClient]:
    """An attached client, as an engine has it, whose arena is mapped and touched."""
    client = KvdClient(kvd.runtime_dir, layout, "kvd-bench")
    running = asyncio.create_task(client.run())
    try:
        await client.wait_attached(ATTACH_S)
        yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
