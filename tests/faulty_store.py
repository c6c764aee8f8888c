"""A BlobStore in memory with the faults of stores and networks, drawn from a random source.

Each server uses the store through its own view. A view may crash at any call, before or after the
call took effect, and makes no calls afterwards. Before each call other servers may act
(`meanwhile`), so that their whole operations fall between any two calls of one server.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from shared.blobs.blob_store import Blob, BlobExistsError, BlobMissingError, Data, StoreFailedError


class CrashError(BaseException):
    """The calling process has died; no code catches this."""


@dataclass(frozen=True)
class Odds:
    """How likely each fault is at a call.

    Attributes:
        crash: the caller dies, before or after the call took effect.
        fails: the call has no effect and reports an error.
        lies: the call takes effect and reports an error.
        late: the call reports an error and takes effect later, or never.
        partial: a listing silently lacks some entries.
        forgetful: a condition is not checked.
    """

    crash: float = 0.0
    fails: float = 0.0
    lies: float = 0.0
    late: float = 0.0
    partial: float = 0.0
    forgetful: float = 0.0


@dataclass
class FaultyStore:
    """The state that all views share.

    Attributes:
        random: draws the faults.
        now_s: the store's clock.
        meanwhile: called before each call of a view that is not calm.
        odds: of faults.
        blobs: bytes and time of each object.
        late: calls that take effect later.
    """

    random: Random
    now_s: float = 1_000_000.0
    odds: Odds = Odds()
    meanwhile: Callable[[], None] = lambda: None
    blobs: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    late: list[Callable[[], None]] = field(default_factory=list)

    def settle(self) -> None:
        """Perform or drop the calls that are late."""
        while self.late:
            do = self.late.pop(self.random.randrange(len(self.late)))
            if self.random.random() < 0.7:
                do()

    def put(self, name: str, data: Data, *, if_absent: bool) -> None:
        if if_absent and name in self.blobs:
            raise BlobExistsError(f"{name} exists", "look again")
        self.blobs[name] = (bytes(data), self.now_s)

    def blob(self, name: str) -> Blob:
        data, stored_s = self.blobs[name]
        return Blob(name, len(data), stored_s)


class View:
    """One server's access to the store.

    Args:
        store: the shared state.
        is_calm: no faults, and no other server acts in between.
    """

    keeps = True

    def __init__(self, store: FaultyStore, *, is_calm: bool = False) -> None:
        self._store = store
        self._is_calm = is_calm
        self._is_dead = False

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        def do() -> None:
            forgets = self._store.random.random() < self._store.odds.forgetful
            self._store.put(name, data, if_absent=if_absent and not forgets)

        self._write(name, do)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._write(name, lambda name=name: self._store.blobs.pop(name, None))

    def get(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        self._before(name)
        if name not in self._store.blobs:
            raise BlobMissingError(f"no {name}", "look again")
        data = self._store.blobs[name][0]
        return data[start : None if num_bytes is None else start + num_bytes]

    def view(self, name: str) -> memoryview:
        return memoryview(self.get(name))

    def find(self, name: str) -> Blob | None:
        self._before(name)
        return self._store.blob(name) if name in self._store.blobs else None

    def list(self, prefix: str) -> Iterator[Sequence[Blob]]:
        self._before(prefix)
        store = self._store
        names = [name for name in store.blobs if name.startswith(prefix)]
        store.random.shuffle(names)
        if not self._is_calm and store.random.random() < store.odds.partial:
            names = names[: len(names) // 2]
        for start in range(0, len(names), 3):
            yield [store.blob(name) for name in names[start : start + 3]]

    # ------------------------------------------------------------------------------------- faults

    def _before(self, name: str) -> None:
        """Run the other servers, then perhaps crash or fail, before a call."""
        if self._is_dead:
            raise CrashError
        if self._is_calm:
            return
        self._store.meanwhile()
        self._die_by_chance()
        if self._store.random.random() < self._store.odds.fails:
            raise _failure(name)

    def _write(self, name: str, do: Callable[[], None]) -> None:
        self._before(name)
        luck, odds = self._store.random.random(), self._store.odds
        if not self._is_calm and luck < odds.late:
            self._store.late.append(lambda: _quietly(do))
            raise _failure(name)
        do()
        if not self._is_calm:
            self._die_by_chance()
            if odds.late <= luck < odds.late + odds.lies:
                raise _failure(name)

    def _die_by_chance(self) -> None:
        if self._store.random.random() < self._store.odds.crash / 2:
            self._is_dead = True
            raise CrashError


def _quietly(do: Callable[[], None]) -> None:
    try:
        do()
    except BlobExistsError:
        return


def _failure(name: str) -> StoreFailedError:
    return StoreFailedError(f"the object store failed at {name}", "try again")
