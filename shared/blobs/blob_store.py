"""BlobStore: the interface of an object store: named bytes, stored whole or not at all.

There is no conditional replacement, only creation if absent: local directories and many stores that
speak S3 offer no more, and versions with names of their own need no more (register.py). Names are
words of ASCII letters, digits, "-" and ".", with "/" between them. Stores are thread-safe.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

Data = bytes | bytearray


class Blob(NamedTuple):
    """An object, as a listing describes it.

    Attributes:
        name: its name.
        num_bytes: its size.
        stored_unix_s: Unix time at which it was stored, by the store's clock, or by the writer's
            if the store has none.
    """

    name: str
    num_bytes: int
    stored_unix_s: float


class BlobStore(Protocol):
    """An object store. Every method may raise StoreFailedError or StoreDeniedError.

    After StoreFailedError it is not known whether the call had an effect.

    Attributes:
        keeps: whether objects stay until they are removed; if not, they may go at any time.
    """

    @property
    def keeps(self) -> bool:
        """Whether objects stay until they are removed."""

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        """Store an object; it replaces an existing one unless `if_absent`.

        Raises:
            BlobExistsError: `if_absent`, and the object exists.
        """

    def get(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Return an object, or the range of its bytes, as far as it has them.

        Raises:
            BlobMissingError: the object does not exist.
            BlobDamagedError: its bytes are not those that were stored; not every store can tell.
        """

    def view(self, name: str) -> memoryview:
        """Return a large object without copying it, if the store can; raises like `get`."""

    def find(self, name: str) -> Blob | None:
        """Return an object's name, size and time; None if it does not exist."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; those that do not exist are skipped."""

    def list(self, prefix: str) -> Iterator[Sequence[Blob]]:
        """Yield the objects below a prefix that ends with "/", a page at a time, in any order."""
