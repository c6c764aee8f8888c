"""Engines whose KV moves through kvd's copier answer identically when the copier or kvd dies.

The GPU is the stand-in for CUDA's driver, in kvd's processes; the engine computes on the CPU.
"""

import asyncio
import random
from contextlib import asynccontextmanager, suppress
from functools import partial

import psutil
import pytest
import torch

from inference_svc import assembly
from inference_svc.assembly import Model
from inference_svc.bench.local_engine import running_engine
from inference_svc.bench.workspace import workspace
from inference_svc.core.counters import Counters
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.cuda import copier_link
from inference_svc.runtime.cuda.copier_arena import CopierArena
from inference_svc.runtime.cuda.copier_channel import CopierChannel
from inference_svc.runtime.cuda.copier_link import CopierLink
from inference_svc.runtime.model.model_loader import load_model
from inference_svc.runtime.positions.rotation import BY_TORCH
from shared.kvd_client.client import KvdClient
from shared.kvd_client.copy_jobs import Way
from tests.fake_cuda_path import GPUS, fake_cuda
from tests.host_driver import HostDriver

CPU = torch.device("cpu")
HISTORY, NEW, ANSWER = 300, 40, 4
PLACE_BYTES = 1 << 14  # a few blocks of one layer: a load is several jobs


@pytest.fixture(scope="module")
def model(tiny_model):
    loaded = load_model(tiny_model, "float32", "cpu")
    return Model(loaded, calibrate(loaded))


class Copied:
    """The work that an engine gives to a copier, and the copier's processes."""

    def __init__(self):
        self.counters = Counters()
        self.link = CopierLink(HostDriver(), GPUS[0], self.counters, PLACE_BYTES)
        self.jobs = dict.fromkeys(Way, 0)

    @property
    def num_lost(self):
        return self.counters.snapshot()["copiers_lost"]

    async def until_open(self):
        """Wait until all slots may be used."""
        async with asyncio.timeout(60):
            while (channel := self.link.channel) is None or not channel.has(0):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def copiers():
    """Return the pids of the live copiers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found += [process] * ("kvd.copier" in process.cmdline())
    return found


@pytest.fixture
def copied(monkeypatch):
    """Let engines copy through the copier, and give kvds GPUs."""
    made = Copied()
    for name, value in fake_cuda(copy_s=0.005).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(copier_link, "RETRY_S", 0.02)
    monkeypatch.setattr(
        assembly,
        "open_arena_for",
        lambda _device: partial(CopierArena, driver=HostDriver(), device=CPU, link=made.link),
    )
    begin = CopierChannel.begin

    def counted(channel, way, *args):
        made.jobs[way] += 1
        return begin(channel, way, *args)

    class LinkedClient(KvdClient):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.run_while_attached.append(made.link.run)

    monkeypatch.setattr(CopierChannel, "begin", counted)
    monkeypatch.setattr(assembly, "KvdClient", LinkedClient)
    # The kernel of a CPU would read kvd's memory itself.
    monkeypatch.setattr(assembly, "choose_rotation", lambda *_: BY_TORCH)
    return made


@asynccontextmanager
async def engine_of(model, directory):
    with workspace(directory, model) as space:
        async with space.kvd(6000) as kvd, running_engine(model, kvd, kv_tokens=2000) as local:
            yield kvd, local


class Conversation:
    """A session, its tokens so far, and its expected answers."""

    def __init__(self, local, name):
        self._local, self._name = local, name
        self.ids = local.new_tokens(HISTORY)
        self.reused_tokens = []

    async def turn(self):
        """Submit a turn; the answer must equal recomputation."""
        local, prompt = self._local, [*self.ids, *self._local.new_tokens(NEW)]
        said = partial(local.turn, prompt_ids=prompt, max_tokens=ANSWER)
        times = await said(
            local.key(self._name),
            source="kvd",
            keep_tokens=len(prompt) + ANSWER - 1,
            history_tokens=len(self.ids),
        )
        plain = await said(local.key(f"{self._name}-anew-{len(prompt)}"), source="none")
        assert times.output_ids == plain.output_ids
        self.reused_tokens.append(times.reused_tokens)
        self.ids = [*prompt, *times.output_ids]


@pytest.mark.long
async def test_history_is_saved_and_loaded_through_the_copier(copied, model, tmp_path):
    """Every turn but the first finds its history."""
    async with engine_of(model, tmp_path) as (_, local):
        await copied.until_open()
        sessions = [Conversation(local, f"s{number}") for number in range(3)]
        for _ in range(3):
            await asyncio.gather(*(session.turn() for session in sessions))
            await local.settle()
        assert all(min(session.reused_tokens[1:]) >= HISTORY for session in sessions)
        assert min(copied.jobs.values()) > 0
        assert copied.num_lost == 0
        counted = local.parts.counters.snapshot()
        assert counted["load_errors"] == counted["save_errors"] == 0


@pytest.mark.parametrize("num_rounds", [1, pytest.param(15, marks=pytest.mark.long)])
async def test_a_copier_may_be_killed_at_any_time(copied, model, tmp_path, num_rounds):
    """Active copies are done otherwise: no load fails, no save is lost, nothing hangs."""
    chance = random.Random(7)  # noqa: S311 - nothing is secret
    async with engine_of(model, tmp_path) as (_, local):

        async def kill_now_and_then():
            while True:
                await copied.until_open()
                await asyncio.sleep(chance.uniform(0, 0.1))
                for copier in copiers():
                    copier.kill()

        killing = asyncio.create_task(kill_now_and_then())
        for round_ in range(num_rounds):
            sessions = [Conversation(local, f"s{round_}-{number}") for number in range(3)]
            for _ in range(4):
                await asyncio.gather(*(session.turn() for session in sessions))
                await local.settle()
            assert all(min(session.reused_tokens[1:]) >= HISTORY for session in sessions)
        killing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await killing
        assert copied.num_lost > 0
        counted = local.parts.counters.snapshot()
        assert counted["load_errors"] == counted["save_errors"] == 0
        before = dict(copied.jobs)
        async with asyncio.timeout(60):  # the last one may have died without being noticed yet
            while any(copied.jobs[way] == before[way] for way in Way):
                await copied.until_open()
                await sessions[0].turn()
                await local.settle()


async def test_killing_kvd_ends_its_copier(copied, model, tmp_path):
    """The next kvd starts another copier; in the meantime answers equal recomputation."""
    async with engine_of(model, tmp_path) as (kvd, local):
        await copied.until_open()
        session = Conversation(local, "s")
        await session.turn()
        (copier,) = copiers()
        await kvd.process.kill()
        await session.turn()
        psutil.wait_procs([copier], timeout=60)
        assert not copier.is_running()
        await kvd.process.start()
        await copied.until_open()
        await session.turn()
        await local.settle()
        await session.turn()
        assert session.reused_tokens[-1] >= HISTORY
