"""Serving processes are not dumpable, and their KV is excluded from allowed dumps."""

import asyncio
import mmap
import os
import resource
import sys
from pathlib import Path

import pytest
import torch

from inference_svc.client import turn_request
from inference_svc.runtime.memory import allocate_region
from kvd.tiers.direct_io import Staging
from shared.kvd_client.arena_map import ArenaMap
from shared.pb.inference.v1 import inference_pb2
from tests.inference_processes import InferenceProcess, wait_kvd_state
from tests.kvd_polling import reader_stats
from tests.processes import run_cli, running_kvd
from tests.synthetic_engine import attached_engine, key_of

GREEDY = inference_pb2.Sampling(max_tokens=8, ignore_eos=True)
FORBIDDING = """
import os, resource
from shared.process.dumps import forbid_dumps, may_be_dumped
print(may_be_dumped())
forbid_dumps()
print(may_be_dumped(), resource.getrlimit(resource.RLIMIT_CORE), bool(os.listdir("/proc/self/fd")))
"""


def _flags_at(pid: int | str, address: int) -> set[str]:
    """Return the kernel's flags of the mapping at an address: "dd" is excluded from dumps."""
    holds = False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="ascii").splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            holds = start <= address < end
        elif holds and first == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError("no such mapping")


def _flags_of_arenas(pid: int) -> list[bool]:
    """Return whether each mapping of an arena's slots is excluded from dumps."""
    found, is_arena = [], False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            is_arena = ".slots" in line
        elif is_arena and line.startswith("VmFlags:"):
            found.append("dd" in line.split())
    return found


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def test_arenas_are_excluded(tmp_path):
    """In every process that maps one: kvd and engines use the same class."""
    fd = os.memfd_create("arena")
    os.ftruncate(fd, 4 * mmap.PAGESIZE)
    arena = ArenaMap(fd, mmap.PAGESIZE, 4)
    os.close(fd)
    assert "dd" in _flags_at("self", _address(arena.memory))


@pytest.mark.parametrize("num_items", [100, 1 << 20], ids=["small", "huge pages"])
def test_kv_buffers_are_excluded(num_items):
    """The engine's working KV, in the pool and outside."""
    region = allocate_region(num_items, torch.device("cpu"), torch.float32)
    region.fill_(1.0)
    assert "dd" in _flags_at("self", region.data_ptr())


def test_staged_blocks_are_excluded():
    """Memory in which kvd packs, seals and scrubs blocks."""
    assert "dd" in _flags_at("self", _address(Staging().take(100_000)))


async def test_a_process_forbids_its_dumps():
    """Permanently, and it can still read its own files in /proc."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FORBIDDING), stdout=asyncio.subprocess.PIPE
    )
    stdout, _ = await process.communicate()
    assert stdout.decode().split("\n")[:2] == ["True", "False (0, 0) True"]


@pytest.mark.parametrize("dumps", [False, True])
async def test_kvd_is_not_dumpable_unless_configured(tmp_path, monkeypatch, dumps):
    """It serves an engine either way; where dumps are allowed the doctor says so."""
    if dumps:
        monkeypatch.setenv("KVD_PROCESS__DUMPS", "true")
    async with running_kvd(tmp_path) as kvd, attached_engine(kvd.runtime_dir) as engine:
        assert await engine.store(key_of("a"), range(40)) == 40
        assert (await engine.load(key_of("a"), range(40))).num_tokens == 40
        stats = await reader_stats(kvd)
        assert stats.process.dumps == dumps
        assert stats.engines[0].pid == os.getpid()
        assert dumps or resource.prlimit(kvd.pid, resource.RLIMIT_CORE) == (0, 0)
        _, doctor, _ = await run_cli("doctor", "--runtime-dir", str(kvd.runtime_dir))
        assert ("lets kvd write core dumps" in doctor) == dumps


async def test_a_pair_serves_undumpable(tiny_model, short_dir):
    """Arena and buffers of the service are marked too; its turns are answered."""
    async with (
        running_kvd(short_dir / "kvd", "--dram", "64MB", "--ssd", "64MB") as kvd,
        InferenceProcess(tiny_model, short_dir, kvd.runtime_dir) as service,
        service.client() as client,
    ):
        await wait_kvd_state(client, "attached")
        first = list(range(5, 305))
        await client.submit(turn_request(first, "s", sampling=GREEDY))
        turn = await client.submit(turn_request([7, 8, 9], "s", sampling=GREEDY))
        assert turn.usage.reused_tokens > 0
        for pid in (kvd.pid, service.pid):
            assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)
            assert set(_flags_of_arenas(pid)) == {True}
