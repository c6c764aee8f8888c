"""An engine and a real kvd on a device that refuses races: sessions come, share, grow and go.

The device checks all work on the streams of computing, loads and saves, thread by thread: work
that has not waited for the bytes that it reads or overwrites fails the test. Models with states,
with latents and with an index are tested as well; answers equal those of the model alone.
"""

import asyncio
import os
import traceback
from dataclasses import replace
from functools import wraps

import numpy as np
import pytest
import torch

from inference_svc import assembly
from inference_svc.assembly import Model
from inference_svc.bench import local_engine
from inference_svc.bench.local_engine import running_engine
from inference_svc.bench.workspace import workspace
from inference_svc.runtime import worker_thread
from inference_svc.runtime.attention.paged_attention import PagedAttention
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.cuda import device_arena
from inference_svc.runtime.cuda.device_arena import DeviceArena
from inference_svc.runtime.kv import kv_pool, page_pool, write_ring
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.states import SequenceStates
from inference_svc.runtime.model.model_loader import describe_model, load_model
from inference_svc.runtime.positions.rotation import LoadKernels
from tests.embed_in_one_call import embed_in_one_call
from tests.models import build_chunked_model, build_shapes_model, build_windowed_model
from tests.recorded_graph import RecordedGraphs
from tests.simulated_device import RaceError, SimulatedDevice
from tests.split_attention import attend_pages
from tests.zoo.architectures import architectures
from tests.zoo.models import build_model

CPU = torch.device("cpu")
# Saves follow the steps that compute what they save, and steps pass layers that are being loaded.
BLOCK_TOKENS = 16
BESIDE_STEPS = {"save_group_tokens": 1, "read_buffer_layers": 1}
pytestmark = [
    pytest.mark.skipif(
        os.environ.get("GPU_TESTS_DEVICE", "cpu") != "cpu", reason="it stands in for a device"
    ),
    pytest.mark.usefixtures("forked_children"),
]


@pytest.fixture(scope="module")
def model(tiny_model):
    return in_small_blocks(load_model(tiny_model, "float32", "cpu"))


def in_small_blocks(loaded):
    """Return a model whose blocks are so short that steps save full ones."""
    calibration = calibrate(loaded)
    layout = replace(calibration.layout, block_tokens=BLOCK_TOKENS)
    return Model(loaded, replace(calibration, layout=layout))


def build_tiny_model(name):
    """Build a tiny model of another kind, in which no token is padding.

    Padding is embedded as zeros, and to an index of nothing all keys are equal: on every device
    its choice depends on the number of tokens in a step.
    """
    kind = architectures()[name]
    kind = replace(kind, changed={**kind.changed, "pad_token_id": None})
    loaded = describe_model(build_model(kind), tokenizer=None, name=name, fingerprint="0" * 32)
    return in_small_blocks(loaded)


@pytest.fixture
def simulated(monkeypatch):
    """Use a simulated device instead of the CPU: for memory, streams, copies and threads."""
    device = SimulatedDevice()
    monkeypatch.setattr(device_arena, "STAGING_BYTES", 1 << 20)  # each byte has a shadow record
    monkeypatch.setattr(torch, "get_device_module", lambda _device: device)
    for module in (kv_pool, page_pool, write_ring):
        allocate = module.allocate_region
        monkeypatch.setattr(
            module,
            "allocate_region",
            lambda *args, allocate=allocate: device.own(allocate(*args)),
        )

    def open_arena(arena, layout):
        device.own(torch.frombuffer(arena.memory, dtype=torch.uint8), is_host=True)
        return DeviceArena(arena, layout, device, CPU)

    monkeypatch.setattr(assembly, "open_arena_for", lambda _device: open_arena)
    run = worker_thread.WorkerThread.run

    @wraps(run)
    async def watched(self, call, *args, **kwargs):
        def called(*args, **kwargs):
            with device.running():
                try:
                    return call(*args, **kwargs)
                except RaceError:
                    device.races.append(traceback.format_exc())
                    raise

        return await run(self, called, *args, **kwargs)

    monkeypatch.setattr(worker_thread.WorkerThread, "run", watched)
    commit, allocate = SequenceStates.commit, SequenceStates.allocate

    def committed(self, num_tokens):
        for state in self._pending.values():
            device.lend(state)
        commit(self, num_tokens)

    def lend_allocated(self):
        lent = allocate(self)
        for state in lent.values():
            device.lend(state)
        return lent

    monkeypatch.setattr(SequenceStates, "commit", committed)
    monkeypatch.setattr(SequenceStates, "allocate", lend_allocated)
    return device


class Conversation:
    """A session of the engine, with its tokens so far."""

    def __init__(self, local, name, shared=(), *, is_new=False):
        self._local = local
        self._key = local.key(name)
        self.ids = list(shared)
        self.answers = []
        self._is_new = is_new  # a prompt that it begins with is part of its first turn

    async def turn(self, num_new, num_answer, source="any", keep=True):
        """Submit new tokens behind all earlier ones."""
        prompt = [*self.ids, *self._local.new_tokens(num_new)]
        times = await self._local.turn(
            self._key,
            prompt,
            num_answer,
            source=source,
            keep_tokens=len(prompt) + num_answer - 1 if keep else 0,
            history_tokens=0 if self._is_new else len(self.ids),
        )
        self._is_new = False
        self.ids = [*prompt, *times.output_ids]
        self.answers.append((len(prompt), times.output_ids))
        return times


@pytest.mark.parametrize(
    ("working_kv", "is_replayed"),
    [
        ("pages", False),
        pytest.param("pages", True, marks=pytest.mark.long),
        pytest.param("contiguous", False, marks=pytest.mark.long),
    ],
)
async def test_no_work_races(simulated, model, tmp_path, monkeypatch, working_kv, is_replayed):
    """Turns run beside each other: computed, replayed, saved, loaded, shared, overwritten."""
    torch.set_num_threads(1)
    if working_kv == "pages":
        monkeypatch.setattr(assembly, "choose_rotation", lambda *_: LoadKernels(embed_in_one_call))
    if is_replayed:
        monkeypatch.setattr(assembly, "capture_on", lambda _device: RecordedGraphs())
        monkeypatch.setattr(assembly, "choose_attention", lambda *_: PagedAttention(attend_pages))
    chance = np.random.default_rng(3)
    with workspace(tmp_path, model) as space:
        async with (
            space.kvd(6000) as kvd,
            running_engine(
                model,
                kvd,
                kv_tokens=1500,
                cache=BESIDE_STEPS,
                scheduler={"working_kv": working_kv, "max_running": 3, "step_tokens": 64},
            ) as local,
        ):
            common = local.new_tokens(70)
            sessions = [Conversation(local, f"s{number}", common) for number in range(5)]
            for _ in range(2):
                order = chance.permutation(len(sessions))
                await asyncio.gather(
                    *(
                        sessions[number].turn(
                            int(chance.integers(5, 60)),
                            int(chance.integers(2, 12)),
                            "kvd" if chance.random() < 0.6 else "any",
                        )
                        for number in order
                    )
                )
            await local.settle()
            counted = local.parts.counters.snapshot()
    assert simulated.races == []
    assert simulated.num_batches > 0
    assert counted["load_hits"] > 0
    assert (counted["steps_replayed"] > 0) == is_replayed
    assert counted["save_errors"] == counted["load_errors"] == counted["saves_refused"] == 0


def alone(model, ids, answers):
    """Compute a session without a device, from its first token; yield each expected answer."""
    loaded, calibration = model.loaded, model.calibration
    shapes, cpu = [layer.shape for layer in calibration.layers], torch.device("cpu")
    pool = KVPool(
        shapes, len(ids) + 1, device=cpu, dtype=torch.float32, states=calibration.state_shapes
    )
    runner, kv = ModelRunner(loaded, calibration), pool.new_kv(len(ids))
    for prompt_tokens, answer in answers:
        logits = runner.step([Chunk(kv, ids[kv.num_tokens : prompt_tokens], want_logits=True)])
        made = [int(logits[0].argmax())]
        while len(made) < len(answer):
            logits = runner.step([Chunk(kv, made[-1:], want_logits=True)])
            made.append(int(logits[0].argmax()))
        yield tuple(made)


@pytest.mark.parametrize(
    ("build", "is_replayed"),
    [
        (build_shapes_model, False),
        pytest.param(build_windowed_model, False, marks=pytest.mark.long),
        pytest.param(build_chunked_model, False, marks=pytest.mark.long),
        pytest.param(build_windowed_model, True, marks=pytest.mark.long),
        pytest.param(build_shapes_model, True, marks=pytest.mark.long),
    ],
)
async def test_windows_on_pages_do_not_race(simulated, tmp_path, monkeypatch, build, is_replayed):
    """Their pages are overwritten while others load, share and save; every answer is right."""
    torch.set_num_threads(1)
    monkeypatch.setattr(assembly, "choose_rotation", lambda *_: LoadKernels(embed_in_one_call))
    if is_replayed:
        monkeypatch.setattr(assembly, "capture_on", lambda _device: RecordedGraphs())
        monkeypatch.setattr(assembly, "choose_attention", lambda *_: PagedAttention(attend_pages))
    loaded = load_model(build(tmp_path / "model"), "float32", "cpu")
    model = Model(loaded, calibrate(loaded))
    chance = np.random.default_rng(7)
    with workspace(tmp_path, model) as space:
        async with (
            space.kvd(6000) as kvd,
            running_engine(
                model,
                kvd,
                kv_tokens=2500,
                scheduler={"working_kv": "pages", "max_running": 3, "step_tokens": 32},
            ) as local,
        ):
            common = local.new_tokens(2 * model.calibration.layout.block_tokens + 10)
            sessions = [Conversation(local, f"s{n}", common, is_new=True) for n in range(3)]
            for source in ("any", "kvd"):
                await asyncio.gather(
                    *(
                        session.turn(
                            int(chance.integers(20, 60)), int(chance.integers(2, 12)), source
                        )
                        for session in sessions
                    )
                )
                await local.settle()
            counted = local.parts.counters.snapshot()
            groups = local.parts.pool.groups
    assert groups.pages.num_windowed > 0
    assert simulated.races == []
    assert counted["load_hits"] > 0
    assert counted["prefixes_shared"] > 0
    assert (counted["steps_replayed"] > 0) == is_replayed
    assert counted["save_errors"] == counted["load_errors"] == counted["saves_refused"] == 0
    for session in sessions:
        expected = list(alone(model, session.ids, session.answers))
        assert [answer for _, answer in session.answers] == expected


@pytest.mark.parametrize(
    ("name", "working_kv"),
    [
        ("qwen3_next", "pages"),
        pytest.param("deepseek_v3", "pages", marks=pytest.mark.long),
        pytest.param("mamba2", "pages", marks=pytest.mark.long),
        pytest.param("lfm2", "contiguous", marks=pytest.mark.long),
        pytest.param("deepseek_v32", "pages", marks=pytest.mark.long),
        pytest.param("qwen4_exp_text", "pages", marks=pytest.mark.long),
        pytest.param("recurrent_gemma", "pages", marks=pytest.mark.long),
        pytest.param("jamba", "contiguous", marks=pytest.mark.long),
        pytest.param("deepseek_v4", "pages", marks=pytest.mark.long),
        pytest.param("deepseek_v4", "contiguous", marks=pytest.mark.long),
    ],
)
async def test_states_and_latents_do_not_race(simulated, tmp_path, monkeypatch, name, working_kv):
    """They are saved behind steps and at the end, loaded and resident; every answer is right."""
    torch.set_num_threads(1)
    monkeypatch.setattr(assembly, "choose_rotation", lambda *_: LoadKernels(embed_in_one_call))
    request = local_engine.EngineRequest
    monkeypatch.setattr(  # as turns have states stored on their way
        local_engine,
        "EngineRequest",
        lambda **given: request(**{**given, "marks": (len(given["token_ids"]) // 2,)}),
    )
    model = build_tiny_model(name)
    has_states = bool(model.calibration.state_shapes)
    num_blocks = 400 if has_states else 100  # a state has slots of its own
    chance = np.random.default_rng(5)
    with workspace(tmp_path, model) as space:
        async with (
            space.kvd(0, dram_bytes=num_blocks * model.calibration.layout.block_bytes) as kvd,
            running_engine(
                model,
                kvd,
                kv_tokens=2000,  # room for all saves: otherwise a save may be given up
                cache=BESIDE_STEPS,
                scheduler={"working_kv": working_kv, "max_running": 3, "step_tokens": 48},
            ) as local,
        ):
            sessions = [Conversation(local, f"s{number}") for number in range(2)]
            for source in ("any", "kvd", "any"):
                await asyncio.gather(
                    *(
                        session.turn(
                            int(chance.integers(20, 60)), int(chance.integers(3, 9)), source
                        )
                        for session in sessions
                    )
                )
                await local.settle()
            counted = local.parts.counters.snapshot()
    assert simulated.races == []
    assert counted["load_hits"] > 0
    assert counted["save_errors"] == counted["load_errors"] == counted["saves_refused"] == 0
    assert (counted["stored_states"] > 0) == (counted["loaded_states"] > 0) == has_states
    for session in sessions:
        expected = list(alone(model, session.ids, session.answers))
        assert [answer for _, answer in session.answers] == expected
