"""Builds an engine from settings and a calibrated model; nothing runs yet.

Benchmarks need only an engine; `service_assembly.py` builds the service around it.
"""

import asyncio
import sys
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import psutil
import torch

from inference_svc.config import CacheSettings, InferenceSettings
from inference_svc.core.counters import Counters
from inference_svc.core.kv_room import window_of
from inference_svc.core.rates.rates import LoadPolicy, Rates
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.truncation import USUAL_SINKS
from inference_svc.core.turn_histograms import TurnHistograms
from inference_svc.memory_plan import DeviceMemory, MemoryPlan, batch_bounds, plan_memory
from inference_svc.runtime.calibration.attention_choice import choose_attention
from inference_svc.runtime.calibration.calibration import without_windows
from inference_svc.runtime.calibration.compile_choice import choose_compiling
from inference_svc.runtime.calibration.graph_choice import StepMemory, choose_graphs
from inference_svc.runtime.calibration.rotation_choice import choose_rotation
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.cuda.arenas import open_arena_by_copier, open_arena_for
from inference_svc.runtime.cuda.graphs import capture_on
from inference_svc.runtime.engine.drafts import Drafter
from inference_svc.runtime.engine.engine_loop import EngineLoop
from inference_svc.runtime.engine.loads import Loads, PreloadPolicy
from inference_svc.runtime.engine.stepping import Stepper
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.page_pool import make_pool
from inference_svc.runtime.kv.write_ring import WriteRing
from inference_svc.runtime.memory import keep_freed_memory
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.pooling import Pooling
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.store.kvd_loads import CopyThreads
from inference_svc.runtime.store.kvd_session_store import KvdSessionStore
from inference_svc.runtime.store.saves import Saves
from inference_svc.runtime.store.session_store import NoSessionStore, SessionStore
from inference_svc.runtime.transfer.compaction import Compactor
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from inference_svc.runtime.worker_thread import WorkerThread
from shared.kvd_client.client import KvdClient

# How long a thread may keep the GIL while another waits for it. The compute thread waits for it
# some hundred times a step; the event loop and the copy threads are less urgent.
FORWARDS_FILE = "forwards.json"  # in the state directory: compiled forwards of models
SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True)
class Model:
    """A model that is ready to serve.

    Attributes:
        loaded: the model, its tokenizer and their properties.
        calibration: the layers, rotations and layout found at load.
        sink_tokens: number of attention sinks at the beginning of a context, see `find_sinks`.
        pooling: how embeddings are pooled; None: the model makes none.
        pooling_problem: why it makes none.
    """

    loaded: LoadedModel
    calibration: Calibration
    sink_tokens: int = USUAL_SINKS
    pooling: Pooling | None = None
    pooling_problem: str = ""


@dataclass(frozen=True)
class EngineParts:
    """An engine and its parts; usable without a server.

    Attributes:
        client: the connection to kvd; None: nothing is stored.
        window_tokens: most tokens of a turn: the model's window, or what the KV budget holds.
        window_bound: which of the two it is, as shown to operators.
        threads: the threads that `close` ends.
        prefaults: whether `prefault` does anything.
    """

    engine: EngineLoop
    runner: ModelRunner
    drafter: Drafter
    loads: Loads
    store: SessionStore
    client: KvdClient | None
    pool: KVPool
    counters: Counters
    rates: Rates
    histograms: TurnHistograms
    window_tokens: int
    window_bound: str
    threads: tuple[WorkerThread, ...]
    prefaults: bool

    async def prefault(self) -> None:
        """Touch the pool's memory on a thread, so that no step waits for page faults."""
        if self.prefaults:
            await asyncio.to_thread(self.pool.prefault)

    def close(self) -> None:
        """Release the pool, and end the threads, each after the call that it runs."""
        self.pool.close()
        for thread in self.threads:
            thread.close()


def assemble_engine(settings: InferenceSettings, model: Model) -> EngineParts:
    """Build an engine for a model; its threads start, but nothing is computed for turns yet.

    Raises:
        KvRoomError: there is not enough memory for the KV that the settings name.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    if not settings.cache.windows or settings.compression.policy != "none":
        model = replace(model, calibration=without_windows(model.calibration))
    calibration, cache, device = model.calibration, settings.cache, model.loaded.device
    layout, num_layers = calibration.layout, len(calibration.layers)
    counters, rates, histograms = Counters(), Rates(), TurnHistograms(settings.tenants)
    compute_thread = _start_compute_thread()
    bounds = batch_bounds(
        settings.scheduler, device, layout.state_bytes, _memory_of(device).free_bytes
    )
    # Loads that wait for kvd's SSD have a thread each, so that none waits for another's disk reads.
    read_threads = WorkerThread("read", bounds.num_active)
    copies = CopyThreads(WorkerThread("load"), read_threads, WorkerThread("store"))
    client, store = _make_store(settings, model, copies, counters, rates)
    plan = plan_memory(
        settings, bounds, model.loaded, calibration, _memory_of(device), saves=store.saves
    )
    scheduler = Scheduler(plan.limits, rates, num_layers, settings.scheduler.tenant_weights)
    memory = _reserve_memory(settings, model, plan, scheduler)
    runner = _make_runner(settings, model, plan, memory)
    _compile_forward(settings, model, runner, compute_thread)
    loads = _make_loads(cache, memory, store, copies.load, counters, num_layers)
    stepper = Stepper(
        runner=runner,
        compute_thread=compute_thread,
        counters=counters,
        rates=rates,
        histograms=histograms,
    )
    saves = Saves(
        store, counters, block_tokens=layout.block_tokens, group_tokens=cache.save_group_tokens
    )
    # No drafts for models with a state: wrong tokens could not be taken out of it again.
    draft_tokens = 0 if layout.state_bytes else settings.scheduler.draft_tokens
    drafter = Drafter(rates.decodes, most_tokens=draft_tokens, end_ids=model.loaded.eos_ids)
    engine = EngineLoop(
        scheduler=scheduler,
        stepper=stepper,
        loads=loads,
        saves=saves,
        residents=memory.residents,
        compactor=Compactor(calibration, copies.load),
        pool=memory.pool,
        ring=memory.ring,
        store=store,
        counters=counters,
        drafter=drafter,
        num_layers=num_layers,
        saves_first=cache.saving == "sync",
    )
    return EngineParts(
        engine=engine,
        runner=runner,
        drafter=drafter,
        loads=loads,
        store=store,
        client=client,
        pool=memory.pool,
        counters=counters,
        rates=rates,
        histograms=histograms,
        window_tokens=memory.window_tokens,
        window_bound=memory.window_bound,
        threads=(compute_thread, copies.load, copies.read, copies.store),
        prefaults=settings.scheduler.prefault,
    )


def _start_compute_thread() -> WorkerThread:
    """Start the thread that computes."""
    thread = WorkerThread("compute")
    # States of recurrent layers decay to denormal numbers, with which processors are up to ten
    # times slower. The setting is the compute thread's; the threads of its matrix products inherit
    # it.
    thread.submit(torch.set_flush_denormal, True).result()
    return thread


def _make_store(
    settings: InferenceSettings,
    model: Model,
    threads: CopyThreads,
    counters: Counters,
    rates: Rates,
) -> tuple[KvdClient | None, SessionStore]:
    """Make the store of sessions' KV, and its connection to kvd if it has one."""
    cache = settings.cache
    if cache.mode == "recompute":
        return None, NoSessionStore()
    name = f"inference-svc@{model.loaded.name}"
    client = KvdClient(cache.kvd_runtime_dir, model.calibration.layout, name)
    device = model.loaded.device
    if cache.transport == "cuda_ipc" and not model.calibration.layout.state_bytes:
        open_arena = open_arena_by_copier(device, client, counters)
    else:
        open_arena = open_arena_for(device)
    store = KvdSessionStore(
        client,
        model.calibration,
        threads,
        counters,
        rates,
        saves=cache.saving != "off",
        deadline_s=cache.deadline_s,
        open_arena=open_arena,
        kernels=choose_rotation(settings.model.rotation, model.loaded, model.calibration),
    )
    return client, store


class _Memory(NamedTuple):
    """The reserved memory of KV, and the window that it allows.

    Attributes:
        pool: memory of sequences' KV.
        ring: memory of KV that waits to be stored.
        residents: sequences in the pool whose turns are over.
        window_tokens: most tokens of a turn; see `EngineParts`.
        window_bound: what bounds it; see `EngineParts`.
    """

    pool: KVPool
    ring: WriteRing
    residents: ResidentSequences
    window_tokens: int
    window_bound: str


def _reserve_memory(
    settings: InferenceSettings, model: Model, plan: MemoryPlan, scheduler: Scheduler
) -> _Memory:
    """Reserve the planned memory, in the slots that the scheduler accounts for."""
    loaded, calibration = model.loaded, model.calibration
    shapes = [layer.shape for layer in calibration.layers]
    block_tokens = calibration.layout.block_tokens
    pool = make_pool(
        shapes,
        scheduler.held_slots,
        num_buffer_slots=plan.limits.most_residents * block_tokens,
        device=loaded.device,
        dtype=loaded.dtype,
        states=calibration.state_shapes,
        windows=plan.windows,
        groups=plan.groups,
    )
    ring = WriteRing(shapes, scheduler.write_slots, device=loaded.device, dtype=loaded.dtype)
    window = window_of(
        scheduler.held_slots.tokens_in(plan.limits.kv_slots),
        plan.limits.write_slots,
        loaded.context_window,
        settings.scheduler.kv_tokens,
    )
    return _Memory(pool, ring, ResidentSequences(pool, block_tokens), *window)


def _make_runner(
    settings: InferenceSettings,
    model: Model,
    plan: MemoryPlan,
    memory: _Memory,
) -> ModelRunner:
    """Choose the attention back-end, and whether decode steps are captured; both are proven."""
    loaded, calibration = model.loaded, model.calibration
    attention = choose_attention(settings.model.attention, loaded, calibration, plan.groups)
    graphs = choose_graphs(
        settings.model.graphs,
        capture_on(loaded.device),
        loaded,
        calibration,
        attention,
        StepMemory(memory.pool, memory.ring, plan.limits.max_running, memory.window_tokens),
    )
    return ModelRunner(loaded, calibration, attention, graphs)


def _compile_forward(
    settings: InferenceSettings, model: Model, runner: ModelRunner, thread: WorkerThread
) -> None:
    """Compile the runner's forward before its first step, or load it, as the settings say.

    On the thread of its steps: torch's compiler keeps its settings per thread. The service does not
    wait for a forward to be loaded, which takes a second; if it came first, the first turn would
    wait as long.

    Raises:
        ConfigError: it cannot be compiled, but the settings request that.
    """
    name, file = settings.model.compile, settings.server.state_dir / FORWARDS_FILE

    def choose() -> None:
        runner.compiled = choose_compiling(name, model.loaded, model.calibration, file)

    chosen = thread.submit(choose)
    if name == "step":
        chosen.result()
    chosen.add_done_callback(Future.result)  # so that a defect is logged


def _make_loads(
    settings: CacheSettings,
    memory: _Memory,
    store: SessionStore,
    load_thread: WorkerThread,
    counters: Counters,
    num_layers: int,
) -> Loads:
    """Make the loads, with the preloading that the settings say."""
    preload = PreloadPolicy(is_layerwise=False, buffer_layers=0)
    if settings.preload != "none":
        fixed = settings.read_buffer_layers
        preload = PreloadPolicy(buffer_layers=None if fixed < 0 else fixed)
    return Loads(
        pool=memory.pool,
        ring=memory.ring,
        store=store,
        residents=memory.residents,
        load_thread=load_thread,
        counters=counters,
        num_layers=num_layers,
        policy=LoadPolicy(settings.load_policy),
        preload=preload,
    )


def _memory_of(device: torch.device) -> DeviceMemory:
    """Return the memory of a device as it is now."""
    if device.type == "cuda":
        return DeviceMemory(*torch.cuda.mem_get_info(device))
    memory = psutil.virtual_memory()
    return DeviceMemory(memory.available, memory.total)
