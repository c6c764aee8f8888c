"""PacedStore: a BlobStore that calls a function before each request, to count or delay it.

Requests are what object stores bill and rate-limit: a put, a get, a find, each object of a
deletion, each page of a listing. Retries and other requests that the store's package makes by
itself are not seen here.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from shared.blobs.blob_store import Blob, BlobStore, Data

Request = Literal["put", "get", "find", "delete", "list"]


class PacedStore:
    """A wrapper around a BlobStore that reports each request before it is made.

    Args:
        store: the wrapped store.
        before: called with the kind of each request, in the thread that makes it; its exceptions
            are passed on, and the request is not made.
    """

    def __init__(self, store: BlobStore, before: Callable[[Request], None]) -> None:
        self._store = store
        self._before = before

    @property
    def keeps(self) -> bool:
        """Whether the wrapped store keeps its objects."""
        return self._store.keeps

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        """Store an object."""
        self._before("put")
        self._store.put(name, data, if_absent=if_absent)

    def get(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Return an object, or a part of it."""
        self._before("get")
        return self._store.get(name, start, num_bytes)

    def view(self, name: str) -> memoryview:
        """Return an object without copying it, if the store can."""
        self._before("get")
        return self._store.view(name)

    def find(self, name: str) -> Blob | None:
        """Return an object's name, size and time."""
        self._before("find")
        return self._store.find(name)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, one after the other."""
        for name in names:
            self._before("delete")
            self._store.delete([name])

    def list(self, prefix: str) -> Iterator[Sequence[Blob]]:
        """Yield objects, a page at a time."""
        self._before("list")
        for number, page in enumerate(self._store.list(prefix)):
            if number:  # only now it is known that there was another page
                self._before("list")
            yield page
