"""Whatever services and their store suffer, no turn in the store is ever lost.

Two services add turns to the same sessions, delete and fork them, over a store that fails, lies, is
late, in processes that die; a third, bare one adds turns in the middle of their calls. After each
operation a reader without faults checks the store. At the end, when all faults are over, all
services have the same turns.
"""

from collections import Counter
from concurrent.futures import Executor, Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random

import pytest

from inference_svc.core.errors import SessionMovedError, TranscriptUnavailableError
from inference_svc.core.transcript_format import (
    Header,
    Transcript,
    encode_transcript,
)
from inference_svc.core.turn_record import TurnRecord, Usage
from inference_svc.runtime.turns.shared_transcripts import (
    SharedTranscripts,
    decode_value,
    encode_value,
    register_of,
)
from inference_svc.runtime.turns.store_calls import StoreCalls
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.transcript_files import TranscriptFiles
from shared.blobs.blob_store import OvertakenError
from shared.blobs.register import NOTHING
from shared.encryption.key_file import new_key
from shared.encryption.sealer import Sealer
from shared.process.backoff import Backoff
from shared.types.session_key import SessionKey
from tests.faulty_store import CrashError, FaultyStore, Odds, View
from tests.sampled import sampled

KEYS = tuple(SessionKey("default", "model", name) for name in ("a", "b"))
ODDS = Odds(crash=0.02, fails=0.05, lies=0.04, late=0.04)
SEALER = Sealer([new_key()])
NO_PAUSE = {"first_s": 0.0, "longest_s": 0.0}


class Inline(Executor):
    """Runs each call at once: the store decides what happens in its middle."""

    def submit(self, do, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(do(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # a crash, too
            future.set_exception(error)
        return future

    def shutdown(self, wait=True, *, cancel_futures=False):
        del wait, cancel_futures


def turn(number, name):
    """Return a turn that is identified by its name."""
    return TurnRecord(
        *(number, name, "d", (1, 2, 3), (9,), ("x",), (), (), 1, "stop", Usage(), 1.0)
    )


class World:
    """Services, their store, and the turns that a reader without faults has found there.

    Attributes:
        found: of each session, the turns that the store had at the last check.
        added: turns added in the middle of the operation.
        may_go: sessions that are deleted, or may be: a call that failed may have taken effect.
        seen: how often each event has happened.
    """

    def __init__(self, random: Random, directory: Path) -> None:
        self.random = random
        self.directory = directory
        self.store = FaultyStore(random, odds=ODDS, meanwhile=self._meanwhile)
        self.names = count()
        self.services = [self._service(number) for number in range(2)]
        self.found: dict[SessionKey, list[str]] = {key: [] for key in KEYS}
        self.may_go: set[SessionKey] = set()
        self.added: list[tuple[SessionKey, str]] = []
        self.seen: Counter[str] = Counter()

    def _service(self, number: int) -> TranscriptStore:
        directory = self.directory / str(number)
        directory.mkdir(exist_ok=True)
        store = TranscriptStore(directory, self._shared(View(self.store)))
        store.count_sessions()
        return store

    def _shared(self, view: View) -> SharedTranscripts:
        calls = StoreCalls(view, 60.0, Backoff(self.random, **NO_PAUSE))
        calls._threads = Inline()
        return SharedTranscripts(calls, SEALER)

    def _meanwhile(self) -> None:
        """Add a turn, as a service without faults would."""
        if self.random.random() >= 0.05:
            return
        key = self.random.choice(KEYS)
        register = register_of(View(self.store, is_calm=True), key)
        version = register.read()
        transcript = decode_value(version.data, key, SEALER)[1] if version else None
        before = transcript or Transcript(Header(*key))
        new = turn(len(before.turns), f"m{next(self.names)}")
        after = before.with_turn(new, is_final=False)
        with suppress(OvertakenError):  # another writer was earlier
            register.replace(
                version.seen if version else NOTHING,
                encode_value(encode_transcript(after), key, SEALER),
            )
            self.seen["meanwhile"] += 1
            self.added.append((key, new.request_id))

    def _there(self, key: SessionKey) -> tuple[bytes | None, list[str]]:
        """Return the store's file of a session, and the names of its turns."""
        version = register_of(View(self.store, is_calm=True), key).read()
        data, transcript = decode_value(version.data, key, SEALER) if version else (None, None)
        return data, [one.request_id for one in transcript.turns] if transcript else []

    async def step(self) -> None:
        """Run one operation of one service, and check what became of it."""
        number = self.random.randrange(len(self.services))
        service, key = self.services[number], self.random.choice(KEYS)
        do = self.random.choice([self._append] * 6 + [self._delete, self._let_go, self._catch_up])
        self.added.clear()
        try:
            await do(service, key)
        except CrashError:
            self.seen["crash"] += 1
            service.close()
            self.services[number] = self._service(number)
        except (SessionMovedError, TranscriptUnavailableError) as error:
            self.seen[error.reason] += 1
        if self.random.random() < 0.2:
            self.store.settle()
        self.look()

    async def _append(self, service: TranscriptStore, key: SessionKey) -> None:
        name = f"t{next(self.names)}"
        await service.refresh(key)
        found = await service.find(key)
        await service.append(key, turn(len(found.turns) if found else 0, name), is_final=False)
        is_shared = not service.sharing.is_behind(key)
        self.seen["shared" if is_shared else "behind"] += 1
        assert not is_shared or name in self._there(key)[1], "what was shared is there"

    async def _delete(self, service: TranscriptStore, key: SessionKey) -> None:
        await service.refresh(key)
        if await service.find(key) is not None:
            self.may_go.add(key)
            await service.delete(key)
            self.seen["deleted"] += 1

    async def _let_go(self, service: TranscriptStore, key: SessionKey) -> None:
        """Check that a service loses no turns that others have added since it read the session."""
        here = await service.find(key)
        if here is None:
            return
        known = {one.request_id for one in here.turns}
        others = set(self._there(key)[1]) - known
        if not others:
            self.may_go.add(key)
        is_gone = await service.release(key)
        self.seen["let go, for all" if is_gone else "let go"] += 1
        assert not (is_gone and others), "somebody has gone on with it"
        added = {name for of, name in self.added if of == key}
        assert not is_gone or added <= set(self._there(key)[1]), "somebody went on with it just now"

    async def _catch_up(self, service: TranscriptStore, key: SessionKey) -> None:
        del key
        await service.catch_up()

    def look(self) -> None:
        """Check that no turn of the store is missing, unless its session was deleted."""
        for key in KEYS:
            before, now = self.found[key], self._there(key)[1]
            self.found[key] = now
            if now[: len(before)] != before:
                assert key in self.may_go, "turns are lost"
                assert not set(before) & set(now), "a new life has nothing of the one before"
                self.may_go.discard(key)

    async def settle(self) -> None:
        """End all faults: all services catch up, and have the same turns."""
        self.store.settle()
        self.store.odds, self.store.meanwhile = Odds(), lambda: None
        self.services = [self._service(number) for number in range(len(self.services))]
        for service in self.services:
            await service.catch_up()
            assert not service.sharing.behind
        for number, service in enumerate(self.services):
            files = TranscriptFiles(self.directory / str(number))
            for key in KEYS:
                await service.refresh(key)
                data, names = self._there(key)
                found = await service.find(key)
                assert await files.read(key) == data
                assert ([one.request_id for one in found.turns] if found else []) == names


@pytest.mark.parametrize("seed", sampled([str(seed) for seed in range(12)], 5, seed=1))
async def test_no_turn_in_the_store_is_lost(seed, tmp_path):
    """Sixty operations with faults, then time to catch up."""
    world = World(Random(int(seed)), tmp_path)  # noqa: S311
    for _ in range(60):
        await world.step()
    await world.settle()
