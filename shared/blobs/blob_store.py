"""What is asked of an object store: named bytes, made whole or not at all.

There is no replacing under a condition, only making what is not there: local directories and many
stores that speak S3 have no more, and versions with names of their own need no more (register.py).
Names are words of ASCII letters, digits, "-" and ".", with "/" between them. Any thread may call.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

Data = bytes | bytearray


class Blob(NamedTuple):
    """One object of a listing.

    Attributes:
        name: its name.
        num_bytes: its size.
        stored_unix_s: when it was stored, by the store's clock; by the writer's if it has none.
    """

    name: str
    num_bytes: int
    stored_unix_s: float


class BlobStore(Protocol):
    """Every method raises StoreFailedError or StoreDeniedError; then nobody knows what was done.

    Attributes:
        keeps: whether what is there stays until it is removed; else it may be gone at any time.
    """

    @property
    def keeps(self) -> bool:
        """See above."""

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        """Store an object; in place of another one unless `if_absent`.

        Raises:
            BlobExistsError: `if_absent`, and there is one.
        """

    def get(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Return an object, or those of these bytes that it has.

        Raises:
            BlobMissingError: there is none.
            BlobDamagedError: it is not what was put there; not every store knows.
        """

    def view(self, name: str) -> memoryview:
        """Return a large object where it lies, in place of a copy; raises as `get` does."""

    def find(self, name: str) -> Blob | None:
        """Return what a listing would say of an object; None if there is none."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is not there is removed already."""

    def list(self, prefix: str) -> Iterator[Sequence[Blob]]:
        """Yield the objects below a prefix that ends with "/", a page at a time, in any order."""
