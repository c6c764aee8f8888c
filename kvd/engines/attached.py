"""Engines that are attached, and processes that hold slots without being attached (D10).

    attached --its process dies, or it says that it leaves--> forgotten: all its leases end
       │  └--connection ends, process lives, a store is under way--> quarantined
       └-----connection ends, nothing under way--> forgotten
    quarantined --its process dies--> forgotten
    quarantined --the same process and instance attaches again--> attached: stores it still has
                  under way go on, all others end

There is no timeout: as long as a process lives that may be writing into a slot, nobody else gets
that slot. Operators see such processes with `kvd leases`, and may kill them.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvd.core.engine import CacheEngine
from kvd.core.records.rows import OrphanSlot, WritingSlot
from kvd.engines.data_socket import Peer
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
from shared.process.log import get_logger
from shared.types.engine_id import shown_id
from shared.types.errors import InvalidInputError

log = get_logger(__name__)


@dataclass(frozen=True)
class AttachedEngine:
    """One attachment of an engine process.

    Attributes:
        engine_id: random, so that an id of an earlier kvd means nothing to this one; the `owner` of
            its leases.
        since_s: of the monotonic clock.
        version: its release; "" if it did not say.
    """

    engine_id: int
    name: str
    cache: Cache
    peer: Peer
    identity: ProcessIdentity
    since_s: float
    version: str = ""

    @property
    def shown_id(self) -> int:
        """Its id for logs and readers: who knows the other one can act as this engine."""
        return shown_id(self.engine_id)


@dataclass(frozen=True)
class Holder:
    """A process that is not attached and may still write into slots of a cache."""

    owner: int
    name: str
    cache: Cache
    identity: ProcessIdentity
    watch: ProcessWatch
    since_s: float


@dataclass(frozen=True)
class OwnerFacts:
    """An owner of leases, for people.

    Attributes:
        pid: 0 if it is in a foreign PID namespace.
        state: of its process: "sleeping", "stopped", …
        quarantined: not attached.
        since_s: of the monotonic clock: attached, or quarantined.
    """

    owner: int
    name: str
    pid: int
    state: str
    quarantined: bool
    since_s: float


class Engines:
    """The attached engines by id, and the holders.

    Args:
        max_engines: bound on both together: each attached engine may become a holder.
    """

    def __init__(self, max_engines: int) -> None:
        self._max_engines = max_engines
        self._engines: dict[int, AttachedEngine] = {}
        self._holders: dict[int, Holder] = {}

    def set_bound(self, max_engines: int) -> None:
        """Let no more than so many attach from now on; those that are there stay."""
        self._max_engines = max_engines

    def __iter__(self) -> Iterator[AttachedEngine]:
        return iter(self._engines.values())

    # -------------------------------------------------------------------------- attach and end

    def attach(
        self,
        name: str,
        cache: Cache,
        peer: Peer,
        instance: str,
        held: Sequence[int],
        *,
        version: str = "",
    ) -> tuple[AttachedEngine, list[int], list[int]]:
        """Register an engine whose peer has been claimed.

        Args:
            name: for people.
            cache: of its layout; its arena exists.
            peer: its data connection.
            instance: random hex, the same at each attach of one client object.
            held: leases of earlier attachments whose slots it may still be writing to.
            version: its release, for people.

        Returns:
            The engine, which of `held` are its own again, and which it has lost.

        Raises:
            InvalidInputError: the instance is not one.
            LimitReachedError: too many engines and holders.
        """
        start_ticks = 0 if peer.watch is None else peer.watch.start_ticks
        identity = ProcessIdentity(peer.pid, start_ticks, _instance(instance))
        for engine in [e for e in self if e.identity == identity and identity.instance]:
            engine.peer.gone.set()  # one client has one attachment: the older one is over
            self.gone(engine.peer)
        held_by_it = [
            holder
            for holder in self._holders.values()
            if holder.identity == identity and identity.instance and holder.cache is cache
        ]
        if not held_by_it and len(self._engines) + len(self._holders) >= self._max_engines:
            raise LimitReachedError(
                f"{len(self._engines)} engines are attached, {len(self._holders)} quarantined",
                "raise limits.max_engines, or see: kvd leases",
            )
        engine_id = secrets.randbits(63)
        engine = AttachedEngine(engine_id, name, cache, peer, identity, time.monotonic(), version)
        peer.arena = cache.arena
        self._engines[engine_id] = engine
        confirmed: list[int] = []
        for holder in held_by_it:
            self._drop(holder)
            step = partial(_reattach, holder.owner, engine_id, held)
            confirmed.extend(cache.act(step))
        lost = [lease_id for lease_id in held if lease_id not in confirmed]
        log.info(
            "engine_attached",
            engine=name,
            engine_id=shown_id(engine_id),
            pid=peer.pid,
            confirmed=len(confirmed),
            lost=len(lost),
        )
        return engine, confirmed, lost

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
        """Note the end of a connection: release what its engine held, or quarantine it."""
        for engine in [engine for engine in self if engine.peer is peer]:
            del self._engines[engine.engine_id]
            if not peer.may_still_write:
                engine.cache.act(partial(_owner_gone, engine.engine_id))
                log.info("engine_gone", engine=engine.name, engine_id=engine.shown_id)
            elif engine.cache.act(partial(_detach, engine.engine_id)):
                self._quarantine(engine)
            else:
                log.info("engine_detached", engine=engine.name, engine_id=engine.shown_id)

    def watch_orphans(self, cache: Cache, writing: Sequence[JournaledWrite]) -> list[OrphanSlot]:
        """Watch the processes that an earlier kvd has let write, as far as they live.

        Args:
            cache: whose arena they write to.
            writing: as its journal says; slots that are not among the result are free, and their
                records are cleared.
        """
        owners: dict[ProcessIdentity, int] = {}
        orphans = []
        for write in writing:
            if write.writer not in owners:
                owners[write.writer] = self._watch_writer(cache, write.writer)
            owner = owners[write.writer]
            if owner:
                record = WritingSlot(write.generation, write.lease_id, owner)
                orphans.append(OrphanSlot(write.slot_id, record))
            elif cache.arena is not None:
                cache.arena.journal.clear(write.slot_id)
        return orphans

    # ------------------------------------------------------------------------------- questions

    def use(self, cache: Cache) -> bool:
        """Whether an engine is attached to a cache, or a quarantined process may write to it."""
        attached = [engine.cache for engine in self]
        return any(c is cache for c in attached + [h.cache for h in self._holders.values()])

    def identity_of(self, owner: int) -> ProcessIdentity:
        """Which process an owner of leases is, for the journal."""
        found = self._engines.get(owner) or self._holders.get(owner)
        return NOBODY if found is None else found.identity

    def wake_of(self, owner: int) -> Callable[[], None]:
        """What to call when a progress word of an owner has changed; any thread may."""
        engine = self._engines.get(owner)
        return _nothing if engine is None else engine.peer.wakeup.wake

    def owners(self) -> list[OwnerFacts]:
        """Everybody who may own leases."""
        attached = [(e.engine_id, e.name, e.peer.pid, False, e.since_s) for e in self]
        quarantined = [
            (h.owner, h.name, h.identity.pid, True, h.since_s) for h in self._holders.values()
        ]
        return [
            OwnerFacts(owner, name, pid, process_state(pid) if pid else "", is_held, since_s)
            for owner, name, pid, is_held, since_s in attached + quarantined
        ]

    def kill(self, pid: int) -> bool:
        """Send SIGKILL to an attached engine's or a holder's process; False if there is none."""
        watches = [engine.peer.watch for engine in self if engine.peer.pid == pid]
        watches += [h.watch for h in self._holders.values() if h.identity.pid == pid]
        for watch in watches:
            if watch is not None and watch.kill():
                log.warning("holder_killed", pid=pid)
                return True
        return False

    def close(self) -> None:
        """Stop watching the holders. On the event loop."""
        for holder in list(self._holders.values()):
            self._drop(holder)

    # ---------------------------------------------------------------------------------- inside

    def _quarantine(self, engine: AttachedEngine) -> None:
        watch, engine.peer.watch = engine.peer.watch, None  # outlives the connection
        assert watch is not None, "may_still_write"  # noqa: S101
        self._hold(engine.engine_id, engine.name, engine.cache, engine.identity, watch)

    def _watch_writer(self, cache: Cache, identity: ProcessIdentity) -> int:
        """Make a living process a holder; return its owner id, 0 if it does not live."""
        watch = watch_identity(identity)
        if watch is None:
            return 0
        owner = secrets.randbits(63) | 1  # not 0
        self._hold(owner, process_name(identity.pid), cache, identity, watch)
        return owner

    def _hold(
        self,
        owner: int,
        name: str,
        cache: Cache,
        identity: ProcessIdentity,
        watch: ProcessWatch,
    ) -> None:
        holder = Holder(owner, name, cache, identity, watch, time.monotonic())
        self._holders[owner] = holder
        watch.start(partial(self._died, holder))
        log.warning(
            "engine_quarantined",
            engine=name,
            engine_id=shown_id(owner),
            pid=identity.pid,
            state=process_state(identity.pid),
        )

    def _died(self, holder: Holder) -> None:
        self._drop(holder)
        holder.cache.act(partial(_owner_gone, holder.owner))
        log.info("engine_gone", engine=holder.name, engine_id=shown_id(holder.owner))

    def _drop(self, holder: Holder) -> None:
        del self._holders[holder.owner]
        holder.watch.close()


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


def _owner_gone(owner: int, core: CacheEngine) -> None:
    core.engines.gone(owner)


def _detach(owner: int, core: CacheEngine) -> bool:
    """Tell the core, and return whether slots stay with the process."""
    core.engines.detach(owner)
    return any(lease.owner == owner for lease in core.inspection.leases())


def _reattach(old: int, new: int, held: Sequence[int], core: CacheEngine) -> Sequence[int]:
    confirmed, _lost = core.engines.reattach(old, new, held)
    return list(confirmed)


def _nothing() -> None:
    """Nobody is there to be woken."""
