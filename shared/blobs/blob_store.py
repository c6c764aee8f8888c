"""BlobStore: the interface of an object store (named bytes, whole or not at all), and its errors.

There is no conditional replacement, only creation if absent: local directories and many stores that
speak S3 offer no more, and versions with names of their own need no more (register.py). Names are
words of ASCII letters, digits, "-" and ".", with "/" between them. Stores are thread-safe.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from shared.types.errors import (
    ConfigError,
    ConflictError,
    DeniedError,
    InvalidInputError,
    NotFoundError,
    StateError,
    UnavailableError,
)

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


# ------------------------------------------------------------------------------------- errors


class StoreUrlError(InvalidInputError):
    """The URL of a remote store is invalid."""

    reason = "store_url"


def bad_url(what: str) -> StoreUrlError:
    """Return the error for an invalid URL; `what` completes "the URL of the store …"."""
    return StoreUrlError(
        f"the URL of the store {what}",
        "write it as s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, "
        "mooncake://MASTER:PORT/PREFIX or file:///DIRECTORY",
    )


class StoreMissingError(ConfigError):
    """The package for a remote store is not installed."""

    reason = "store_missing"


class StoreSettingsError(ConfigError):
    """A variable of the environment has an invalid value for a remote store."""

    reason = "store_settings"


class StoreFailedError(UnavailableError):
    """A remote store did not answer or failed; the request may have had an effect all the same."""

    reason = "store_failed"


class StoreDeniedError(DeniedError):
    """A remote store refuses these credentials, or does not permit this request to them."""

    reason = "store_denied"


class UnfitStoreError(StateError):
    """A remote store cannot be used: it has another version's objects, or guarantees too little."""

    reason = "unfit_store"


class BlobMissingError(NotFoundError):
    """An object does not exist."""

    reason = "blob_missing"


class BlobDamagedError(StateError):
    """An object's bytes are not those that were stored."""

    reason = "blob_damaged"


class BlobExistsError(ConflictError):
    """An object that was to be created exists already."""

    reason = "blob_exists"


class OvertakenError(ConflictError):
    """Another writer has replaced a value meanwhile."""

    reason = "overtaken"
