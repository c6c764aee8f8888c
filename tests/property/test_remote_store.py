"""Whatever servers and stores suffer, a pull gives a completely pushed state, or a reason.

Servers push, pull, remove and sweep at random, one in the middle of another one's calls, over a
store that fails, lies or is late, and in processes that die. After each operation a reader without
faults checks every session. With a store that keeps its promises the state is the last one that was
pushed, or one whose push never reported its end; no chunk of it is ever missing; and no server
pushes a session that another one owns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import TypeVar

import pytest

from kvd.host.pacing import SharedPace
from kvd.remote.catalog import Catalog
from kvd.remote.errors import DamagedRemoteError, FencedError, NotPushedError
from kvd.remote.manifest import Owner
from kvd.remote.names import session_place
from kvd.remote.pulling import Puller
from kvd.remote.pushing import Outcome, Pusher
from kvd.remote.sweeping import Sweeper
from shared.blobs.blob_store import BlobStore, OvertakenError, StoreFailedError
from shared.types.errors import ReportedError
from tests.faulty_store import CrashError, FaultyStore, Odds, View
from tests.remote_server import STEP, Server, State
from tests.synthetic_engine import key_of

HOUR_S = 3600.0
KEEPS_ITS_WORD = Odds(crash=0.02, fails=0.03, lies=0.03, late=0.03)
DOES_NOT = Odds(crash=0.02, fails=0.02, lies=0.02, late=0.02, partial=0.1, forgetful=0.1)
T = TypeVar("T")
SESSIONS = ("a", "b")


class World:
    """Servers, their store, and its possible contents.

    Attributes:
        ever: of each session, the states whose push has begun.
        may_be: of each session, the states that a reader may find; None: nothing.
        owners: of each session, its possible owners.
        begun: of each session, how many operations have begun.
        under_way: sessions, and the states that active operations may give them.
        claims: sessions, and their possible next owners.
        seen: how often each event has happened.
    """

    def __init__(self, random: Random, odds: Odds, *, is_sound: bool) -> None:
        self.random = random
        self.is_sound = is_sound
        self.store = FaultyStore(random, odds=odds, meanwhile=self._meanwhile)
        self.servers = [Server(name) for name in ("one", "two", "three")]
        self.ever: dict[str, set[State]] = {name: set() for name in SESSIONS}
        self.may_be: dict[str, set[State | None]] = {name: {None} for name in SESSIONS}
        self.owners: dict[str, set[str | None]] = {name: {None} for name in SESSIONS}
        self.begun = dict.fromkeys(SESSIONS, 0)
        self.under_way: list[tuple[str, State | None, str | None]] = []
        self.claims: list[tuple[str, str]] = []
        self.depth = 0
        self.next_token = 0
        self.seen: dict[str, int] = {}

    def _meanwhile(self) -> None:
        if self.depth < 3 and self.random.random() < 0.1:
            self.step()

    def step(self) -> None:
        """Run an operation, which may be interrupted at any call."""
        self.depth += 1
        try:
            self.random.choice((self.push, self.push, self.push, self.pull, self.other))()
        finally:
            self.depth -= 1

    def count(self, what: str, times: int = 1) -> None:
        self.seen[what] = self.seen.get(what, 0) + times

    def view(self) -> BlobStore:
        return View(self.store)

    # ------------------------------------------------------------------------------ operations

    def push(self) -> None:
        server, session = self.random.choice(self.servers), self.random.choice(SESSIONS)
        self._grow(server, session)
        state, takes = server.sessions[session], self.random.random() < 0.2
        self.ever[session].add(state)
        # the state as it is now, even if the session changes during the push
        source = Server(server.owner.name)
        source.sessions[session] = state
        pusher = Pusher(
            self.view(),
            source,
            server.owner,
            SharedPace(),
            clock=lambda: self.store.now_s,
            monotonic=lambda: self.store.now_s,
            threads=1,
        )
        info = source.info(session, self.random.choice([-1.0, 30 * HOUR_S]))
        owners = set(self.owners[session])
        with self._changing(session, state, server.owner.server_id) as settled:
            result = self._tried(lambda: pusher.push(info, takes=takes))
            if result is None:
                return
            self.count(result.outcome)
            assert result.num_tokens == len(state)
            if result.outcome is Outcome.PUSHED and settled():
                is_fenced = not takes and not owners & {None, server.owner.server_id}
                assert not (self.is_sound and is_fenced), "pushed what others own"

    def pull(self) -> None:
        server, session = self.random.choice(self.servers), self.random.choice(SESSIONS)
        view = self.view()
        puller = Puller(view, server, server.owner, SharedPace(), threads=1)

        def pulled() -> int:
            found = Catalog(view).find("default", session)
            most = len(server.sessions.get(session, ()))
            result = puller.pull(
                found, self.store.now_s, replaces=True, replaces_up_to=most, grows=True
            )
            chunks = sum(chunk.num_bytes for chunk in found.manifest.chunks)
            self.count("fetched in part", result.num_bytes < chunks)
            return result.num_tokens

        may_be = set(self.may_be[session])
        with self._claiming(session, server.owner.server_id) as settled:
            num_tokens = self._tried(pulled)
            if num_tokens is None:
                return
            self.count("pulled")
            state = server.sessions[session]
            assert (len(state), state in self.ever[session]) == (num_tokens, True)
            if settled() and self.is_sound:
                assert state in may_be

    def other(self) -> None:
        self.random.choice((self.drop, self.sweep, self.sweep, self.wait, self.wait))()

    def drop(self) -> None:
        session, view = self.random.choice(SESSIONS), self.view()
        with self._changing(session, None, None):
            if self._tried(lambda: Catalog(view).drop(Catalog(view).find("default", session)) or 1):
                self.count("dropped")

    def sweep(self) -> None:
        for session in SESSIONS:  # it may have expired
            self.begun[session] += 1
            self.may_be[session].add(None)
            self.owners[session].add(None)
        owner = Owner("", str(self.random.random()))
        result = self._tried(Sweeper(self.view(), owner, lambda: self.store.now_s).sweep)
        if result is not None:
            self.count("swept")
            self.count("removed", result.num_removed)

    def wait(self) -> None:
        """Let time pass; late calls take effect earlier than that."""
        self.store.settle()
        self.store.now_s += self.random.choice([60.0, HOUR_S, 8 * HOUR_S, 25 * HOUR_S])

    def _tried(self, do: Callable[[], T]) -> T | None:
        try:
            return do()
        except (ReportedError, CrashError) as error:
            self.count(type(error).__name__)
            if self.is_sound and isinstance(error, DamagedRemoteError):
                raise AssertionError("what counts is missing") from error
            return None

    # -------------------------------------------------------------------------------- the model

    @contextmanager
    def _changing(
        self, session: str, state: State | None, owner: str | None
    ) -> Iterator[Callable[[], bool]]:
        """Note the states that a session may get. ¶ The yielded function notes that it got

        this state, unless another operation has begun since, or a call is late.
        """
        self.begun[session] += 1
        begun = self.begun[session]
        self.may_be[session].add(state)
        self.owners[session].add(owner)
        self.under_way.append((session, state, owner))

        def settled() -> bool:
            if self.store.late or begun != self.begun[session]:
                return False
            there = [one[1:] for one in self.under_way if one[0] == session]
            self.may_be[session] = {one for one, _ in there}
            self.owners[session] = {one for _, one in there}
            self.owners[session] |= {one for name, one in self.claims if name == session}
            return True

        try:
            yield settled
        finally:
            self.under_way.remove((session, state, owner))

    @contextmanager
    def _claiming(self, session: str, owner: str) -> Iterator[Callable[[], bool]]:
        """Note possible owners, as _changing does states."""
        self.begun[session] += 1
        begun = self.begun[session]
        self.owners[session].add(owner)
        self.claims.append((session, owner))

        def settled() -> bool:
            return not self.store.late and begun == self.begun[session]

        try:
            yield settled
        finally:
            self.claims.remove((session, owner))

    def _grow(self, server: Server, session: str) -> None:
        tokens = server.sessions.get(session, ())
        keep = self.random.choice([0, STEP, 2 * STEP, len(tokens)])
        self.next_token += 1
        more = self.random.choice([1, STEP - 1, 2 * STEP + 3])
        base = tuple(range(min(keep, 2 * STEP))) if self.random.random() < 0.5 else tokens[:keep]
        server.sessions[session] = (*base, *[10_000 + self.next_token] * more)

    def check(self) -> None:
        """Read every session without any faults."""
        view = View(self.store, is_calm=True)
        for session in SESSIONS:
            reader = Server("reader")
            try:
                found = Catalog(view).find("default", session)
                if found.place != session_place(key_of(session)):
                    raise AssertionError(found.place)
                # Its clock stands still: expired sessions that were not swept do not matter here.
                Puller(view, reader, reader.owner, SharedPace(), threads=1).pull(
                    found, found.version.stored_unix_s, copies=True
                )
            except NotPushedError:
                assert not self.is_sound or None in self.may_be[session]
                continue
            except DamagedRemoteError:
                assert not self.is_sound, "a chunk of a session that counts is missing"
                continue
            state = reader.sessions[session]
            assert state in (self.may_be[session] if self.is_sound else self.ever[session])


def play(seed: int, odds: Odds, *, is_sound: bool, num_steps: int) -> dict[str, int]:
    world = World(Random(seed), odds, is_sound=is_sound)  # noqa: S311
    for _ in range(num_steps):
        world.step()
        world.check()
    return world.seen


def merge(runs: list[dict[str, int]]) -> dict[str, int]:
    return {what: sum(run.get(what, 0) for run in runs) for run in runs for what in run}


def test_a_reliable_store_has_the_last_pushed_state() -> None:
    """The last pushed state is there, completely, and has one owner."""
    seen = merge(
        [play(seed, KEEPS_ITS_WORD, is_sound=True, num_steps=60) for seed in range(70, 82)]
    )
    wanted = {error.__name__ for error in (FencedError, OvertakenError, StoreFailedError)}
    assert {*wanted, "CrashError", "pushed", "pulled", "swept"} <= seen.keys(), seen
    assert seen["removed"]  # chunks that nobody named
    assert seen["fetched in part"]


def test_an_unreliable_store_never_gives_a_mixed_state() -> None:
    """Listings are partial and conditions ignored: still a reader finds complete states only."""
    seen = merge([play(seed, DOES_NOT, is_sound=False, num_steps=60) for seed in range(8)])
    assert min(seen[what] for what in ("pushed", "pulled", "swept", "dropped")) > 0


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_reliable_and_unreliable_stores_at_length(first: int) -> None:
    """The same with many operations."""
    for seed in range(first, first + 100):
        play(seed, KEEPS_ITS_WORD, is_sound=True, num_steps=60)
        play(seed, DOES_NOT, is_sound=False, num_steps=60)
