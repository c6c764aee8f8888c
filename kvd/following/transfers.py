"""Transfers between kvd and one store, a session each: pushes, drops, pulls. These calls block.

It owns no state but the bounds of bandwidth and requests. Any thread; pushes and drops from one at
a time.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, repeat
from typing import Protocol, TypeVar

from kvd.core.records.errors import SessionChangedError
from kvd.errors import InUseError, LimitReachedError, SessionExistsError
from kvd.following.steps import Drop, Push
from kvd.host.pacing import SharedPace
from kvd.remote.catalog import Catalog, Pushed
from kvd.remote.errors import FencedError, NotPushedError
from kvd.remote.manifest import Owner, has_expired, is_remnant
from kvd.remote.names import session_place
from kvd.remote.pulling import Puller, PullResult, Sink
from kvd.remote.pushing import Pusher, PushResult, Source
from shared.blobs.blob_store import BlobStore
from shared.blobs.errors import OvertakenError
from shared.blobs.paced_store import PacedStore, Request
from shared.blobs.release import FORMAT, claim
from shared.kvd_client.messages import key_message
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.errors import (
    ConflictError,
    ExhaustedError,
    NotFoundError,
    StateError,
    UnavailableError,
)
from shared.types.session_key import SessionKey

T = TypeVar("T")

BUSY_S, BUSY_TRIES = 0.1, 100  # while something is in the way that ends soon
FULL = frozenset({LimitReachedError.reason})  # kvd has as many transfers as it may have
# Of a pull also a turn that uses what is here, or another server that writes its manifest.
IN_THE_WAY = FULL | {InUseError.reason, OvertakenError.reason, FencedError.reason}
DROP_TRIES = 3  # of a session that is replaced at the same time
# Why kvd keeps what it has of a session: a turn has stored it meanwhile, or uses it.
KEPT = frozenset({SessionExistsError.reason, InUseError.reason, SessionChangedError.reason})


class Kvd(Source, Sink, Protocol):
    """The kvd whose sessions these are."""

    def describe(self, key: pb.SessionKey) -> pb.DescribeSessionResponse:
        """Return a session; NotFoundError if it is not stored."""

    def answer_wanted(self, key: pb.SessionKey, *, coming: bool) -> None:
        """Say whether a session comes that turns want; an older kvd does not hear it."""


class StoppedError(UnavailableError):
    """It was broken off, because the follower stops, or goes on with another store."""

    reason = "stopped"


class Transfers:
    """See the module docstring.

    Args:
        store: it is opened, or made, by `open`.
        kvd: from which, and to which.
        owner: that server.
        rate: bytes a second each way; 0: no bound.
        requests: of the store a second; 0: no bound.
        on_sent, on_received: told of bytes of sessions, those that lie there already included.
        on_request: told of each request, by its kind.
    """

    def __init__(
        self,
        store: BlobStore,
        kvd: Kvd,
        owner: Owner,
        rate: int = 0,
        requests: float = 0,
        on_sent: Callable[[int], None] = lambda _: None,
        on_received: Callable[[int], None] = lambda _: None,
        on_request: Callable[[Request], None] = lambda _: None,
    ) -> None:
        self._kvd = kvd
        self._owner = owner
        self._stopped = threading.Event()
        budget = SharedPace(requests, sleep=self._sleep)

        def before(request: Request) -> None:
            budget.take(1)
            on_request(request)

        self._store = PacedStore(store, before)
        self._catalog = Catalog(self._store)

        def told(tell: Callable[[int], None]) -> Callable[[int], None]:
            def on_bytes(num_bytes: int) -> None:
                self._check()
                tell(num_bytes)

            return on_bytes

        paces = [SharedPace(rate, sleep=self._sleep) for _ in range(2)]
        self._pusher = Pusher(self._store, kvd, owner, paces[0], told(on_sent))
        self._puller = Puller(self._store, kvd, owner, paces[1], told(on_received))

    def stop(self) -> None:
        """Break off what is under way, and refuse what comes."""
        self._stopped.set()

    def open(self) -> float:
        """Make sure that the store is one for sessions; returns since when, by its clock."""
        claim(self._store)
        found = self._store.find(FORMAT)
        return 0.0 if found is None else found.stored_unix_s

    def push(self, step: Push) -> tuple[pb.SessionInfo, PushResult] | None:
        """Push a session; None: kvd does not have it any more."""
        self._check()
        info = self._found(step.key)
        if info is None:
            return None
        return info, self._in_the_end(FULL, lambda: self._pusher.push(info, takes=step.takes))

    def drop(self, step: Drop) -> bool:
        """Drop a session from the store; returns whether it was there, and is ours to drop."""
        for _ in range(DROP_TRIES):
            self._check()
            found = self._catalog.read(session_place(step.key))
            if found is None or found.manifest.dropped:
                return False
            if found.manifest.owner != self._owner.server_id and not step.of_others:
                return False
            if found.manifest.seen_unix_s > step.unix_s:
                return False
            with suppress(OvertakenError):
                self._catalog.drop(found)
                return True
        raise OvertakenError(f"session {step.key} is replaced again and again", "drop it later")

    def find(self, key: SessionKey) -> Pushed | None:
        """Find a session that can be pulled; None: it is not there, or kvd has as much of it."""
        self._check()
        found = self._catalog.read(session_place(key))
        if found is None or found.manifest.dropped:
            return None
        if has_expired(found.manifest, time.time() - found.version.stored_unix_s):
            return None
        return found if self._lacks(self._found(key), found.manifest) else None

    def pull(self, key: SessionKey, found: Pushed) -> tuple[pb.SessionInfo, PullResult] | None:
        """Fetch a session that was found; None: it has gone there, or kvd has as much by now.

        What kvd has of it, which is less, becomes what is pulled, unless a turn adds to it
        meanwhile. What has come counts at once: turns wait for it.
        """
        self._check()
        here = self._found(key)
        if not self._lacks(here, found.manifest):
            return None
        most = 0 if here is None else here.num_tokens
        # A try that came to nothing may have made this server the owner: each looks anew.
        looks = chain([found], (self._catalog.read(found.place) for _ in repeat(None)))

        def pull() -> PullResult:
            latest = next(looks)
            if latest is None or latest.manifest.dropped:
                raise NotPushedError("the session was dropped meanwhile", "look again")
            return self._puller.pull(latest, time.time(), replaces_up_to=most, grows=True)

        try:
            pulled = self._in_the_end(IN_THE_WAY, pull)
        except NotPushedError:  # it has expired
            return None
        except (StateError, ConflictError) as error:
            if error.reason not in KEPT:
                raise
            return None
        info = self._found(key)
        return None if info is None else (info, pulled)

    def _lacks(self, here: pb.SessionInfo | None, manifest: pb.SessionManifest) -> bool:
        """Whether a pushed session is worth more than what kvd has of it.

        Of what this very server has pushed it has less by its own will, unless it has lost its end.
        """
        if here is None:
            return True
        if manifest.owner == self._owner.server_id:
            return is_remnant(manifest, here)
        return here.num_tokens < manifest.num_tokens

    def _found(self, key: SessionKey) -> pb.SessionInfo | None:
        try:
            return self._kvd.describe(key_message(key)).info
        except NotFoundError:
            return None

    def _in_the_end(self, in_the_way: frozenset[str], do: Callable[[], T]) -> T:
        """Do what may be refused for a reason that ends soon: again, for a while."""
        for _ in range(BUSY_TRIES):
            try:
                return do()
            except (StateError, ConflictError, ExhaustedError) as error:
                if error.reason not in in_the_way:
                    raise
            self._sleep(BUSY_S)
        return do()

    def _sleep(self, seconds: float) -> None:
        self._stopped.wait(seconds)
        self._check()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError("the follower stops", "it goes on when it is started again")
