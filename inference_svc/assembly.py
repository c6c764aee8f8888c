"""Wires the service together from settings and a calibrated model; nothing runs yet."""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from inference_svc.config import CacheSettings, InferenceSettings, SchedulerSettings
from inference_svc.core.counters import Counters
from inference_svc.core.rates.load_or_recompute import LoadPolicy
from inference_svc.core.rates.rates import Rates
from inference_svc.core.scheduling.scheduler import Scheduler, SchedulerLimits
from inference_svc.core.session_turns import SessionTurns
from inference_svc.core.submission import ModelTraits
from inference_svc.core.tenant_limits import TenantLimits
from inference_svc.core.truncation import USUAL_SINKS
from inference_svc.core.turn_measures import TurnMeasures
from inference_svc.runtime.attention.attention_backends import make_attention
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.engine.engine_loop import EngineLoop
from inference_svc.runtime.engine.job_memory import MOST_RESIDENTS
from inference_svc.runtime.engine.loads import Loads, PreloadPolicy
from inference_svc.runtime.engine.stepping import Stepper
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.memory import keep_freed_memory
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.store.kvd_loads import CopyThreads
from inference_svc.runtime.store.kvd_session_store import KvdSessionStore
from inference_svc.runtime.store.saves import Saves
from inference_svc.runtime.store.session_store import NoSessionStore, SessionStore
from inference_svc.runtime.transfer.compaction import Compactor
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from inference_svc.runtime.turns.chat_text import TurnText
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turn_prompt import PromptMaker, TurnLimits
from inference_svc.runtime.turns.turn_report import TurnReport
from inference_svc.runtime.turns.turn_runner import TurnRunner
from inference_svc.runtime.turns.turns import Turns
from inference_svc.runtime.worker_thread import WorkerThread
from inference_svc.service.gateway import Front
from inference_svc.service.servicer import InferenceService
from inference_svc.service.turn_defaults import turn_defaults
from shared.access.streams import StreamCounts
from shared.kvd_client.client import KvdClient
from shared.pb.inference.v1 import inference_pb2
from shared.version import __version__

# How long the interpreter lets one thread run while another wants to: the compute thread wants to
# some hundred times a step, beside an event loop and copies that are in no such hurry.
SWITCH_INTERVAL_S = 0.0005
KV_SHARE = 4  # the working KV may take one part in four of the memory that is free at the start
ROWS_PER_TOKEN = (
    2  # a token that is going to be saved has a row in a sequence's KV and one in a write buffer
)


@dataclass(frozen=True)
class Model:
    """A model that is ready to serve.

    Attributes:
        sink_tokens: how many first tokens of a context it leans on, see `find_sinks`.
    """

    loaded: LoadedModel
    calibration: Calibration
    sink_tokens: int = USUAL_SINKS


@dataclass(frozen=True)
class EngineParts:
    """An engine and what it stands on; usable without a server.

    Attributes:
        window_tokens: of a turn: the model's, or what the KV budget holds.
        window_bound: which of the two it is, for people.
        prefaults: whether `prefault` does anything.
    """

    engine: EngineLoop
    loads: Loads
    store: SessionStore
    client: KvdClient | None
    pool: KVPool
    counters: Counters
    rates: Rates
    measures: TurnMeasures
    window_tokens: int
    window_bound: str
    threads: tuple[WorkerThread, ...]
    prefaults: bool

    async def prefault(self) -> None:
        """Fault the pool in, beside everything else."""
        if self.prefaults:
            await asyncio.to_thread(self.pool.prefault)

    def close(self) -> None:
        """End the threads, each after the call it runs."""
        self.pool.close()
        for thread in self.threads:
            thread.close()


@dataclass(frozen=True)
class ServiceParts:
    """What the server runs."""

    engine_parts: EngineParts
    limits: TenantLimits
    transcripts: TranscriptStore
    turns: Turns
    front: Front
    service: InferenceService
    text_thread: WorkerThread

    @property
    def engine(self) -> EngineLoop:
        """The engine."""
        return self.engine_parts.engine

    @property
    def client(self) -> KvdClient | None:
        """Of kvd."""
        return self.engine_parts.client

    def close(self) -> None:
        """End the threads, each after the call it runs."""
        self.engine_parts.close()
        self.text_thread.close()


def assemble_engine(settings: InferenceSettings, model: Model) -> EngineParts:
    """Build the engine and hand each part what it needs."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    loaded, calibration, cache = model.loaded, model.calibration, settings.cache
    counters, rates, measures = Counters(), Rates(), TurnMeasures(settings.tenants)
    compute_thread, load_thread, store_thread = map(WorkerThread, ("compute", "load", "store"))
    # For loads that kvd is still reading: one for each that there may be, so that none has to wait.
    read_threads = WorkerThread(
        "read", settings.scheduler.max_loading + settings.scheduler.max_running
    )
    layout, num_layers = calibration.layout, len(calibration.layers)
    client, store = _make_store(
        cache, model, CopyThreads(load_thread, read_threads, store_thread), counters, rates
    )
    limits = _scheduler_limits(settings.scheduler, cache, model, saves=store.saves)
    pool = KVPool(
        [layer.shape for layer in calibration.layers],
        limits.kv_rows + MOST_RESIDENTS * layout.block_tokens,
        device=loaded.device,
        dtype=loaded.dtype,
    )
    residents = ResidentSequences(pool, layout.block_tokens)
    attention = make_attention(settings.model.attention, loaded.device)
    loads = Loads(
        pool,
        store,
        residents,
        load_thread,
        counters,
        num_layers=num_layers,
        policy=LoadPolicy(cache.load_policy),
        preload=_preload(cache, num_layers),
    )
    engine = EngineLoop(
        Scheduler(limits, rates, num_layers, settings.scheduler.tenant_weights),
        Stepper(
            ModelRunner(loaded, calibration, attention), compute_thread, counters, rates, measures
        ),
        loads,
        Saves(
            store,
            counters,
            block_tokens=layout.block_tokens,
            group_tokens=cache.save_group_tokens,
        ),
        residents,
        Compactor(calibration, load_thread),
        pool,
        store,
        counters,
        num_layers=num_layers,
        saves_first=cache.saving == "sync",
    )
    window_tokens, window_bound = _window(loaded, settings, limits.kv_rows, saves=store.saves)
    return EngineParts(
        engine,
        loads,
        store,
        client,
        pool,
        counters,
        rates,
        measures,
        window_tokens,
        window_bound,
        (compute_thread, load_thread, read_threads, store_thread),
        prefaults=settings.scheduler.prefault,
    )


def assemble(
    settings: InferenceSettings, model: Model, transcripts: TranscriptStore
) -> ServiceParts:
    """Build every part and hand each what it needs."""
    calibration = model.calibration
    traits = ModelTraits(calibration.mode, model.sink_tokens, calibration.positions == "decoupled")
    defaults = turn_defaults(settings, traits)
    loaded, parts = model.loaded, assemble_engine(settings, model)
    text = TurnText(loaded.tokenizer, loaded.eos_ids)
    text.try_out()
    text_thread = WorkerThread("text")
    limits = TurnLimits(
        parts.window_tokens,
        loaded.vocab_size,
        loaded.eos_ids,
        settings.overflow.reserve_tokens,
        settings.compression.min_tokens,
    )
    report = TurnReport(parts.measures)
    turn_runner = TurnRunner(
        parts.engine,
        transcripts,
        PromptMaker(text, text_thread, limits, has_tokenizer=loaded.tokenizer is not None),
        loaded.tokenizer,
        limits,
        parts.counters,
        report,
    )
    tenant_limits = TenantLimits(
        *settings.tenant_bounds(), turn_s=lambda: parts.engine.retry_after_s
    )
    turns = Turns(
        turn_runner,
        transcripts,
        parts.engine,
        SessionTurns(
            settings.scheduler.max_turns,
            settings.scheduler.max_turns_per_session,
            lambda: parts.engine.retry_after_s,
        ),
        tenant_limits,
        parts.counters,
        report,
    )
    about = _describe(model, settings, parts, text)
    front = Front(
        turns,
        loaded.fingerprint,
        _describe_now(about, parts),
        defaults,
        StreamCounts(settings.limits.max_streams_per_client),
        parts.counters,
        report,
    )
    service = InferenceService(front)
    return ServiceParts(parts, tenant_limits, transcripts, turns, front, service, text_thread)


def _make_store(
    settings: CacheSettings,
    model: Model,
    threads: CopyThreads,
    counters: Counters,
    rates: Rates,
) -> tuple[KvdClient | None, SessionStore]:
    if settings.mode == "recompute":
        return None, NoSessionStore()
    name = f"inference-svc@{model.loaded.name}"
    client = KvdClient(settings.kvd_runtime_dir, model.calibration.layout, name)
    store = KvdSessionStore(
        client,
        model.calibration,
        threads,
        counters,
        rates,
        saves=settings.saving != "off",
        deadline_s=settings.deadline_s,
    )
    return client, store


def _preload(settings: CacheSettings, num_layers: int) -> PreloadPolicy:
    if settings.preload == "none":
        return PreloadPolicy(is_layerwise=False, buffer_layers=0)
    num_buffered = settings.read_buffer_layers
    return PreloadPolicy(
        is_layerwise=True, buffer_layers=num_layers if num_buffered < 0 else num_buffered
    )


def _scheduler_limits(
    settings: SchedulerSettings, cache: CacheSettings, model: Model, *, saves: bool
) -> SchedulerLimits:
    """The scheduler's bounds; without a setting, working KV takes a share of the free memory."""
    kv_rows = settings.kv_tokens
    if not kv_rows:
        kv_rows = _free_bytes(model.loaded.device) // KV_SHARE
        kv_rows //= model.calibration.layout.token_bytes
        num_turns = settings.max_running + settings.max_loading
        most = num_turns * model.loaded.context_window * ROWS_PER_TOKEN
        kv_rows = min(kv_rows, most) if most else kv_rows
    return SchedulerLimits(
        max_running=settings.max_running,
        max_loading=settings.max_loading,
        max_waiting=settings.max_turns,
        kv_rows=max(2 * ROWS_PER_TOKEN, kv_rows),
        step_tokens=settings.step_tokens,
        mixed_step_tokens=min(settings.mixed_step_tokens, settings.step_tokens),
        answer_tokens=settings.answer_tokens,
        saves=saves,
        keeps_residents=cache.residents and cache.mode == "cached",
    )


def _window(
    loaded: LoadedModel, settings: InferenceSettings, kv_rows: int, *, saves: bool
) -> tuple[int, str]:
    """The most tokens of a turn, and what bounds them.

    What is to be saved has a second row until kvd has it: nobody expects half of kv_tokens.
    """
    most_tokens = kv_rows // (ROWS_PER_TOKEN if saves else 1)
    if 0 < loaded.context_window <= most_tokens:
        return loaded.context_window, "the model's"
    kv_tokens = settings.scheduler.kv_tokens
    room = f"scheduler.kv_tokens = {kv_tokens:,}" if kv_tokens else "the memory for KV"
    return most_tokens, f"half of {room}" if saves else room


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _describe(
    model: Model, settings: InferenceSettings, parts: EngineParts, text: TurnText
) -> inference_pb2.Model:
    """What does not change while the service runs."""
    loaded, layout = model.loaded, model.calibration.layout
    return inference_pb2.Model(
        name=loaded.name,
        fingerprint=loaded.fingerprint,
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        context_window=parts.window_tokens,
        window_bound=parts.window_bound,
        vocab_size=loaded.vocab_size,
        has_chat_template=not text.chat_problem,
        mode=settings.cache.mode,
        attention_mode=model.calibration.mode,
        positions=model.calibration.positions,
        kv_bytes_per_token=layout.token_bytes,
        block_tokens=layout.block_tokens,
        num_layers=len(layout.layers),
        version=__version__,
    )


def _describe_now(
    about: inference_pb2.Model, parts: EngineParts
) -> Callable[[], inference_pb2.Model]:
    """A call that adds what does change."""
    start_s = time.monotonic()

    def describe() -> inference_pb2.Model:
        uptime = {"uptime_s": time.monotonic() - start_s}
        now = inference_pb2.Model(
            kvd_state=parts.store.state,
            running_turns=parts.engine.num_running,
            waiting_turns=parts.engine.num_waiting,
            counters=parts.counters.snapshot(),
            gauges=uptime
            | parts.engine.gauges()
            | parts.rates.as_dict()
            | parts.measures.as_gauges(),
        )
        now.MergeFrom(about)
        return now

    return describe
