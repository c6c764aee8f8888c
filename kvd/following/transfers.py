"""Transfers of single sessions between kvd and one store: pushes, drops, pulls. Blocking calls.

It owns no state but the limits of bandwidth and requests. Any thread may call it; pushes and drops
come from one thread at a time.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, repeat
from typing import Protocol, TypeVar

from kvd.core.records.errors import SessionChangedError
from kvd.errors import InUseError, LimitReachedError, SessionExistsError
from kvd.following.paced_store import PacedStore, Request
from kvd.following.steps import Drop, Push
from kvd.host.pacing import SharedPace
from kvd.remote.catalog import Catalog, PushedSession
from kvd.remote.errors import FencedError, NotPushedError
from kvd.remote.manifest import Owner, has_expired, is_remnant
from kvd.remote.names import session_place
from kvd.remote.pulling import Puller, PullResult, Sink
from kvd.remote.pushing import Pusher, PushResult, Source
from shared.blobs.blob_store import BlobStore, OvertakenError
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

BUSY_S, BUSY_TRIES = 0.1, 100  # between tries, and tries, while a transfer is refused for a moment
FULL = frozenset({LimitReachedError.reason})  # kvd has as many transfers as its settings allow
# A pull is also refused while a turn uses the session, or another server writes its manifest.
IN_THE_WAY = FULL | {InUseError.reason, OvertakenError.reason, FencedError.reason}
DROP_TRIES = 3  # of a session that is replaced in the store at the same time
# Reasons for kvd to keep what it has instead of what was pulled: a turn stored it, or uses it.
KEPT = frozenset({SessionExistsError.reason, InUseError.reason, SessionChangedError.reason})


class Kvd(Source, Sink, Protocol):
    """The kvd whose sessions are moved."""

    def describe(self, key: pb.SessionKey) -> pb.DescribeSessionResponse:
        """Return a session; raise NotFoundError if it is not stored."""

    def answer_wanted(self, key: pb.SessionKey, *, coming: bool) -> None:
        """Report whether a wanted session comes; an older kvd ignores it."""


class StoppedError(UnavailableError):
    """A transfer was stopped: the follower stops, or changes to another store."""

    reason = "stopped"


class Transfers:
    """Pushes, drops and pulls sessions, within limits, until it is stopped.

    Args:
        store: the store; `open` checks it, or makes it.
        kvd: the kvd whose sessions are moved.
        owner: the server of that kvd.
        rate: bytes per second in each direction; 0: no limit.
        requests: requests of the store per second; 0: no limit.
        on_sent, on_received: called with numbers of bytes of sessions; bytes that the store has
            already count as sent.
        on_request: called with the kind of each request.
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

        # A thread cannot be interrupted: a stopped transfer ends at its next chunk or pause.
        def stoppable(report: Callable[[int], None]) -> Callable[[int], None]:
            def on_bytes(num_bytes: int) -> None:
                self._check_running()
                report(num_bytes)

            return on_bytes

        paces = [SharedPace(rate, sleep=self._sleep) for _ in range(2)]
        self._pusher = Pusher(self._store, kvd, owner, paces[0], stoppable(on_sent))
        self._puller = Puller(self._store, kvd, owner, paces[1], stoppable(on_received))

    def stop(self) -> None:
        """Stop the transfers under way, and refuse further ones."""
        self._stopped.set()

    def open(self) -> float:
        """Check that the store is one for sessions, or make it one.

        Returns:
            When it was made, by its own clock (unix).
        """
        claim(self._store)
        found = self._store.find(FORMAT)
        return 0.0 if found is None else found.stored_unix_s

    def push(self, step: Push) -> tuple[pb.SessionInfo, PushResult] | None:
        """Push a session; return None if kvd does not have it any more."""
        self._check_running()
        info = self._describe(step.key)
        if info is None:
            return None
        return info, self._retry(FULL, lambda: self._pusher.push(info, takes=step.takes))

    def drop(self, step: Drop) -> bool:
        """Drop a session from the store; return whether it was there, and was ours to drop."""
        for _ in range(DROP_TRIES):
            self._check_running()
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
        raise OvertakenError(
            f"session {step.key} was replaced again and again while it was dropped",
            "it is dropped later",
        )

    def find(self, key: SessionKey) -> PushedSession | None:
        """Look up a session to pull; None: the store has none, or nothing that kvd lacks."""
        self._check_running()
        found = self._catalog.read(session_place(key))
        if found is None or found.manifest.dropped:
            return None
        if has_expired(found.manifest, time.time() - found.version.stored_unix_s):
            return None
        return found if self._lacks(self._describe(key), found.manifest) else None

    def pull(
        self, key: SessionKey, found: PushedSession
    ) -> tuple[pb.SessionInfo, PullResult] | None:
        """Pull a session that was found; None: the store or kvd has changed, nothing is to pull.

        kvd replaces what it has of the session, which is less, unless a turn adds to it meanwhile.
        The tokens that have arrived can be used at once, as turns wait for them.
        """
        self._check_running()
        here = self._describe(key)
        if not self._lacks(here, found.manifest):
            return None
        most = 0 if here is None else here.num_tokens
        # A failed try may have made this server the owner: each further try reads the manifest.
        looks = chain([found], (self._catalog.read(found.place) for _ in repeat(None)))

        def pull() -> PullResult:
            latest = next(looks)
            if latest is None or latest.manifest.dropped:
                raise NotPushedError(
                    "the session was dropped in the meantime",
                    "list what the store has with: kvd remote ls",
                )
            return self._puller.pull(latest, time.time(), replaces_up_to=most, grows=True)

        try:
            pulled = self._retry(IN_THE_WAY, pull)
        except NotPushedError:  # the session has expired, or was dropped
            return None
        except (StateError, ConflictError) as error:
            if error.reason not in KEPT:
                raise
            return None
        info = self._describe(key)
        return None if info is None else (info, pulled)

    def _lacks(self, here: pb.SessionInfo | None, manifest: pb.SessionManifest) -> bool:
        """Return whether the store has more of a session than kvd.

        If this server pushed it, kvd has less on purpose (a discard), unless it lost its last
        tokens to eviction.
        """
        if here is None:
            return True
        if manifest.owner == self._owner.server_id:
            return is_remnant(manifest, here)
        return here.num_tokens < manifest.num_tokens

    def _describe(self, key: SessionKey) -> pb.SessionInfo | None:
        try:
            return self._kvd.describe(key_message(key)).info
        except NotFoundError:
            return None

    def _retry(self, in_the_way: frozenset[str], do: Callable[[], T]) -> T:
        """Call `do` until it is not refused for a reason that passes; for about ten seconds."""
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
        self._check_running()

    def _check_running(self) -> None:
        if self._stopped.is_set():
            raise StoppedError("the follower is stopping", "it continues when it is started again")
