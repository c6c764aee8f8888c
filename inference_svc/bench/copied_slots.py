"""Slots for part `copies`, by transport.

shm        memory of this process, page-locked by it
cuda_ipc   a kvd's arena; its copier copies from it and to it
"""

import asyncio
import mmap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from inference_svc.bench.workspace import Workspace
from inference_svc.core.counters import Counters
from inference_svc.runtime.cuda.arenas import open_arena_by_copier, open_arena_for
from inference_svc.runtime.cuda.copier_arena import CopierArena
from inference_svc.runtime.cuda.device_arena import DeviceArena
from inference_svc.runtime.kv.arena_kv import Arena, ArenaKv
from shared.kvd_client.attachment import Attachment
from shared.kvd_client.client import KvdClient
from shared.types.errors import UnavailableError
from shared.types.units import align_up

READY_S = 300.0  # a copier locks 5 GB a second or more, and may have to start
POLL_S = 0.01


class CopierNotReadyError(UnavailableError):
    """There is no copier to measure: slots would be copied in another way."""

    reason = "no_copier"


@dataclass(frozen=True)
class _Slots:
    """An arena in memory of this process."""

    slot_bytes: int
    num_slots: int
    memory: memoryview


@asynccontextmanager
async def slots_for(work: Workspace, transport: str, num_tokens: int) -> AsyncIterator[ArenaKv]:
    """Yield an arena for `num_tokens` tokens that is ready for a transport.

    Raises:
        CopierNotReadyError: there is no copier for this device, or it is not ready in time.
    """
    device = work.model.loaded.device
    if transport == "shm":
        arena = _own_slots(work, num_tokens)
        opened = open_arena_for(device)(arena, work.layout)
        if isinstance(opened, DeviceArena) and opened.registered is not None:
            await asyncio.to_thread(opened.registered.wait)
        yield opened
        return
    async with work.kvd(num_tokens) as kvd:
        client = KvdClient(kvd.runtime_dir, work.layout, "bench")
        open_arena = open_arena_by_copier(device, client, Counters())
        arenas: asyncio.Queue[Arena] = asyncio.Queue()

        async def note(attachment: Attachment) -> None:
            arenas.put_nowait(attachment.mapped.slots)

        client.run_while_attached.append(note)
        attached = asyncio.create_task(client.run())
        try:
            opened = open_arena(await arenas.get(), work.layout)
            if not isinstance(opened, CopierArena):
                raise _no_copier_for(device)
            await _until(lambda: opened.is_ready)
            yield opened
        finally:
            attached.cancel()
            await asyncio.gather(attached, return_exceptions=True)


def check_transport(transport: str, device: torch.device) -> None:
    """Check that `cuda_ipc` is measured on a GPU only.

    Raises:
        CopierNotReadyError: the device is none.
    """
    if transport == "cuda_ipc" and device.type != "cuda":
        raise _no_copier_for(device)


def _no_copier_for(device: torch.device) -> CopierNotReadyError:
    return CopierNotReadyError(
        f"there is no copier for {device.type}", "measure with --transport shm"
    )


def _own_slots(work: Workspace, num_tokens: int) -> _Slots:
    layout = work.layout
    num_slots = work.num_blocks(num_tokens)
    slot_bytes = align_up(layout.block_bytes, mmap.PAGESIZE)
    memory = memoryview(mmap.mmap(-1, slot_bytes * num_slots))
    torch.frombuffer(memory, dtype=torch.uint8).zero_()  # makes pages present, and avoids NaN
    return _Slots(slot_bytes, num_slots, memory)


async def _until(is_ready: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(READY_S):
            while not is_ready():  # noqa: ASYNC110  # another thread makes it ready
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise CopierNotReadyError(
            f"kvd's copier was not ready after {READY_S:.0f} s",
            "the log above may say why; see docs/gpu.md",
        ) from None
