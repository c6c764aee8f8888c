"""`inference-svc serve`: load the model, open the socket, serve, drain, stop.

The order of a start: first what is cheap and may refuse it (check the model's directory, try the
ports, claim socket and transcripts), then the model and its calibration (both may refuse it), then
the service is ready. kvd may come and go at any time. torch is imported only after the cheap
checks: that takes seconds.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import uvloop

from inference_svc.config import LIVE_KEYS, InferenceSettings, ModelSettings
from inference_svc.core.errors import UnknownModelError
from inference_svc.installation import keep_kernels_in
from inference_svc.remote_settings import RemoteSettings
from inference_svc.runtime.model.model_directory import check_model
from inference_svc.runtime.turns.shared_histories import SharedHistories
from inference_svc.runtime.turns.shared_transcripts import SharedTranscripts
from inference_svc.runtime.turns.store_calls import StoreCalls
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.service.listening import GrpcServers, prepare_sockets
from shared.access.clients import ClientBook, Clients
from shared.blobs.opening import open_store
from shared.config.reload import LiveSettings
from shared.config.settings import LoadedSettings
from shared.encryption.sealer import Sealer
from shared.process import memory, systemd
from shared.process.backoff import Backoff
from shared.process.dumps import forbid_dumps
from shared.process.log import get_logger
from shared.serving.http_server import check_free
from shared.serving.tracing import start_tracing
from shared.types.errors import ConfigError
from shared.version import __version__

if TYPE_CHECKING:
    from inference_svc.assembly import Model
    from inference_svc.metrics.values import Calls
    from inference_svc.runtime.model.model_loader import LoadedModel
    from inference_svc.runtime.model.pooling import Pooling
    from inference_svc.runtime.positions.recipes import Calibration
    from inference_svc.service.lifecycle import Signals
    from inference_svc.service_assembly import ServiceParts

DIGESTS_FILE = "weights.json"  # in the state directory: digests of weights that were served before
PROOFS_FILE = "calibrations.json"  # in the state directory: proven calibrations of models
CATCH_UP_S = 5.0  # at the end, to put transcripts that are behind into the shared store
STOP_GRACE_S = 1.0  # for answers of RPCs to reach their clients

log = get_logger(__name__)


def run(
    loaded: LoadedSettings[InferenceSettings],
    read_again: Callable[[], LoadedSettings[InferenceSettings]],
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        loaded: the settings to start with.
        read_again: reads the settings again, for a reload.

    Raises:
        ConfigError: the start was refused.
    """
    settings = loaded.settings
    if settings.model.path is None:
        raise UnknownModelError("no model is given", "give a model directory with --model")
    check_model(settings.model.path)
    if not settings.process.dumps:
        forbid_dumps()
    check_free((*settings.openai.listen, *settings.metrics.listen))
    prepare_sockets(settings.server.listen)
    keep_kernels_in(settings.server.state_dir)
    transcripts = _make_transcripts(settings.server.state_dir, settings.remote)
    transcripts.open()
    tracing = start_tracing(settings.tracing, "inference-svc", __version__)
    try:
        with memory.gc_paused():  # garbage collection would take a sixth of the imports' time
            model = _load_model(settings.model, settings.model.path, settings.server.state_dir)
            _import_service()
        live = LiveSettings(loaded, read_again, LIVE_KEYS)
        uvloop.run(_serve(live, model, transcripts))
    except BaseExceptionGroup as failed:  # a task group wraps errors that refuse a start, too
        refusal = _find_refusal(failed)
        if refusal is None:
            raise
        raise refusal from failed
    finally:
        tracing.close()
        transcripts.close()


def _make_transcripts(state_dir: Path, settings: RemoteSettings) -> TranscriptStore:
    """Make the store of transcripts; the shared object store is connected at the first call.

    Raises:
        KeyFileError: a key that seals shared transcripts cannot be read.
    """
    directory = state_dir / "sessions"
    if not settings.url:
        return TranscriptStore(directory)
    backoff = Backoff(Random(), longest_s=30.0)  # noqa: S311
    store = open_store(settings.url, settings.deadline_s)
    calls = StoreCalls(store, settings.deadline_s, backoff)
    histories = SharedHistories(calls) if settings.unnamed else None
    sealer = Sealer.of_files(
        settings.key_file, settings.old_key_files, takes_plain=settings.plain == "read"
    )
    return TranscriptStore(directory, SharedTranscripts(calls, sealer), histories)


def _find_refusal(failed: BaseExceptionGroup[BaseException]) -> ConfigError | None:
    """Return the error that refused the start; None: the group has none."""
    found: BaseException | None = failed.split(ConfigError)[0]
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found if isinstance(found, ConfigError) else None


def _load_model(settings: ModelSettings, path: Path, state_dir: Path) -> "Model":
    """Load and calibrate the model; a calibration that was proven before is used again."""
    import torch

    from inference_svc.assembly import Model
    from inference_svc.runtime.calibration.remembered_proofs import calibrate_once
    from inference_svc.runtime.model.model_loader import load_model
    from inference_svc.runtime.model.packed_linear import packed_bytes, packing_of

    if settings.threads:
        torch.set_num_threads(settings.threads)
    loaded = load_model(path, settings.dtype, settings.device, state_dir / DIGESTS_FILE)
    calibration, sink_tokens, was_proven = calibrate_once(
        loaded,
        settings.positions,
        state_dir / PROOFS_FILE,
        settings.packed_weights,
    )
    log.info(
        "model_fingerprinted",
        fingerprint=loaded.fingerprint,
        hashed_bytes=loaded.hashed_bytes,
        waited_s=round(loaded.hash_wait_s, 3),
    )
    log.info(
        "model_calibrated",
        attention_mode=calibration.mode,
        positions=calibration.positions,
        packing=packing_of(loaded.model),
        packed_bytes=packed_bytes(loaded.model),
        sink_tokens=sink_tokens,
        was_proven=was_proven,
        not_taken=calibration.notes,
    )
    return Model(
        loaded, calibration, sink_tokens, *_choose_pooling(settings, path, loaded, calibration)
    )


def _import_service() -> None:
    """Import what serves the model; functions below find it imported."""
    for name in ("http_api.serving", "metrics.values", "service_assembly"):
        import_module(f"inference_svc.{name}")


def _choose_pooling(
    settings: ModelSettings, path: Path, loaded: "LoadedModel", calibration: "Calibration"
) -> tuple["Pooling | None", str]:
    """Return how the model's embeddings are pooled; or None, and why it makes none."""
    from inference_svc.runtime.calibration.proof import prove_pooling
    from inference_svc.runtime.model.pooling import UnknownPoolingError, find_pooling

    try:
        pooling = find_pooling(path, settings.pooling)
        prove_pooling(loaded, calibration, pooling)
    except UnknownPoolingError as error:
        log.info("no_embeddings", reason=str(error))
        return None, str(error)
    log.info("embeddings", pooling=str(pooling.mode), is_normalized=pooling.is_normalized)
    return pooling, ""


async def _serve(
    live: LiveSettings[InferenceSettings], model: "Model", transcripts: TranscriptStore
) -> None:
    """Assemble the service, run it until a signal stops it, and end it."""
    from inference_svc.metrics.values import Calls
    from inference_svc.service.lifecycle import Signals
    from inference_svc.service.servicer import InferenceService
    from inference_svc.service_assembly import assemble_service

    signals, settings = Signals(), live.loaded.settings
    signals.listen()
    await asyncio.to_thread(transcripts.count_sessions)
    parts = assemble_service(settings, model, transcripts)
    try:
        _log_window(settings, model, parts)
        parts.follow(live)
        book = ClientBook(Clients(settings.clients))
        live.on_change.append(lambda changed: book.use(Clients(changed.clients)))
        calls = Calls()
        servers = GrpcServers(settings, InferenceService(parts.gateway), book, calls.rpcs)
        servers.bind()
        try:
            async with asyncio.TaskGroup() as tasks:
                running: list[asyncio.Task[object]] = [
                    tasks.create_task(work) for work in _background(parts, signals, live)
                ]
                async with _serving_http(settings, parts, model, book, calls):
                    # Last: a client that finds gRPC serving can rely on HTTP serving, too.
                    await servers.start()
                    log.info("ready", listen=servers.bound, model=model.loaded.name)
                    systemd.notify(systemd.READY)
                    running.append(tasks.create_task(_prepare_turns(parts)))
                    await signals.stop.wait()
                    await _drain(live.loaded.settings.server.drain_s, parts, servers, signals)
                for task in running:
                    task.cancel()
        finally:
            await servers.stop(None)
    finally:
        parts.close()
    log.info("stopped")


async def _prepare_turns(parts: "ServiceParts") -> None:
    """Do what later turns would wait for, and what would delay READY: one after the other.

    To read the vocabulary holds the GIL for half a second. To fault memory in delays what maps
    memory, as the attachment to kvd does.
    """
    await asyncio.to_thread(parts.gateway.can_bind_calls)
    await parts.engine_parts.prefault()


def _background(
    parts: "ServiceParts", signals: "Signals", live: LiveSettings[InferenceSettings]
) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield the coroutines that run as long as the service does."""
    from inference_svc.service import lifecycle

    engine_parts = parts.engine_parts
    yield engine_parts.engine.run()
    yield parts.turns.run()
    if engine_parts.client is not None:
        yield lifecycle.keep_attached(engine_parts.client)
    yield lifecycle.share_transcripts(parts.transcripts)
    yield lifecycle.reload_on_signal(signals, live.reload)
    yield lifecycle.notify_watchdog()


@asynccontextmanager
async def _serving_http(
    settings: InferenceSettings,
    parts: "ServiceParts",
    model: "Model",
    book: ClientBook,
    calls: "Calls",
) -> AsyncIterator[None]:
    """Inside, serve metrics, health and the OpenAI-compatible API, where they have addresses."""
    from inference_svc.http_api.serving import serving_openai
    from inference_svc.metrics.values import make_exporter
    from shared.serving.http_observer import request_observer
    from shared.serving.operations_http import Operations, serve_operations

    operations = Operations(
        exporter=make_exporter(parts, calls),
        not_ready=lambda: "draining" if parts.turns.is_draining else "",
        book=book,
        connections=calls.connections,
    )
    async with (
        serve_operations(settings.metrics, settings.tls, operations),
        serving_openai(
            settings,
            parts.gateway,
            model.loaded.tokenizer,
            book,
            [request_observer(calls.http)],
            calls.connections,
        ),
    ):
        yield


async def _drain(
    drain_s: float, parts: "ServiceParts", servers: GrpcServers, signals: "Signals"
) -> None:
    """Accept no more turns, let those that run end, then stop the servers."""
    from inference_svc.service.lifecycle import drain

    systemd.notify(systemd.STOPPING)
    await servers.set_ready(is_ready=False)
    await drain(parts.turns, parts.embedder, parts.engine_parts.engine, drain_s, signals)
    with suppress(TimeoutError):
        await asyncio.wait_for(parts.transcripts.catch_up(), CATCH_UP_S)
    await servers.stop(STOP_GRACE_S)


def _log_window(settings: InferenceSettings, model: "Model", parts: "ServiceParts") -> None:
    """Log the window and what bounds it."""
    log.info(
        "window_chosen",
        window_tokens=parts.engine_parts.window_tokens,
        model_tokens=model.loaded.context_window,
        kv_tokens=settings.scheduler.kv_tokens or "from free memory",
        bound_by=parts.engine_parts.window_bound,
    )
