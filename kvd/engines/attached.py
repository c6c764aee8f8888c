"""The registry of engines: attached ones, and detached ones that still hold slots (D10).

ENGINE_MOVES is the table of their states; kvd/README.md has its drawing. When an engine is gone,
all its leases end, except those that its new attachment takes over.

There is no timeout: a slot is not given to another engine while a process lives that may be writing
to it. Operators see such processes with `kvd leases`, and may kill them.
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
    NO_PROCESS,
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
    """State of an engine in the registry."""

    ATTACHED = "attached"
    QUARANTINED = "quarantined"
    GONE = "gone"


# State → event → next state. An engine begins attached; a process that writes to slots of an
# earlier kvd begins quarantined.
ENGINE_MOVES = Transitions(
    {
        EngineState.ATTACHED: {
            "ended": EngineState.GONE,  # its process is dead, or has reported that it leaves
            "disconnected": EngineState.GONE,  # and it holds no slots
            "disconnected_storing": EngineState.QUARANTINED,
            "disconnected_copying": EngineState.QUARANTINED,  # it is dead, but its copier is not
        },
        EngineState.QUARANTINED: {
            "ended": EngineState.GONE,  # its process is dead, and its copier's work is done
            # By the same process and instance: the new attachment takes over its running stores.
            "reattached": EngineState.GONE,
            "kvd_stops": EngineState.GONE,  # the next kvd finds it in the journal
        },
        EngineState.GONE: {},
    }
)


@dataclass(eq=False)
class Engine:
    """One attachment of an engine process, attached or quarantined.

    Attributes:
        engine_id: random id, so that an id of an earlier kvd is not valid; leases name it.
        name: the engine's name, for people.
        cache: cache of the engine's layout.
        identity: the engine's process.
        uid: its user; -1 if an earlier kvd has attached it.
        connection: its data connection, while it is attached.
        watch: watches its process while it is quarantined; before, the connection has the watch.
        channels: its channels to copiers, once the connection is gone.
        version: its release; "" if it has not reported one.
        state: its state.
        since_s: monotonic time at which the state began.
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
        """The id for logs and readers: `engine_id` is a secret that lets a caller act as it."""
        return shown_id(self.engine_id)

    def move(self, event: str) -> None:
        """Change the state by an event of ENGINE_MOVES, which must be possible in the old state."""
        self.state, self.since_s = ENGINE_MOVES.after(self.state, event), time.monotonic()


@dataclass(frozen=True)
class EngineInfo:
    """Facts about an engine that may hold leases, for operators.

    Attributes:
        engine_id: id of the engine.
        name: name of the engine.
        pid: its process; 0 if that is in a foreign PID namespace.
        process_status: "sleeping", "stopped", …; "" if the process is not visible.
        is_quarantined: whether it is quarantined.
    """

    engine_id: int
    name: str
    pid: int
    process_status: str
    is_quarantined: bool


class Engines:
    """The registry of attached and quarantined engines; iteration yields the attached ones.

    Args:
        max_engines: most engines, quarantined ones included.
    """

    def __init__(self, max_engines: int) -> None:
        self._max_engines = max_engines
        self._engines: dict[int, Engine] = {}

    def set_bound(self, max_engines: int) -> None:
        """Change the most engines; engines beyond it stay."""
        self._max_engines = max_engines

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._in_state(EngineState.ATTACHED))

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
            name: the engine's name, for people.
            cache: cache of its layout; must have an arena.
            connection: data connection of its process.
            instance: random hex digits, the same for every attach of one client object.
            held: leases of earlier attachments whose slots the engine may still be writing to.
            version: the engine's release, for people.

        Returns:
            The engine, the leases of `held` that it keeps, and those that it has lost.

        Raises:
            InvalidInputError: `instance` is not valid.
            LimitReachedError: there are too many engines, quarantined ones included.
        """
        start_ticks = 0 if connection.watch is None else connection.watch.start_ticks
        identity = ProcessIdentity(connection.pid, start_ticks, _decode_instance(instance))
        for older in self._find_client(identity, EngineState.ATTACHED):
            assert older.connection is not None, "attached"  # noqa: S101
            older.connection.gone.set()  # a client has one attachment: the new one replaces it
            self.on_connection_gone(older.connection)
        quarantined = self._find_client(identity, EngineState.QUARANTINED)
        returning = [engine for engine in quarantined if engine.cache is cache]
        if not returning and len(self._engines) >= self._max_engines:
            num_attached = len(list(self))
            raise LimitReachedError(
                f"{num_attached} engines are attached and {len(self._engines) - num_attached} "
                "quarantined, and no more are allowed",
                "raise limits.max_engines; kvd leases shows the quarantined ones",
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
            confirmed.extend(_reattach_leases(cache, earlier.engine_id, engine_id, held))
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

    def get(self, engine_id: int) -> Engine:
        """Return an attached engine.

        Raises:
            NotAttachedError: no engine with this id is attached.
        """
        engine = self._engines.get(engine_id)
        if engine is None or engine.state is not EngineState.ATTACHED:
            raise NotAttachedError(f"engine {engine_id} is not attached", "attach again")
        return engine

    def on_connection_gone(self, connection: DataConnection) -> None:
        """Handle the end of a connection: end its engine's leases, or quarantine the engine."""
        for engine in [engine for engine in self if engine.connection is connection]:
            engine.connection, engine.channels = None, connection.channels
            if not connection.may_still_write:
                self._end(engine)
            elif _detach(engine):
                # The watch outlives the connection, which would close it.
                engine.watch, connection.watch = connection.watch, None
                engine.move("disconnected_storing")
                self._quarantine(engine)
            else:
                self._forget(engine, "disconnected")
                log.info("engine_detached", engine=engine.name, engine_id=engine.shown_id)

    def watch_orphans(self, cache: Cache, writing: Sequence[JournaledWrite]) -> list[OrphanSlot]:
        """Quarantine living processes that may still write to slots of an adopted arena.

        Args:
            cache: cache of the arena.
            writing: slots that were being written to, according to the arena's journal.

        Returns:
            The slots whose writers live. The other slots are free, and their journal records are
            cleared.
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

    # --------------------------------------------------------------------------------- queries

    def uses_cache(self, cache: Cache) -> bool:
        """Whether an attached or quarantined engine uses a cache's arena."""
        return any(engine.cache is cache for engine in self._engines.values())

    def identity_of(self, engine_id: int) -> ProcessIdentity:
        """Return the process of an engine, for the journal; NO_PROCESS if it is not registered."""
        engine = self._engines.get(engine_id)
        return NO_PROCESS if engine is None else engine.identity

    def wake_of(self, engine_id: int) -> Callable[[], None]:
        """Return a function, for any thread, that wakes an engine to read its progress words."""
        engine = self._engines.get(engine_id)
        connection = None if engine is None else engine.connection
        return _do_nothing if connection is None else connection.wakeup.wake

    def infos(self) -> list[EngineInfo]:
        """Return facts about all engines, the attached ones first."""
        return [
            EngineInfo(
                engine.engine_id,
                engine.name,
                engine.identity.pid,
                process_state(engine.identity.pid) if engine.identity.pid else "",
                engine.state is EngineState.QUARANTINED,
            )
            for state in (EngineState.ATTACHED, EngineState.QUARANTINED)
            for engine in self._in_state(state)
        ]

    def kill(self, pid: int) -> bool:
        """Send SIGKILL to an engine's process; return False if no engine has this pid.

        Raises:
            PermissionError: the process is another user's.
        """
        for engine in self._engines.values():
            watch = engine.watch if engine.connection is None else engine.connection.watch
            if engine.identity.pid == pid and watch is not None and watch.kill():
                log.warning("holder_killed", pid=pid)
                return True
        return False

    def close(self) -> None:
        """Stop watching quarantined engines. Called on the event loop."""
        for engine in self._in_state(EngineState.QUARANTINED):
            self._forget(engine, "kvd_stops")

    # --------------------------------------------------------------------------------- internals

    def _in_state(self, state: EngineState) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.state is state]

    def _find_client(self, identity: ProcessIdentity, state: EngineState) -> list[Engine]:
        """Return the engines of one client object; [] if the client has sent no instance."""
        found = [engine for engine in self._in_state(state) if engine.identity == identity]
        return found if identity.instance else []

    def _watch_writer(self, cache: Cache, identity: ProcessIdentity) -> int:
        """Quarantine a process as a new engine; return its engine id, or 0 if it is dead."""
        watch = watch_identity(identity)
        if watch is None:
            return 0
        engine_id = secrets.randbits(63) | 1  # never 0
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
        """Watch for the end of an engine's process, which ends its leases."""
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
        """End all leases of an engine whose process is gone, once no copier copies for it."""
        for channel in engine.channels:
            if not channel.is_over:
                if engine.state is EngineState.ATTACHED:
                    engine.move("disconnected_copying")
                channel.end(partial(self._end, engine))  # called again for the next channel
                return
        self._forget(engine, "ended")
        engine.cache.act(lambda core: core.engines.remove(engine.engine_id))
        log.info("engine_gone", engine=engine.name, engine_id=engine.shown_id)

    def _forget(self, engine: Engine, event: str) -> None:
        engine.move(event)
        del self._engines[engine.engine_id]
        if engine.watch is not None:
            engine.watch.close()


def _decode_instance(text: str) -> bytes:
    try:
        instance = bytes.fromhex(text)
    except ValueError:
        instance = b"?"
    if len(instance) not in (0, INSTANCE_BYTES):
        raise InvalidInputError(
            f"the instance {text[:40]!r} is not valid", f"send {INSTANCE_BYTES} random bytes as hex"
        )
    return instance


def _reattach_leases(cache: Cache, old: int, new: int, held: Sequence[int]) -> Sequence[int]:
    """Move held leases from an engine's old id to its new one; return those that were moved."""
    confirmed, _lost = cache.act(lambda core: core.engines.reattach(old, new, held))
    return confirmed


def _detach(engine: Engine) -> bool:
    """Report an engine's disconnection to the core; return whether it still holds leases."""
    engine.cache.act(lambda core: core.engines.detach(engine.engine_id))
    leases = engine.cache.act(lambda core: core.inspection.leases())
    return any(lease.engine_id == engine.engine_id for lease in leases)


def _do_nothing() -> None:
    """Do nothing: the engine has no connection, and so does not wait."""
