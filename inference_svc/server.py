"""`inference-svc serve`: load the model, open the socket, serve, drain, stop.

The order of a start: socket and transcripts are claimed first (cheap to refuse), then model and
calibration (both may refuse), then the service is ready. kvd may come and go at any time. torch is
imported only when the start is not refused already: that takes seconds.
"""

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inference_svc.config import InferenceSettings, ModelSettings
from inference_svc.core.errors import UnknownModelError
from inference_svc.listening import bind, prepare_socket
from inference_svc.runtime.turns.transcript import TranscriptStore
from shared.grpc_status import ReportedErrorInterceptor
from shared.kvd_client import KvdClient
from shared.log import get_logger
from shared.pb.inference.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from inference_svc.assembly import Model, ServiceParts

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
# Beyond the turns that may wait: those that are refused, which get our own answer rather than
# gRPC's, and calls other than SubmitTurn.
SPARE_RPCS = 4096
RETRY_S = 1.0  # after kvd's client failed in a way it should not
STOP_GRACE_S = 1.0  # for RPCs that have been answered to reach their clients

log = get_logger(__name__)


def run(settings: InferenceSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: the start was refused.
    """
    prepare_socket(settings.server.listen)
    transcripts = TranscriptStore(settings.server.state_dir / "sessions")
    transcripts.open()
    try:
        if settings.model.path is None:
            raise UnknownModelError("no model is named", "give --model a model directory")
        uvloop.run(_serve(settings, _load(settings.model, settings.model.path), transcripts))
    finally:
        transcripts.close()


def _load(settings: ModelSettings, path: Path) -> "Model":
    import torch

    from inference_svc.assembly import Model
    from inference_svc.runtime.model.calibration import calibrate
    from inference_svc.runtime.model.model_loader import load_model

    if settings.threads:
        torch.set_num_threads(settings.threads)
    loaded = load_model(path, settings.dtype, settings.device)
    calibration = calibrate(loaded, settings.positions)
    log.info(
        "model_calibrated",
        attention_mode=calibration.mode,
        positions=calibration.positions,
        not_taken=calibration.notes,
    )
    return Model(loaded, calibration)


async def _serve(settings: InferenceSettings, model: "Model", transcripts: TranscriptStore) -> None:
    from inference_svc.assembly import assemble

    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
    parts = assemble(settings, model, transcripts)
    server, health_servicer = _make_server(settings, parts)
    try:
        bind(server, settings.server.listen)
        async with asyncio.TaskGroup() as tasks:
            lives = [tasks.create_task(parts.engine.run()), tasks.create_task(parts.turns.run())]
            if parts.client is not None:
                lives.append(tasks.create_task(_stay_attached(parts.client)))
            lives.append(tasks.create_task(parts.engine_parts.prefault()))
            await server.start()
            await _set_health(health_servicer, health_pb2.HealthCheckResponse.SERVING)
            log.info("ready", listen=settings.server.listen, model=model.loaded.name)
            await stopped.wait()
            log.info("draining", drain_s=settings.server.drain_s)
            await _set_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
            await _drain(parts, settings.server.drain_s)
            await server.stop(STOP_GRACE_S)
            for life in lives:
                life.cancel()
    finally:
        await server.stop(None)
        parts.close()
    log.info("stopped")


def _make_server(settings: InferenceSettings, parts: "ServiceParts") -> tuple[grpc.aio.Server, Any]:
    server = grpc.aio.server(
        interceptors=[ReportedErrorInterceptor("inference")],
        options=[
            ("grpc.so_reuseport", 0),  # a port in use must be an error, not a second service
            ("grpc.max_receive_message_length", settings.server.max_message_bytes),
            ("grpc.max_send_message_length", settings.server.max_message_bytes),
        ],
        maximum_concurrent_rpcs=2 * settings.scheduler.max_turns + SPARE_RPCS,
    )
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    inference_pb2_grpc.add_InferenceServicer_to_server(parts.service, server)
    reflection.enable_server_reflection(
        (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    return server, health_servicer


# -------------------------------------------------------------------------------------------- life


async def _stay_attached(client: KvdClient) -> None:
    """Keep kvd's client running: without it turns are recomputed, which is no reason to stop."""
    while True:
        try:
            await client.run()
        except Exception:
            log.exception("kvd_client_failed")
        await asyncio.sleep(RETRY_S)


async def _set_health(servicer: Any, status: int) -> None:
    for name in ("", SERVICE):
        await servicer.set(name, status)


async def _drain(parts: "ServiceParts", drain_s: float) -> None:
    """Let turns and then saves finish; what is left after the deadline is cancelled."""
    parts.turns.refuse_new()
    try:
        async with asyncio.timeout(drain_s):
            await parts.turns.wait_idle()
            await parts.engine.wait_idle()
    except TimeoutError:
        parts.turns.cancel_all()
        log.warning("drain_deadline_passed")
