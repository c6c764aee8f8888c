"""Engines that are attached: from Attach until their data connection ends."""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvd.cache import Cache
from kvd.core.engine import CacheEngine
from kvd.data_socket import Peer
from kvd.errors import NotAttachedError
from shared.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class AttachedEngine:
    """One engine process.

    Attributes:
        engine_id: random, so that an id of an earlier kvd means nothing to this one.
        since_s: of the monotonic clock.
    """

    engine_id: int
    name: str
    cache: Cache
    peer: Peer
    since_s: float


class Engines:
    """The attached engines by id."""

    def __init__(self) -> None:
        self._engines: dict[int, AttachedEngine] = {}

    def __iter__(self) -> Iterator[AttachedEngine]:
        return iter(self._engines.values())

    def attach(self, name: str, cache: Cache, peer: Peer) -> AttachedEngine:
        """Register an engine whose peer has been claimed."""
        engine = AttachedEngine(secrets.randbits(63), name, cache, peer, time.monotonic())
        peer.arena = cache.arena
        self._engines[engine.engine_id] = engine
        log.info("engine_attached", engine=name, engine_id=engine.engine_id, pid=peer.pid)
        return engine

    def of(self, engine_id: int) -> AttachedEngine:
        """Find an engine.

        Raises:
            NotAttachedError: it is not attached.
        """
        engine = self._engines.get(engine_id)
        if engine is None:
            raise NotAttachedError(f"engine {engine_id} is not attached", "attach again")
        return engine

    def gone(self, peer: Peer) -> None:
        """Release everything the peer's engine held."""
        for engine in [engine for engine in self if engine.peer is peer]:
            del self._engines[engine.engine_id]
            owner = engine.engine_id

            def release(core: CacheEngine, now_ns: int, owner: int = owner) -> None:
                core.owner_gone(owner, now_ns)

            engine.cache.act(release)
            log.info("engine_gone", engine=engine.name, engine_id=owner, pid=peer.pid)
