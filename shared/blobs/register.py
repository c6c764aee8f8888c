"""A register: a small value in a store that is replaced whole, by one writer at a time.

Its versions are objects PLACE/NUMBER, each made if absent; the highest number counts. A writer
names the version that it has read: it makes the next number, which only one can. Then it looks
whether its own is the newest, and whether there is any that it has not seen: a writer so late that
its number was made and removed again finds out so, and takes its own away.

Invariant: a writer that is told of success has replaced what it had read, and nothing else.
"""

from contextlib import suppress
from dataclasses import dataclass

from shared.blobs.blob_store import Blob, BlobStore
from shared.blobs.errors import (
    BlobExistsError,
    BlobMissingError,
    OvertakenError,
    StoreDeniedError,
    StoreFailedError,
)

TRIES = 5  # to read what is replaced at the same time
_DIGITS = 20


@dataclass(frozen=True)
class Seen:
    """Which versions of a register there were when it was looked at; or may have been.

    Attributes:
        number: of the newest; 0: there was none.
        names: of all.
    """

    number: int = 0
    names: frozenset[str] = frozenset()


NOTHING = Seen()


@dataclass(frozen=True)
class Version:
    """What a register held when it was read.

    Attributes:
        seen: of which version it is, and which others there were.
        data: the value.
        stored_unix_s: when it was stored, by the store's clock.
    """

    seen: Seen
    data: bytes
    stored_unix_s: float


class Register:
    """See the module docstring.

    Args:
        store: where it is.
        place: beginning of its names, without "/" at its end.
    """

    def __init__(self, store: BlobStore, place: str) -> None:
        self._store = store
        self._place = place

    def look(self) -> Seen:
        """Return which versions there are."""
        return _seen(self._blobs())

    def read(self) -> Version | None:
        """Return what it holds; None if nothing.

        Raises:
            OvertakenError: it is replaced again and again.
        """
        for _ in range(TRIES):
            blobs = self._blobs()
            if not blobs:
                return None
            newest = max(blobs, key=number_of)
            with suppress(BlobMissingError):  # replaced between the two calls
                data = self._store.get(newest.name)
                return Version(_seen(blobs), data, newest.stored_unix_s)
        raise self._overtaken()

    def replace(self, before: Seen, data: bytes) -> Seen:
        """Put a value in place of the one that was seen; returns its own version.

        Args:
            before: what there was.
            data: unlike every other value there ever was here.

        Raises:
            OvertakenError: it is not what it was; nothing has changed.
            StoreFailedError: nobody knows whether it was replaced.
        """
        name = self.name_of(before.number + 1)
        self._make(name, data)
        there = {blob.name for blob in self._blobs()}
        if there - before.names - {name}:
            self._store.delete([name])
            raise self._overtaken()
        left = frozenset({name})
        try:
            self._store.delete(sorted(there & before.names))
        except (StoreFailedError, StoreDeniedError):  # a sweep does it
            left |= there
        return Seen(before.number + 1, left)

    def remove(self, seen: Seen) -> None:
        """Remove every version that was seen; nobody may replace one so old any more."""
        newest = self.name_of(seen.number)
        self._store.delete([*sorted(seen.names - {newest}), newest])

    def name_of(self, number: int) -> str:
        """Return the name of a version's object."""
        return f"{self._place}/{number:0{_DIGITS}d}"

    def _make(self, name: str, data: bytes) -> None:
        """Make an object; what its name has afterwards says whether it was made by us."""
        try:
            self._store.put(name, data, if_absent=True)
        except (BlobExistsError, StoreFailedError) as error:
            if self._holds(name, data):
                return  # the first try succeeded, and its answer was lost
            if isinstance(error, BlobExistsError):
                raise self._overtaken() from error
            raise

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            return self._store.get(name) == data
        except BlobMissingError:
            return False

    def _blobs(self) -> list[Blob]:
        pages = self._store.list(f"{self._place}/")
        return [blob for page in pages for blob in page if is_version(blob.name)]

    def _overtaken(self) -> OvertakenError:
        return OvertakenError(f"{self._place} was replaced meanwhile", "try again")


def is_version(name: str) -> bool:
    """Whether an object may be a version: what else lies there is none of ours."""
    number = name.rpartition("/")[2]
    return len(number) == _DIGITS and number.isascii() and number.isdecimal()


def number_of(blob: Blob) -> int:
    """Return the number of a version."""
    return int(blob.name.rpartition("/")[2])


def _seen(blobs: list[Blob]) -> Seen:
    number = max(map(number_of, blobs), default=0)
    return Seen(number, frozenset(blob.name for blob in blobs))
