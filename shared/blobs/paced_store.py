"""A BlobStore that tells of each request before it makes it: who is told counts it, or waits.

Requests are what stores bill, and bound: a put, a get, a find, each object of a deletion, each page
of a listing. What a store's package asks again by itself, or besides, is not told.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from shared.blobs.blob_store import Blob, BlobStore, Data

Request = Literal["put", "get", "find", "delete", "list"]


class PacedStore:
    """See BlobStore and the module docstring.

    Args:
        store: that is asked.
        before: called before each request, in the thread that makes it; what it raises is raised.
    """

    def __init__(self, store: BlobStore, before: Callable[[Request], None]) -> None:
        self._store = store
        self._before = before

    @property
    def keeps(self) -> bool:
        """As the store does."""
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
        """Return an object where it lies."""
        self._before("get")
        return self._store.view(name)

    def find(self, name: str) -> Blob | None:
        """Return what a listing would say of it."""
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
            if number:  # nobody knew before that there is another one
                self._before("list")
            yield page
