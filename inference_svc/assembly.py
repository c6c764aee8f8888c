"""Wires the service together from settings and a calibrated model; nothing runs yet."""

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from inference_svc.config import CacheSettings, InferenceSettings, SchedulerSettings
from inference_svc.core.counters import Counters
from inference_svc.core.scheduler import Scheduler, SchedulerLimits
from inference_svc.core.session_turns import SessionTurns
from inference_svc.runtime.chat_text import TurnText
from inference_svc.runtime.engine_loop import EngineLoop
from inference_svc.runtime.model_loader import LoadedModel
from inference_svc.runtime.model_runner import ModelRunner
from inference_svc.runtime.recipes import Calibration
from inference_svc.runtime.session_store import KvdSessionStore, NoSessionStore, SessionStore
from inference_svc.runtime.stepping import Stepper
from inference_svc.runtime.transcript import TranscriptStore
from inference_svc.runtime.transfers import Transfers
from inference_svc.runtime.turn_runner import TurnLimits, TurnRunner
from inference_svc.runtime.turns import Turns
from inference_svc.runtime.worker_thread import WorkerThread
from inference_svc.service import InferenceService
from shared.kvd_client import KvdClient
from shared.pb.inference.v1 import inference_pb2
from shared.version import __version__

KV_SHARE = 4  # the working KV may take one part in four of the memory that is free at the start
SLAB_FACTOR = 2  # a slab holds keys twice (with and without position), and values


@dataclass(frozen=True)
class Model:
    """A model that is ready to serve."""

    loaded: LoadedModel
    calibration: Calibration


@dataclass(frozen=True)
class ServiceParts:
    """What the server runs."""

    engine: EngineLoop
    turns: Turns
    service: InferenceService
    client: KvdClient | None
    threads: tuple[WorkerThread, ...]

    def close(self) -> None:
        """End the threads, each after the call it runs."""
        for thread in self.threads:
            thread.close()


def assemble(
    settings: InferenceSettings, model: Model, transcripts: TranscriptStore
) -> ServiceParts:
    """Build every part and hand each what it needs."""
    loaded, counters = model.loaded, Counters()
    compute_thread, copy_thread, text_thread = map(WorkerThread, ("compute", "copy", "text"))
    runner = ModelRunner(loaded, model.calibration)
    client, store = _make_store(settings.cache, model, copy_thread, counters)
    limits = _scheduler_limits(settings.scheduler, model)
    engine = EngineLoop(
        Scheduler(limits),
        Stepper(runner, compute_thread, counters),
        Transfers(runner, store, copy_thread),
        store,
    )
    text = TurnText(loaded.tokenizer, loaded.eos_ids)
    text.try_out()
    window_tokens = min(loaded.context_window or limits.kv_tokens, limits.kv_tokens)
    turn_limits = TurnLimits(window_tokens, loaded.vocab_size, loaded.eos_ids)
    turn_runner = TurnRunner(
        engine, transcripts, text, loaded.tokenizer, text_thread, turn_limits, counters
    )
    turns = Turns(
        turn_runner,
        transcripts,
        engine,
        SessionTurns(settings.scheduler.max_turns, settings.scheduler.max_turns_per_session),
        counters,
    )
    about = _describe(model, settings.cache.mode, window_tokens, text)
    service = InferenceService(
        turns,
        loaded.fingerprint,
        _describe_now(about, engine, store, counters),
        settings.scheduler.default_max_tokens,
    )
    return ServiceParts(engine, turns, service, client, (compute_thread, copy_thread, text_thread))


def _make_store(
    settings: CacheSettings, model: Model, copy_thread: WorkerThread, counters: Counters
) -> tuple[KvdClient | None, SessionStore]:
    if settings.mode == "recompute":
        return None, NoSessionStore()
    name = f"inference-svc@{model.loaded.name}"
    client = KvdClient(settings.kvd_runtime_dir, model.calibration.layout, name)
    store = KvdSessionStore(
        client,
        model.calibration,
        copy_thread,
        counters,
        loads=settings.load_policy != "never",
        deadline_s=settings.deadline_s,
    )
    return client, store


def _scheduler_limits(settings: SchedulerSettings, model: Model) -> SchedulerLimits:
    """The scheduler's bounds; without a setting, working KV takes a share of the free memory."""
    kv_tokens = settings.kv_tokens
    if not kv_tokens:
        slab_token_bytes = model.calibration.layout.token_bytes * SLAB_FACTOR
        kv_tokens = _free_bytes(model.loaded.device) // KV_SHARE // slab_token_bytes
        most = (settings.max_running + settings.max_loading) * model.loaded.context_window
        kv_tokens = min(kv_tokens, most) if most else kv_tokens
    return SchedulerLimits(
        max_running=settings.max_running,
        max_loading=settings.max_loading,
        max_waiting=settings.max_turns,
        kv_tokens=max(2, kv_tokens),
        step_tokens=settings.step_tokens,
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _describe(model: Model, mode: str, window_tokens: int, text: TurnText) -> inference_pb2.Model:
    """What does not change while the service runs."""
    loaded, layout = model.loaded, model.calibration.layout
    return inference_pb2.Model(
        name=loaded.name,
        fingerprint=loaded.fingerprint,
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        context_window=window_tokens,
        vocab_size=loaded.vocab_size,
        has_chat_template=not text.chat_problem,
        mode=mode,
        attention_mode=model.calibration.mode,
        kv_bytes_per_token=layout.token_bytes,
        block_tokens=layout.block_tokens,
        num_layers=len(layout.layers),
        version=__version__,
    )


def _describe_now(
    about: inference_pb2.Model, engine: EngineLoop, store: SessionStore, counters: Counters
) -> Callable[[], inference_pb2.Model]:
    """A call that adds what does change."""

    def describe() -> inference_pb2.Model:
        now = inference_pb2.Model(
            kvd_state=store.state,
            running_turns=engine.num_running,
            waiting_turns=engine.num_waiting,
            counters=counters.snapshot(),
        )
        now.MergeFrom(about)
        return now

    return describe
