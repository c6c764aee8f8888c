"""Wires an engine together from settings and a calibrated model; nothing runs yet.

An engine alone is what benchmarks need; `service_assembly.py` builds the service around it.
"""

import asyncio
import sys
from dataclasses import asdict, dataclass, replace

import psutil
import torch

from inference_svc.config import CacheSettings, InferenceSettings, SchedulerSettings
from inference_svc.core.compression.policies import SnapKV
from inference_svc.core.counters import Counters
from inference_svc.core.kv_room import (
    asked_slots,
    requests_with_states,
    residents_with_states,
    slots_of_free_memory,
    states_of_requests,
    whole_pages,
    window_of,
)
from inference_svc.core.pooling import Pooling
from inference_svc.core.rates.rates import LoadPolicy, Rates
from inference_svc.core.scheduling.batch_bounds import BatchBounds, usual_bounds
from inference_svc.core.scheduling.page_groups import PLAIN
from inference_svc.core.scheduling.residents import MOST_RESIDENTS
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.core.scheduling.step_plan import SchedulerLimits
from inference_svc.core.scheduling.write_slots import write_slots_for
from inference_svc.core.truncation import USUAL_SINKS
from inference_svc.core.turn_histograms import TurnHistograms
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
from inference_svc.runtime.kv.layer_groups import HeldWindows, LayerGroups
from inference_svc.runtime.kv.layer_tensors import token_items_of
from inference_svc.runtime.kv.page_pool import make_pool
from inference_svc.runtime.kv.write_ring import WriteRing
from inference_svc.runtime.memory import keep_freed_memory
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.store.kvd_loads import CopyThreads
from inference_svc.runtime.store.kvd_session_store import KvdSessionStore
from inference_svc.runtime.store.saves import Saves
from inference_svc.runtime.store.session_store import NoSessionStore, SessionStore
from inference_svc.runtime.transfer.compaction import Compactor
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from inference_svc.runtime.worker_thread import WorkerThread
from shared.kvd_client.client import KvdClient

# How long the interpreter lets one thread run while another wants to: the compute thread wants to
# some hundred times a step, beside an event loop and copies that are in no such hurry.
SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True)
class Model:
    """A model that is ready to serve.

    Attributes:
        sink_tokens: number of first tokens of a context that it leans on, see `find_sinks`.
        pooling: how its embeddings are made; None: it makes none.
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
        window_tokens: most tokens of a turn: the model's window, or what the KV budget holds.
        window_bound: which of the two it is, for people.
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
        """Fault in the pool's memory, on a thread."""
        if self.prefaults:
            await asyncio.to_thread(self.pool.prefault)

    def close(self) -> None:
        """End the threads, each after the call it runs."""
        self.pool.close()
        for thread in self.threads:
            thread.close()


def assemble_engine(settings: InferenceSettings, model: Model) -> EngineParts:
    """Build the engine and hand each part what it needs."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    if not settings.cache.windows or settings.compression.policy != "none":
        model = replace(model, calibration=without_windows(model.calibration))
    loaded, calibration, cache = model.loaded, model.calibration, settings.cache
    counters, rates, histograms = Counters(), Rates(), TurnHistograms(settings.tenants)
    compute_thread, load_thread, store_thread = map(WorkerThread, ("compute", "load", "store"))
    # States of recurrent layers decay to numbers too small to be normal ones, for which processors
    # take up to ten times as long. On the thread that computes: those of its products take it over.
    compute_thread.begin(torch.set_flush_denormal, True).result()
    # On the same one: torch's compiler has its settings for each thread.
    compute_thread.begin(choose_compiling, settings.model.compile, loaded, calibration).result()
    bounds = batch_bounds(settings.scheduler, model)
    # For loads that kvd is still reading: one for each that there may be, so that none has to wait.
    read_threads = WorkerThread("read", bounds.num_active)
    layout, num_layers = calibration.layout, len(calibration.layers)
    copy_threads = CopyThreads(load_thread, read_threads, store_thread)
    client, store = _make_store(settings, model, copy_threads, counters, rates)
    windows, groups = _held_layers(settings, bounds, calibration, loaded.device)
    limits = _scheduler_limits(
        settings.scheduler, bounds, cache, model, saves=store.saves, windows=windows, groups=groups
    )
    scheduler = Scheduler(limits, rates, num_layers, settings.scheduler.tenant_weights)
    pool = make_pool(
        [layer.shape for layer in calibration.layers],
        scheduler.held_slots,
        num_buffer_slots=limits.most_residents * layout.block_tokens,
        device=loaded.device,
        dtype=loaded.dtype,
        states=calibration.state_shapes,
        windows=windows,
        groups=groups,
    )
    ring = WriteRing(
        [layer.shape for layer in calibration.layers],
        scheduler.write_slots,
        device=loaded.device,
        dtype=loaded.dtype,
    )
    residents = ResidentSequences(pool, layout.block_tokens)
    loads = Loads(
        pool=pool,
        ring=ring,
        store=store,
        residents=residents,
        load_thread=load_thread,
        counters=counters,
        num_layers=num_layers,
        policy=LoadPolicy(cache.load_policy),
        preload=_preload(cache),
    )
    window_tokens, window_bound = window_of(
        scheduler.slots.tokens_in(limits.kv_slots),
        limits.write_slots,
        loaded.context_window,
        settings.scheduler.kv_tokens,
    )
    attention = choose_attention(settings.model.attention, loaded, calibration, groups)
    graphs = choose_graphs(
        settings.model.graphs,
        capture_on(loaded.device),
        loaded,
        calibration,
        attention,
        StepMemory(pool, ring, limits.max_running, window_tokens),
    )
    runner = ModelRunner(loaded, calibration, attention, graphs)
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
    # A draft that is wrong would be in the state.
    draft_tokens = 0 if layout.state_bytes else settings.scheduler.draft_tokens
    drafter = Drafter(rates.decodes, most_tokens=draft_tokens, end_ids=loaded.eos_ids)
    engine = EngineLoop(
        scheduler=scheduler,
        stepper=stepper,
        loads=loads,
        saves=saves,
        residents=residents,
        compactor=Compactor(calibration, load_thread),
        pool=pool,
        ring=ring,
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
        pool=pool,
        counters=counters,
        rates=rates,
        histograms=histograms,
        window_tokens=window_tokens,
        window_bound=window_bound,
        threads=(compute_thread, load_thread, read_threads, store_thread),
        prefaults=settings.scheduler.prefault,
    )


def _make_store(
    settings: InferenceSettings,
    model: Model,
    threads: CopyThreads,
    counters: Counters,
    rates: Rates,
) -> tuple[KvdClient | None, SessionStore]:
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
        embed=choose_rotation(settings.model.rotation, model.loaded, model.calibration),
    )
    return client, store


def _preload(settings: CacheSettings) -> PreloadPolicy:
    if settings.preload == "none":
        return PreloadPolicy(is_layerwise=False, buffer_layers=0)
    fixed = settings.read_buffer_layers
    return PreloadPolicy(buffer_layers=None if fixed < 0 else fixed)


def batch_bounds(settings: SchedulerSettings, model: Model) -> BatchBounds:
    """Return the bounds of a batch: as they are set, and by the device where a setting is 0."""
    device, state_bytes = model.loaded.device, model.calibration.layout.state_bytes
    most_active = requests_with_states(_memory_of(device)[0], state_bytes) if state_bytes else None
    usual = asdict(usual_bounds(device.type, most_active))
    bounds = BatchBounds(**{key: getattr(settings, key) or bound for key, bound in usual.items()})
    mixed_step_tokens = min(bounds.mixed_step_tokens, bounds.step_tokens)
    return replace(bounds, mixed_step_tokens=mixed_step_tokens)


def _scheduler_limits(
    settings: SchedulerSettings,
    bounds: BatchBounds,
    cache: CacheSettings,
    model: Model,
    *,
    saves: bool,
    windows: HeldWindows | None,
    groups: LayerGroups | None,
) -> SchedulerLimits:
    """Choose the scheduler's bounds; without a setting, KV takes a share of the free memory.

    Raises:
        KvRoomError: there is no such memory.
    """
    free_bytes, all_bytes = _memory_of(model.loaded.device)
    layout = model.calibration.layout
    most_residents = MOST_RESIDENTS
    if layout.state_bytes:
        most_residents = residents_with_states(
            free_bytes, layout.state_bytes, bounds.num_active, most_residents
        )
        num_states = states_of_requests(bounds.num_active) + most_residents
        free_bytes -= num_states * layout.state_bytes
    token_bytes = max(1, layout.token_bytes)  # a model may have nothing but a state
    if settings.kv_tokens:
        num_slots = asked_slots(settings.kv_tokens, token_bytes, all_bytes)
    else:
        num_slots = slots_of_free_memory(free_bytes, token_bytes, saves=saves)
    write_slots = 0
    if saves:
        write_slots = settings.write_buffer_tokens or write_slots_for(
            num_slots,
            step_tokens=bounds.step_tokens,
            max_running=bounds.max_running,
            group_tokens=cache.save_group_tokens,
            block_tokens=layout.block_tokens,
        )
        write_slots = min(write_slots, num_slots // 2)
    kv_slots = num_slots - write_slots
    keeps_residents = cache.residents and cache.mode == "cached"
    most = bounds.num_active * model.loaded.context_window
    if keeps_residents:
        most *= 2  # as much again for sessions whose turns are over
    if most and not settings.kv_tokens:
        kv_slots = min(kv_slots, most)
    if groups is not None:
        if windows is not None:  # slots are of a part of a token each
            shapes = [layer.shape for layer in model.calibration.layers]
            kv_slots = kv_slots * token_items_of(shapes) // token_items_of(groups.places)
        kv_slots = whole_pages(kv_slots, groups.page_tokens, groups.pages.num_groups)
    return SchedulerLimits(
        max_running=bounds.max_running,
        max_loading=bounds.max_loading,
        max_waiting=settings.max_turns,
        kv_slots=kv_slots,
        write_slots=write_slots,
        step_tokens=bounds.step_tokens,
        mixed_step_tokens=bounds.mixed_step_tokens,
        answer_tokens=settings.answer_tokens,
        keeps_residents=keeps_residents,
        block_tokens=layout.block_tokens,
        page_tokens=None if groups is None else groups.page_tokens,
        has_states=bool(layout.state_bytes),
        most_residents=most_residents,
        attention_window=layout.window,
        held_rows=None if windows is None else windows.rows,
        page_groups=PLAIN if groups is None else groups.pages,
    )


def _page_tokens(settings: SchedulerSettings, device: torch.device) -> int | None:
    """Return the tokens of a page of working KV; None: there are none.

    A GPU reads pages where they are; a CPU reads fastest what lies side by side.
    """
    usual = "pages" if device.type == "cuda" else "contiguous"
    working_kv = usual if settings.working_kv == "auto" else settings.working_kv
    return settings.page_tokens if working_kv == "pages" else None


def _held_layers(
    settings: InferenceSettings,
    bounds: BatchBounds,
    calibration: Calibration,
    device: torch.device,
) -> tuple[HeldWindows | None, LayerGroups | None]:
    """Return what sequences hold in layers with a window, and how layers share pages.

    They hold all, None, where kernels read what lies side by side; and on pages unless layers can
    be divided into groups. The groups are None without pages.
    """
    shapes, layout = [layer.shape for layer in calibration.layers], calibration.layout
    page_tokens, step_tokens = _page_tokens(settings.scheduler, device), bounds.step_tokens
    if page_tokens is not None:  # those of a GPU's step would fill more pages than windows do
        step_tokens = min(step_tokens, max(bounds.mixed_step_tokens, layout.window))
    step_tokens = max(step_tokens, 1 + settings.scheduler.draft_tokens)
    windows = HeldWindows.of(
        layout, shapes, step_tokens=step_tokens, scored_tokens=SnapKV.window_tokens
    )
    if page_tokens is None:
        is_held = device.type == "cpu" and settings.model.rotation != "triton"
        return windows if is_held else None, None
    groups = None if windows is None else LayerGroups.of(windows, shapes, page_tokens)
    if groups is None:
        return None, LayerGroups.plain(shapes, page_tokens)
    return windows, groups


def _memory_of(device: torch.device) -> tuple[int, int]:
    """Return what is free, and all there is, in bytes."""
    if device.type == "cuda":
        free_bytes, all_bytes = torch.cuda.mem_get_info(device)
        return free_bytes, all_bytes
    memory = psutil.virtual_memory()
    return memory.available, memory.total
