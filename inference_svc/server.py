"""`inference-svc serve`: load the model, open the socket, serve, drain, stop.

The order of a start: the model's directory is looked at, socket and transcripts are claimed (cheap
to refuse), then model and calibration (both may refuse), then the service is ready. kvd may come
and go at any time. torch is imported only when the start is not refused already: it takes seconds.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inference_svc.config import LIVE_KEYS, InferenceSettings, ModelSettings
from inference_svc.core.errors import UnknownModelError
from inference_svc.runtime.model.model_directory import check_model
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.service.listening import bind_servers, prepare_sockets
from shared.access.clients import ClientBook, Clients
from shared.access.identity import Identity, socket_identity
from shared.access.server_options import server_options
from shared.config.reload import LiveSettings
from shared.config.settings import LoadedSettings
from shared.kvd_client.client import KvdClient
from shared.pb.inference.v1 import inference_pb2, inference_pb2_grpc
from shared.process import systemd
from shared.process.dumps import forbid_dumps
from shared.process.log import get_logger
from shared.serving.grpc_status import ReportedErrorInterceptor
from shared.serving.interceptor import AccessInterceptor
from shared.serving.rpc_observer import RpcMetrics, RpcObserver
from shared.serving.tracing import start_tracing
from shared.types.errors import ConfigError
from shared.version import __version__

if TYPE_CHECKING:
    from inference_svc.assembly import Model, ServiceParts

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
# Beyond the turns that may wait: those that are refused, which get our own answer rather than
# gRPC's, and calls other than SubmitTurn.
SPARE_RPCS = 4096
MAX_CONNECTIONS = 4096  # a client needs one, however many turns it follows
RETRY_S = 1.0  # after kvd's client failed in a way it should not
DIGESTS_FILE = "weights.json"  # in the state directory: digests of what was served before
STOP_GRACE_S = 1.0  # for RPCs that have been answered to reach their clients

log = get_logger(__name__)


def run(
    loaded: LoadedSettings[InferenceSettings],
    read_again: Callable[[], LoadedSettings[InferenceSettings]],
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        loaded: the settings to start with.
        read_again: reads them anew, for a reload.

    Raises:
        ConfigError: the start was refused.
    """
    settings = loaded.settings
    if settings.model.path is None:
        raise UnknownModelError("no model is named", "give --model a model directory")
    check_model(settings.model.path)
    if not settings.process.dumps:
        forbid_dumps()
    prepare_sockets(settings.server.listen)
    transcripts = TranscriptStore(settings.server.state_dir / "sessions")
    transcripts.open()
    tracing = start_tracing(settings.tracing, "inference-svc", __version__)
    try:
        digests = settings.server.state_dir / DIGESTS_FILE
        model = _load(settings.model, settings.model.path, digests)
        live = LiveSettings(loaded, read_again, LIVE_KEYS)
        uvloop.run(_serve(live, model, transcripts))
    except BaseExceptionGroup as failed:  # a task group's: also of what refuses a start
        refusal = _refusal_in(failed)
        if refusal is None:
            raise
        raise refusal from failed
    finally:
        tracing.close()
        transcripts.close()


def _refusal_in(failed: BaseExceptionGroup[BaseException]) -> ConfigError | None:
    """Why the start was refused, if that is it."""
    found: BaseException | None = failed.split(ConfigError)[0]
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found if isinstance(found, ConfigError) else None


def _load(settings: ModelSettings, path: Path, digests: Path) -> "Model":
    import torch

    from inference_svc.assembly import Model
    from inference_svc.runtime.calibration.calibration import calibrate
    from inference_svc.runtime.calibration.sinks import find_sinks
    from inference_svc.runtime.model.model_loader import load_model

    if settings.threads:
        torch.set_num_threads(settings.threads)
    loaded = load_model(path, settings.dtype, settings.device, digests)
    calibration = calibrate(loaded, settings.positions)
    sink_tokens = find_sinks(loaded, calibration)
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
        sink_tokens=sink_tokens,
        not_taken=calibration.notes,
    )
    return Model(loaded, calibration, sink_tokens)


async def _serve(
    live: LiveSettings[InferenceSettings], model: "Model", transcripts: TranscriptStore
) -> None:
    from inference_svc import live_settings
    from inference_svc.assembly import assemble
    from inference_svc.metrics.values import Calls, make_exporter
    from inference_svc.openai.serving import serving_openai
    from inference_svc.service import lifecycle
    from shared.serving.http_observer import observing
    from shared.serving.operations_http import Operations, serving_operations

    signals, settings = lifecycle.Signals(), live.loaded.settings
    signals.listen()
    await asyncio.to_thread(transcripts.count_sessions)
    parts = assemble(settings, model, transcripts)
    _tell_window(settings, model, parts)
    live_settings.follow(live, parts)
    book = ClientBook(Clients(settings.clients))
    live.on_change(lambda changed: book.use(Clients(changed.clients)))
    calls = Calls()
    operations = Operations(
        make_exporter(parts, calls),
        lambda: "draining" if parts.turns.is_draining else "",
        book,
        calls.connections,
    )
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]

    def make_server(is_tcp: bool) -> grpc.aio.Server:
        own = None if is_tcp else _own(settings)
        return _make_server(settings, parts, book, calls.rpcs, health_servicer, own)

    try:
        servers = bind_servers(
            make_server,
            settings.server.listen,
            settings.tls,
            settings.server.socket_group,
            calls.rpcs.tls,
        )
    except BaseException:
        parts.close()
        raise
    try:
        async with asyncio.TaskGroup() as tasks:
            lives = [tasks.create_task(parts.engine.run()), tasks.create_task(parts.turns.run())]
            if parts.client is not None:
                lives.append(tasks.create_task(_stay_attached(parts.client)))
            lives.append(tasks.create_task(parts.engine_parts.prefault()))
            lives.append(tasks.create_task(lifecycle.reload_when_told(signals, live.reload)))
            lives.append(tasks.create_task(lifecycle.beat()))
            async with (
                serving_operations(settings.metrics, settings.tls, operations),
                serving_openai(
                    settings,
                    parts.gateway,
                    model.loaded.tokenizer,
                    book,
                    [observing(calls.http)],
                    calls.connections,
                ),
            ):
                await servers.start()  # last: who finds gRPC serving finds the rest, too
                await _set_health(health_servicer, is_ready=True)
                log.info("ready", listen=servers.bound, model=model.loaded.name)
                systemd.notify(systemd.READY)
                await signals.stop.wait()
                systemd.notify(systemd.STOPPING)
                await _set_health(health_servicer, is_ready=False)
                drain_s = live.loaded.settings.server.drain_s
                await lifecycle.drain(parts.turns, parts.engine, drain_s, signals)
                await servers.stop(STOP_GRACE_S)
            for task in lives:
                task.cancel()
    finally:
        await servers.stop(None)
        parts.close()
    log.info("stopped")


def _make_server(
    settings: InferenceSettings,
    parts: "ServiceParts",
    book: ClientBook,
    rpcs: RpcMetrics,
    health_servicer: Any,
    own: Identity | None,
) -> grpc.aio.Server:
    """A server that is not bound yet; `own` as for AccessInterceptor."""
    server = grpc.aio.server(
        interceptors=[
            RpcObserver(rpcs),
            ReportedErrorInterceptor("inference"),
            AccessInterceptor(book, {SERVICE: "client"}, own, metrics=rpcs),
        ],
        options=server_options(
            settings.server.max_message_bytes,
            MAX_CONNECTIONS,
            is_tcp=own is None,
        ),
        maximum_concurrent_rpcs=2 * settings.scheduler.max_turns + SPARE_RPCS,
    )
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    inference_pb2_grpc.add_InferenceServicer_to_server(parts.service, server)
    reflection.enable_server_reflection(
        (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    return server


def _tell_window(settings: InferenceSettings, model: "Model", parts: "ServiceParts") -> None:
    """Log the window and what bounds it."""
    log.info(
        "window_chosen",
        window_tokens=parts.engine_parts.window_tokens,
        model_tokens=model.loaded.context_window,
        kv_tokens=settings.scheduler.kv_tokens or "from free memory",
        bound_by=parts.engine_parts.window_bound,
    )


def _own(settings: InferenceSettings) -> Identity:
    """Who comes by a Unix socket."""
    return socket_identity("socket", settings.server.socket_tenants, {"client", "reader"})


# -------------------------------------------------------------------------------------------- life


async def _stay_attached(client: KvdClient) -> None:
    """Keep kvd's client running: without it turns are recomputed, which is no reason to stop."""
    while True:
        try:
            await client.run()
        except Exception:
            log.exception("kvd_client_failed")
        await asyncio.sleep(RETRY_S)


async def _set_health(servicer: Any, *, is_ready: bool) -> None:
    """Say that the event loop answers (""), and whether turns are taken (our service's name)."""
    statuses = health_pb2.HealthCheckResponse
    await servicer.set("", statuses.SERVING)
    await servicer.set(SERVICE, statuses.SERVING if is_ready else statuses.NOT_SERVING)
