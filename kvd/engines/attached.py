"""Engines that are attached, and those that hold slots without being attached (D10).

What may happen to them is the table ENGINE_MOVES; kvd/README.md has its drawing. When an engine is
gone all its leases end, but for those that its new attachment takes over.

There is no timeout: as long as a process lives that may be writing into a slot, nobody else gets
that slot. Operators see such processes with `kvd leases`, and may kill them.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from kvd.core.records.entries import OrphanSlot, WritingSlot
from kvd.engines.copiers import OpenChannel
from kvd.engines.data_socket import DataConnection
from kvd.errors import LimitReachedError, NotAttachedError
from kvd.host.process_identity import (
    INSTANCE_BYTES,
    NOBODY,
    ProcessIdentity,
    ProcessWatch,
    process_name,
    process_state,
    watch_identity,
)
from kvd.runtime.cache import Cache
from kvd.tiers.journal import JournaledWrite
from shared.kvd_client.messages import shown_id
from shared.process.log import get_logger
from shared.types.errors import InvalidInputError
from shared.types.transitions import Transitions

log = get_logger(__name__)


class EngineState(Enum):
    """What an engine is to kvd."""

    ATTACHED = "attached"
    QUARANTINED = "quarantined"
    GONE = "gone"


# What may happen to an engine in each state, and the state that follows. It begins attached; a
# writer of an earlier kvd begins quarantined.
ENGINE_MOVES = Transitions(
    {
        EngineState.ATTACHED: {
            "ended": EngineState.GONE,  # its process is dead, or has said that it leaves
            "disconnected": EngineState.GONE,  # and nothing is under way
            "disconnected_storing": EngineState.QUARANTINED,
            "disconnected_copying": EngineState.QUARANTINED,  # it is dead, and its copier is not
        },
        EngineState.QUARANTINED: {
            "ended": EngineState.GONE,  # its process is dead, and its copier's work is done
            # By the same process and instance: the stores that it still has under way are the new
            # attachment's.
            "reattached": EngineState.GONE,
            "kvd_stops": EngineState.GONE,  # the next kvd finds it in the journal
        },
        EngineState.GONE: {},
    }
)


@dataclass(eq=False)
class Engine:
    """One attachment of an engine process, or what is left of it.

    Attributes:
        engine_id: random, so that an id of an earlier kvd means nothing to this one; its leases
            have it too.
        uid: of its user; -1 if an earlier kvd has attached it.
        connection: its data connection, while it is attached.
        watch: of its process, while it is quarantined; before, the connection has it.
        channels: to copiers, once the connection is gone.
        version: its release; "" if it did not say.
        since_s: of the monotonic clock: when its state began.
    """

    engine_id: int
    name: str
    cache: Cache
    identity: ProcessIdentity
    uid: int = -1
    connection: DataConnection | None = None
    watch: ProcessWatch | None = None
    channels: Sequence[OpenChannel] = ()
    version: str = ""
    state: EngineState = EngineState.ATTACHED
    since_s: float = field(default_factory=time.monotonic)

    @property
    def shown_id(self) -> int:
        """Its id for logs and readers: who knows the other one can act as this engine."""
        return shown_id(self.engine_id)

    def move(self, event: str) -> None:
        """Change the state; AssertionError if that cannot happen in the one that it has."""
        self.state, self.since_s = ENGINE_MOVES.after(self.state, event), time.monotonic()


@dataclass(frozen=True)
class EngineInfo:
    """An engine that may hold leases, for people.

    Attributes:
        pid: 0 if it is in a foreign PID namespace.
        process_status: "sleeping", "stopped", …; "" if it is not visible.
    """

    engine_id: int
    name: str
    pid: int
    process_status: str
    is_quarantined: bool


class Engines:
    """The engines that are not gone, by id; iterating yields those that are attached.

    Args:
        max_engines: bound on all of them: each attached engine may be quarantined.
    """

    def __init__(self, max_engines: int) -> None:
        self._max_engines = max_engines
        self._engines: dict[int, Engine] = {}

    def set_bound(self, max_engines: int) -> None:
        """Let no more than so many attach from now on; those that are there stay."""
        self._max_engines = max_engines

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._in(EngineState.ATTACHED))

    # -------------------------------------------------------------------------- attach and end

    def attach(
        self,
        name: str,
        cache: Cache,
        connection: DataConnection,
        instance: str,
        held: Sequence[int],
        *,
        version: str = "",
    ) -> tuple[Engine, list[int], list[int]]:
        """Register an engine whose connection has been claimed.

        Args:
            name: for people.
            cache: of its layout; its arena exists.
            connection: of its process.
            instance: random hex, the same at each attach of one client object.
            held: leases of earlier attachments whose slots it may still be writing to.
            version: its release, for people.

        Returns:
            The engine, which of `held` are its own again, and which it has lost.

        Raises:
            InvalidInputError: the instance is not one.
            LimitReachedError: too many engines, quarantined ones included.
        """
        start_ticks = 0 if connection.watch is None else connection.watch.start_ticks
        identity = ProcessIdentity(connection.pid, start_ticks, _instance(instance))
        for older in self._of_client(identity, EngineState.ATTACHED):
            assert older.connection is not None, "attached"  # noqa: S101
            older.connection.gone.set()  # one client has one attachment: the older one is over
            self.gone(older.connection)
        quarantined = self._of_client(identity, EngineState.QUARANTINED)
        returning = [engine for engine in quarantined if engine.cache is cache]
        if not returning and len(self._engines) >= self._max_engines:
            num_attached = len(list(self))
            raise LimitReachedError(
                f"{num_attached} engines are attached, "
                f"{len(self._engines) - num_attached} quarantined",
                "raise limits.max_engines, or see: kvd leases",
            )
        engine_id = secrets.randbits(63)
        engine = Engine(
            engine_id, name, cache, identity, connection.uid, connection, version=version
        )
        connection.arena = cache.arena
        self._engines[engine_id] = engine
        confirmed: list[int] = []
        for earlier in returning:
            self._forget(earlier, "reattached")
            confirmed.extend(_reattached(cache, earlier.engine_id, engine_id, held))
        lost = [lease_id for lease_id in held if lease_id not in confirmed]
        log.info(
            "engine_attached",
            engine=name,
            engine_id=engine.shown_id,
            pid=connection.pid,
            confirmed=len(confirmed),
            lost=len(lost),
        )
        return engine, confirmed, lost

    def of(self, engine_id: int) -> Engine:
        """Find an attached engine.

        Raises:
            NotAttachedError: it is not attached.
        """
        engine = self._engines.get(engine_id)
        if engine is None or engine.state is not EngineState.ATTACHED:
            raise NotAttachedError(f"engine {engine_id} is not attached", "attach again")
        return engine

    def gone(self, connection: DataConnection) -> None:
        """Record the end of a connection: release what its engine held, or quarantine it."""
        for engine in [engine for engine in self if engine.connection is connection]:
            engine.connection, engine.channels = None, connection.channels
            if not connection.may_still_write:
                self._end(engine)
            elif _detached(engine):
                engine.watch, connection.watch = connection.watch, None  # outlives the connection
                engine.move("disconnected_storing")
                self._quarantine(engine)
            else:
                self._forget(engine, "disconnected")
                log.info("engine_detached", engine=engine.name, engine_id=engine.shown_id)

    def watch_orphans(self, cache: Cache, writing: Sequence[JournaledWrite]) -> list[OrphanSlot]:
        """Watch the processes that an earlier kvd has let write, as far as they live.

        Args:
            cache: whose arena they write to.
            writing: as its journal says; slots that are not among the result are free, and their
                records are cleared.
        """
        engine_ids: dict[ProcessIdentity, int] = {}
        orphans = []
        for write in writing:
            if write.writer not in engine_ids:
                engine_ids[write.writer] = self._watch_writer(cache, write.writer)
            engine_id = engine_ids[write.writer]
            if engine_id:
                record = WritingSlot(write.generation, write.lease_id, engine_id)
                orphans.append(OrphanSlot(write.slot_id, record))
            elif cache.arena is not None:
                cache.arena.journal.clear(write.slot_id)
        return orphans

    # ------------------------------------------------------------------------------- questions

    def use(self, cache: Cache) -> bool:
        """Whether an engine is attached to a cache, or a quarantined one may write to it."""
        return any(engine.cache is cache for engine in self._engines.values())

    def identity_of(self, engine_id: int) -> ProcessIdentity:
        """Return which process an engine is, for the journal."""
        engine = self._engines.get(engine_id)
        return NOBODY if engine is None else engine.identity

    def wake_of(self, engine_id: int) -> Callable[[], None]:
        """Return what to call when a progress word of an engine has changed; any thread may."""
        engine = self._engines.get(engine_id)
        connection = None if engine is None else engine.connection
        return _nothing if connection is None else connection.wakeup.wake

    def infos(self) -> list[EngineInfo]:
        """Return all engines that may hold leases, the attached ones first."""
        return [
            EngineInfo(
                engine.engine_id,
                engine.name,
                engine.identity.pid,
                process_state(engine.identity.pid) if engine.identity.pid else "",
                engine.state is EngineState.QUARANTINED,
            )
            for state in (EngineState.ATTACHED, EngineState.QUARANTINED)
            for engine in self._in(state)
        ]

    def kill(self, pid: int) -> bool:
        """Send SIGKILL to an engine's process, attached or not; False if there is none."""
        for engine in self._engines.values():
            watch = engine.watch if engine.connection is None else engine.connection.watch
            if engine.identity.pid == pid and watch is not None and watch.kill():
                log.warning("holder_killed", pid=pid)
                return True
        return False

    def close(self) -> None:
        """Stop watching those that are quarantined. On the event loop."""
        for engine in self._in(EngineState.QUARANTINED):
            self._forget(engine, "kvd_stops")

    # ---------------------------------------------------------------------------------- inside

    def _in(self, state: EngineState) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.state is state]

    def _of_client(self, identity: ProcessIdentity, state: EngineState) -> list[Engine]:
        """Engines of one client object; none of one that does not say which it is."""
        found = [engine for engine in self._in(state) if engine.identity == identity]
        return found if identity.instance else []

    def _watch_writer(self, cache: Cache, identity: ProcessIdentity) -> int:
        """Quarantine a living process; return the id that it has here, 0 if it does not live."""
        watch = watch_identity(identity)
        if watch is None:
            return 0
        engine_id = secrets.randbits(63) | 1  # not 0
        engine = Engine(
            engine_id,
            process_name(identity.pid),
            cache,
            identity,
            watch=watch,
            state=EngineState.QUARANTINED,
        )
        self._engines[engine_id] = engine
        self._quarantine(engine)
        return engine_id

    def _quarantine(self, engine: Engine) -> None:
        """Wait for the end of an engine's process."""
        assert engine.watch is not None, "may_still_write"  # noqa: S101
        engine.watch.start(partial(self._end, engine))
        log.warning(
            "engine_quarantined",
            engine=engine.name,
            engine_id=engine.shown_id,
            pid=engine.identity.pid,
            state=process_state(engine.identity.pid),
        )

    def _end(self, engine: Engine) -> None:
        """End all leases of an engine that writes no more, once nothing is copied for it either."""
        for channel in engine.channels:
            if not channel.is_over:
                if engine.state is EngineState.ATTACHED:
                    engine.move("disconnected_copying")
                channel.end(partial(self._end, engine))  # then the next one is looked at
                return
        self._forget(engine, "ended")
        engine.cache.act(lambda core: core.engines.remove(engine.engine_id))
        log.info("engine_gone", engine=engine.name, engine_id=engine.shown_id)

    def _forget(self, engine: Engine, event: str) -> None:
        engine.move(event)
        del self._engines[engine.engine_id]
        if engine.watch is not None:
            engine.watch.close()


def _instance(text: str) -> bytes:
    try:
        instance = bytes.fromhex(text)
    except ValueError:
        instance = b"?"
    if len(instance) not in (0, INSTANCE_BYTES):
        raise InvalidInputError(
            f"instance {text[:40]!r}", f"send {INSTANCE_BYTES} random bytes as hex"
        )
    return instance


def _reattached(cache: Cache, old: int, new: int, held: Sequence[int]) -> Sequence[int]:
    """Give an engine that came back, under a new id, the leases it still holds; return those."""
    confirmed, _lost = cache.act(lambda core: core.engines.reattach(old, new, held))
    return confirmed


def _detached(engine: Engine) -> bool:
    """Report an engine's end to the core; return whether slots stay with its process."""
    engine.cache.act(lambda core: core.engines.detach(engine.engine_id))
    leases = engine.cache.act(lambda core: core.inspection.leases())
    return any(lease.engine_id == engine.engine_id for lease in leases)


def _nothing() -> None:
    """Nobody is there to be woken."""
