"""The kvd daemon: startup → run → drain → shutdown.

One event loop is the only writer of all caches. Threads do only work that blocks: SSD reads and
writes, index commits, page allocation. A broken invariant ends the process at once, without a
drain: SSD is consistent at every moment, but DRAM may not be then.
"""

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvd.caches.caches import Caches
from kvd.caches.erasing import TenantEraser
from kvd.caches.layout_opening import VOLUMES
from kvd.caches.scrubber import Scrubber
from kvd.config import Settings
from kvd.engines.attached import Engines
from kvd.engines.copiers import Copiers
from kvd.engines.data_socket import DataSocket
from kvd.errors import BrokenError
from kvd.host.clock import META_NAME, SAVE_EVERY_S, Clock, read_boot_id, resume_clock
from kvd.host.directories import check_socket_paths, claim_directory, let_others_enter
from kvd.host.listening import listen_at
from kvd.rpc.access import Access
from kvd.rpc.grpc_servers import GrpcServer, make_local_calls, make_servers
from kvd.rpc.operator_service import OperatorService
from kvd.rpc.reader_service import ReaderService
from kvd.rpc.service import Draining, EngineService
from kvd.session_files.byte_streams import ByteStreams
from kvd.session_files.transfers import MOST_TRANSFERS, Transfers
from kvd.tiers.faults import Faults, NoFaults
from kvd.tiers.index_database import MANIFEST_NAME
from kvd.tiers.manifest import Manifest
from kvd.wire.events import EventHub
from shared.config.reload import Changes, LiveSettings
from shared.process import memory, systemd
from shared.process.log import get_logger
from shared.process.runtime_dir import DATA_SOCKET, FILES_SOCKET
from shared.serving.rpc_observer import RpcMetrics
from shared.serving.tracing import start_tracing
from shared.types.errors import ReportedError
from shared.version import __version__

STOP_GRACE_S = 0.5  # for calls still running after the drain
SWITCH_INTERVAL_S = 0.0005  # I/O threads need the GIL for microseconds only, but soon
BEAT_S = 5.0  # longest time between two checks of the disk's free space
DRAIN_POLL_S = 0.05  # longest time between two checks whether everything is written

log = get_logger(__name__)


@dataclass(frozen=True)
class _Parts:
    """The parts of a running kvd, from which its services are built."""

    caches: Caches
    engines: Engines
    copiers: Copiers
    data_socket: DataSocket
    streams: ByteStreams
    events: EventHub
    draining: Draining
    scrubber: Scrubber


class Daemon:
    """One kvd.

    Args:
        live: the settings, see systemd/kvd.toml.
        faults: faults that tests inject, see kvd/tiers/faults.py.

    Attributes:
        keeps_dram: whether arenas are left for the next kvd at the end.
    """

    def __init__(self, live: LiveSettings[Settings], faults: Faults | None = None) -> None:
        self._live = live
        self._settings = (
            live.loaded.settings
        )  # those of the start: for keys that cannot change live
        self._rpcs = RpcMetrics()
        self._access = Access(self._settings, self._rpcs)
        self._is_serving = False
        self.keeps_dram = True
        self._faults = faults or NoFaults()
        self._broken: asyncio.Future[None] | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain.

        Raises:
            ConfigError: kvd cannot start with these settings.
            BrokenError: an invariant of the core is broken.
        """
        self._broken = asyncio.get_running_loop().create_future()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        async with AsyncExitStack() as stack:
            stack.enter_context(memory.freezing_survivors())
            tracing = start_tracing(self._settings.tracing, "kvd", __version__)
            stack.push_async_callback(asyncio.to_thread, tracing.close)
            manifest, clock = self._open_state(stack)
            events = EventHub(self._settings.limits.max_watchers)
            engines = Engines(self._settings.limits.max_engines)
            caches = Caches(
                self._settings,
                manifest,
                clock,
                engines,
                self._faults,
                events.publish,
                self._record_broken,
            )
            stack.push_async_callback(self._close, caches)
            stack.callback(engines.close)
            caches.restore()
            copiers = Copiers(is_enabled=self._settings.copier.enabled)
            stack.push_async_callback(copiers.close)
            data_socket = await stack.enter_async_context(self._data_socket(engines, copiers))
            streams = await stack.enter_async_context(self._byte_streams())
            draining = Draining(self._settings.limits.drain)
            scrubber = Scrubber(self._live.loaded.settings.integrity.scrub_rate)
            parts = _Parts(
                caches, engines, copiers, data_socket, streams, events, draining, scrubber
            )
            servers = self._make_servers(parts)
            self._live.on_change.append(partial(self._apply_settings, parts))
            # HTTP before gRPC: once gRPC serves, clients may expect everything else to serve, too.
            await stack.enter_async_context(self._serve_http(parts))
            for server in servers:
                await server.start()
                stack.push_async_callback(server.stop, STOP_GRACE_S)
            self._is_serving = True
            log.info("kvd_ready", version=__version__, runtime_dir=str(self._settings.runtime_dir))
            systemd.notify(systemd.READY)
            await self._wait_until_stopped(stop, manifest, clock, caches)
            systemd.notify(systemd.STOPPING)
            draining.begun.set()
            for server in servers:
                await server.stop_serving()
            await self._drain(caches)
            manifest.put_meta(META_NAME, clock.dump(time.time_ns()))
        log.info("kvd_stopped")

    def reload(self) -> Changes[Settings]:
        """Read the settings again, and apply those that may change in a running kvd.

        Raises:
            ReloadRefusedError: the settings are not valid; nothing has changed.
        """
        systemd.notify(systemd.reloading())
        try:
            found = self._live.reload()
        except ReportedError as error:
            log.error("settings_not_reloaded", error=str(error))  # noqa: TRY400
            raise
        finally:
            systemd.notify(systemd.READY)
        log.info(
            "settings_reloaded",
            applied=list(found.applied),
            needs_restart=list(found.needs_restart),
        )
        return found

    def reload_on_signal(self) -> None:
        """Reload the settings; reload() has logged any error, and a signal has no other reply."""
        with suppress(ReportedError):
            self.reload()

    def _open_state(self, stack: AsyncExitStack) -> tuple[Manifest, Clock]:
        """Lock both directories, open the index, and continue the clock."""
        settings = self._settings
        check_socket_paths(settings.runtime_dir)
        for path, purpose in ((settings.runtime_dir, "runtime"), (settings.state_dir, "state")):
            lock_fd = claim_directory(path, purpose, f"--{purpose}-dir")
            stack.callback(os.close, lock_fd)
        if any(settings.access.groups):
            let_others_enter(settings.runtime_dir)
        manifest = Manifest(
            settings.state_dir / MANIFEST_NAME, settings.state_dir / VOLUMES, self._faults
        )
        manifest.open()
        stack.callback(manifest.close)
        clock = resume_clock(manifest.meta(META_NAME), read_boot_id(), time.time_ns())
        manifest.put_meta(META_NAME, clock.dump(time.time_ns()))
        return manifest, clock

    @asynccontextmanager
    async def _data_socket(self, engines: Engines, copiers: Copiers) -> AsyncIterator[DataSocket]:
        """Serve the data socket; leaving ends all connections, and with them all leases."""
        settings = self._settings
        data_socket = DataSocket(
            self._access.users, settings.limits.max_engines, self._rpcs.refused, copiers
        )
        path = settings.runtime_dir / DATA_SOCKET
        with listen_at(path, socket.SOCK_SEQPACKET, settings.access.engine_group) as listener:
            async with self._serving(path, data_socket.serve(listener, engines.on_connection_gone)):
                yield data_socket

    @asynccontextmanager
    async def _byte_streams(self) -> AsyncIterator[ByteStreams]:
        """Serve operators' byte streams."""
        streams = ByteStreams(MOST_TRANSFERS)
        path, group = (
            self._settings.runtime_dir / FILES_SOCKET,
            self._settings.access.operator_group,
        )
        with listen_at(path, socket.SOCK_SEQPACKET, group) as listener:
            async with self._serving(path, streams.serve(listener)):
                yield streams

    @asynccontextmanager
    async def _serving(self, path: Path, serve: Coroutine[None, None, None]) -> AsyncIterator[None]:
        """Run `serve` in a task until the context is left; then remove the socket's path."""
        serving = asyncio.create_task(serve)
        serving.add_done_callback(self._on_serving_end)
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            path.unlink(missing_ok=True)  # noqa: ASYNC240  # its directory is in memory

    def _serve_http(self, parts: _Parts) -> AbstractAsyncContextManager[None]:
        """Serve metrics and probes over HTTP until the context is left."""
        settings = self._settings
        if not settings.metrics.listen:
            return nullcontext()
        # Imported here: these imports take a second, and only a kvd with metrics needs them.
        from kvd.metrics.values import Sources, make_exporter
        from shared.serving.http_connections import ConnectionMetrics
        from shared.serving.operations_http import Operations, serve_operations

        connections = ConnectionMetrics()
        sources = Sources(
            parts.caches, parts.engines, parts.copiers, self._rpcs, self._live, connections
        )

        def not_ready() -> str:
            if parts.draining.begun.is_set():
                return "draining"
            return "" if self._is_serving else "starting"

        operations = Operations(make_exporter(sources), not_ready, self._access.book, connections)
        return serve_operations(settings.metrics, settings.tls, operations)

    def _make_servers(self, parts: _Parts) -> list[GrpcServer]:
        """Build the services, and return the gRPC servers of all addresses."""
        caches, engines, scrubber = parts.caches, parts.engines, parts.scrubber
        users = self._access.users
        engine = EngineService(
            caches, engines, parts.data_socket, self._live, parts.draining, users
        )
        calls = make_local_calls(self._settings, self._access, engine, self._rpcs)
        parts.data_socket.serve_calls = calls.serve
        eraser = TenantEraser(caches, parts.events)
        operator = OperatorService(
            caches, engines, scrubber, self.reload, eraser, Transfers(caches, parts.streams)
        )
        reader = ReaderService(caches, engines, parts.events, scrubber, self._live)
        return make_servers(self._settings, self._access, engine, operator, reader, self._rpcs)

    def _apply_settings(self, parts: _Parts, settings: Settings) -> None:
        """Pass new settings to the parts that do not read them from LiveSettings at each use."""
        limits = settings.limits
        parts.caches.apply_settings(settings)
        parts.engines.set_bound(limits.max_engines)
        self._access.replace(settings)
        parts.data_socket.set_bound(limits.max_engines)
        parts.events.set_bound(limits.max_watchers)
        parts.draining.deadline_s = limits.drain
        parts.scrubber.set_rate(settings.integrity.scrub_rate)

    async def _wait_until_stopped(
        self, stop: asyncio.Event, manifest: Manifest, clock: Clock, caches: Caches
    ) -> None:
        """Wait for `stop`; meanwhile ping the watchdog, save the clock, and check the disk.

        Raises:
            BrokenError: an invariant of the core is broken.
        """
        assert self._broken is not None, "set by run"  # noqa: S101
        stopped = asyncio.ensure_future(stop.wait())
        beat_s = min(systemd.watchdog_interval_s() or BEAT_S, BEAT_S)
        saved_at_s = -SAVE_EVERY_S
        try:
            while not stopped.done() and not self._broken.done():
                systemd.notify(systemd.WATCHDOG)
                caches.measure_space()
                caches.retry_unavailable()
                if time.monotonic() >= saved_at_s + SAVE_EVERY_S:
                    saved_at_s = time.monotonic()
                    manifest.put_meta(META_NAME, clock.dump(time.time_ns()))
                await asyncio.wait(
                    (stopped, self._broken), timeout=beat_s, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            stopped.cancel()
        if self._broken.done():
            self._broken.result()  # raises

    async def _drain(self, caches: Caches) -> None:
        """Wait until all leases have ended and all writes are durable, at most limits.drain."""
        loop = asyncio.get_running_loop()
        drain_s = self._live.loaded.settings.limits.drain
        until = loop.time() + drain_s
        log.info("kvd_draining", deadline_s=drain_s)
        for cache in caches:
            cache.write_dirty()
        while busy := [cache for cache in caches if not cache.is_idle]:
            left_s = until - loop.time()
            if left_s <= 0:
                log.warning("drain_deadline_passed", layouts=len(busy))
                return
            await busy[0].wait_for_change(min(left_s, DRAIN_POLL_S))

    async def _close(self, caches: Caches) -> None:
        await caches.close(keep_dram=self.keeps_dram)

    def _on_serving_end(self, serving: "asyncio.Task[None]") -> None:
        """Stop kvd if a socket is not served any more: a restarted kvd can be connected to."""
        if not serving.cancelled() and isinstance(error := serving.exception(), Exception):
            self._record_broken(error)

    def _record_broken(self, error: Exception) -> None:
        """Record a broken invariant, which ends run(); the first one counts."""
        log.error("invariant_broken", exc_info=error)
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(BrokenError(str(error)))
