"""Register: a small value in an object store that is replaced whole, by one writer at a time.

Its versions are objects PLACE/NUMBER, each created only if absent; the highest number counts. A
writer names the version that it has read, and creates the next number, which only one writer can.
Then it lists the versions. If there is any that it had not seen, it came too late: its number may
have been created and removed by others before. It then removes its own version again.

Invariant: a writer whose `replace` returns has replaced the version that it had read, and no other.
"""

from contextlib import suppress
from dataclasses import dataclass

from shared.blobs.blob_store import (
    Blob,
    BlobExistsError,
    BlobMissingError,
    BlobStore,
    OvertakenError,
    StoreDeniedError,
    StoreFailedError,
)

TRIES = 5  # most reads of a value that is being replaced at the same time
_DIGITS = 20


@dataclass(frozen=True)
class Seen:
    """The versions that a register had, or may have had, when it was listed.

    Attributes:
        number: number of the newest version; 0: there was none.
        names: names of all versions.
    """

    number: int = 0
    names: frozenset[str] = frozenset()


NOTHING = Seen()


@dataclass(frozen=True)
class Version:
    """The value of a register when it was read.

    Attributes:
        seen: the version, and which others there were.
        data: the value.
        stored_unix_s: Unix time at which it was stored, by the store's clock.
    """

    seen: Seen
    data: bytes
    stored_unix_s: float


class Register:
    """A value in a store that is replaced whole.

    Args:
        store: the store.
        place: the beginning of its versions' names, without "/" at its end.
    """

    def __init__(self, store: BlobStore, place: str) -> None:
        self._store = store
        self._place = place

    def look(self) -> Seen:
        """Return the versions that there are."""
        return _seen(self._blobs())

    def read(self) -> Version | None:
        """Return the newest version; None if there is none.

        Raises:
            OvertakenError: it was replaced during each of TRIES reads.
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
        """Replace the version that was seen; returns the new one.

        Args:
            before: the versions that were seen.
            data: the new value; it must differ from every other value that was ever stored here.

        Raises:
            OvertakenError: the register has changed since; this call has changed nothing.
            StoreFailedError: it is not known whether the value was replaced.
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
        except (StoreFailedError, StoreDeniedError):  # a sweep will remove the old versions
            left |= there
        return Seen(before.number + 1, left)

    def remove(self, seen: Seen) -> None:
        """Remove all versions that were seen, the newest one last; no writer may use them still."""
        newest = self.name_of(seen.number)
        self._store.delete([*sorted(seen.names - {newest}), newest])

    def name_of(self, number: int) -> str:
        """Return the name of a version's object."""
        return f"{self._place}/{number:0{_DIGITS}d}"

    def _make(self, name: str, data: bytes) -> None:
        """Create a version; after a failure read it back, to find out whether it is ours."""
        try:
            self._store.put(name, data, if_absent=True)
        except (BlobExistsError, StoreFailedError) as error:
            if self._holds(name, data):
                return  # an earlier try has succeeded, and its answer was lost
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
        return OvertakenError(
            f"{self._place} was replaced by another writer in the meantime", "try again"
        )


def is_version(name: str) -> bool:
    """Whether an object's name is that of a version; other objects are not ours."""
    number = name.rpartition("/")[2]
    return len(number) == _DIGITS and number.isascii() and number.isdecimal()


def number_of(blob: Blob) -> int:
    """Return the number of a version."""
    return int(blob.name.rpartition("/")[2])


def _seen(blobs: list[Blob]) -> Seen:
    number = max(map(number_of, blobs), default=0)
    return Seen(number, frozenset(blob.name for blob in blobs))
