"""ObjectBlobStore: the BlobStore over obstore: S3, Google Cloud Storage, Azure, local directories.

Credentials and endpoints come from the environment, under obstore's names (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_NAME and so on). None is ever part
of an error message: obstore's text is cut after its first line, as later lines may hold requests.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote

from shared.blobs.blob_store import (
    Blob,
    BlobExistsError,
    BlobMissingError,
    BlobStore,
    Data,
    StoreDeniedError,
    StoreFailedError,
    StoreMissingError,
    StoreUrlError,
    bad_url,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PAGE = 1000  # objects in a page of a listing: the size of S3's pages
LOOKS = 1000  # most listings of a directory that keeps changing while nothing is found in it
STILL_NS = 20_000_000  # unchanged for so long, a directory is still: file times tick by some ms
LOOK_S = 0.002  # between two listings
MAX_WHY = 160  # characters of the store's own message
_PRIVATE = 0o700


def open_bucket(parts: SplitResult, patience_s: float | None) -> BlobStore:
    """Open a store of S3, Google Cloud Storage or Azure; see shared/blobs/opening.py."""
    _check_installed()
    if not parts.netloc:
        raise bad_url("names no bucket")
    from obstore.store import from_url

    with _translated(parts.netloc):
        return ObjectBlobStore(from_url(parts.geturl(), **_bounds(patience_s)))


def _bounds(patience_s: float | None) -> dict[str, Any]:
    """Return obstore's options that bound the time of a request and its retries."""
    if patience_s is None:
        return {}
    most = timedelta(seconds=patience_s)
    return {
        "client_options": {"timeout": most, "connect_timeout": most},
        "retry_config": {"max_retries": 2, "retry_timeout": most},
    }


def open_directory(parts: SplitResult, _patience_s: float | None) -> BlobStore:
    """Open a local directory, and create it if needed; see shared/blobs/opening.py."""
    _check_installed()
    from obstore.store import LocalStore

    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or path == "/":
        raise bad_url("does not name a directory below the root")
    directory = Path(path)
    try:
        directory.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUrlError(
            f"cannot create the directory {directory} ({error.strerror})",
            "name a directory that this user may create",
        ) from error
    return DirectoryBlobStore(LocalStore(directory), directory)


def _check_installed() -> None:
    """Raise StoreMissingError if obstore is not installed."""
    try:
        import obstore.store  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise StoreMissingError(
            "the package obstore is not installed", "run: pip install 'cachedattention[remote]'"
        ) from error


class ObjectBlobStore:
    """A BlobStore over a store of obstore.

    Args:
        store: obstore's store.
    """

    keeps = True

    def __init__(self, store: "ObjectStore") -> None:
        import obstore

        self._store = store
        self._api = obstore

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        """Store an object."""
        with _translated(name):
            self._api.put(
                self._store,
                name,
                data,
                mode="create" if if_absent else "overwrite",
                use_multipart=False,
            )

    def get(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Return an object, or a part of it."""
        if num_bytes == 0:
            return b""
        if not start and num_bytes is None:
            return bytes(self.view(name))
        with _translated(name):
            found = self._api.head(self._store, name)["size"]
            end = found if num_bytes is None else min(found, start + num_bytes)
            if start >= end:
                return b""
            return self._api.get_range(self._store, name, start=start, end=end).to_bytes()

    def view(self, name: str) -> memoryview:
        """Return an object in obstore's buffer, without a copy."""
        with _translated(name):
            return memoryview(self._api.get(self._store, name).bytes())

    def find(self, name: str) -> Blob | None:
        """Return an object's name, size and time."""
        try:
            with _translated(name):
                found = self._api.head(self._store, name)
        except BlobMissingError:
            return None
        return Blob(name, found["size"], found["last_modified"].timestamp())

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects."""
        for name in names:
            try:
                with _translated(name):
                    self._api.delete(self._store, name)
            except BlobMissingError:  # only local directories report it
                continue

    def list(self, prefix: str) -> Iterator[Sequence[Blob]]:
        """Yield objects, a page at a time."""
        with _translated(prefix):
            for page in self._api.list(self._store, prefix.rstrip("/"), chunk_size=PAGE):
                yield [
                    Blob(found["path"], found["size"], found["last_modified"].timestamp())
                    for found in page
                ]


class DirectoryBlobStore(ObjectBlobStore):
    """Objects in a local directory, whose listings are not atomic.

    Args:
        store: obstore's store of the directory.
        directory: its path.
    """

    def __init__(self, store: "ObjectStore", directory: Path) -> None:
        super().__init__(store)
        self._directory = directory

    def list(self, prefix: str) -> Iterator[Sequence[Blob]]:
        """Yield objects, a page at a time.

        When one object replaces another, a listing may miss both: the new one did not exist yet,
        and the old one no longer does. So an empty listing counts only if the directory has not
        changed meanwhile.
        """
        last_ns, seen_ns = -1, 0
        for _ in range(LOOKS):
            changed_ns, is_nothing = self._changed_ns(prefix), True
            if changed_ns != last_ns:
                last_ns, seen_ns = changed_ns, time.monotonic_ns()
            # Still by its own time, or by our clock: the directory may be another machine's.
            is_still = changed_ns < time.time_ns() - STILL_NS
            is_still = is_still or time.monotonic_ns() - seen_ns > STILL_NS
            for page in super().list(prefix):
                is_nothing = is_nothing and not page
                yield page
            if not is_nothing or (is_still and self._changed_ns(prefix) == changed_ns):
                return
            time.sleep(LOOK_S)
        raise StoreFailedError(
            f"the objects under {prefix} change all the time, so they cannot be listed",
            "find out which process writes there",
        )

    def _changed_ns(self, prefix: str) -> int:
        """Return the Unix time of a directory's last change, in nanoseconds; 0: it is missing."""
        with suppress(OSError):
            return (self._directory / prefix).stat().st_mtime_ns
        return 0


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Translate obstore's exceptions into those of blob_store.py."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        raise BlobMissingError(
            f"the object store has no {name}", "list what it has with: kvd remote ls"
        ) from error
    except exceptions.AlreadyExistsError as error:
        raise BlobExistsError(
            f"the object store already has {name}", "read it again, then decide"
        ) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise StoreDeniedError(
            f"the object store refuses these credentials ({name})",
            "check the credentials in the environment, and what they are permitted to do",
        ) from error
    except (exceptions.BaseError, OSError, ValueError) as error:
        raise StoreFailedError(
            f"the object store failed at {name} ({_why(error)})",
            "check that the object store works, and try again",
        ) from error


def _why(error: Exception) -> str:
    """Return the first line of an error: further lines hold requests, which may have secrets."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:MAX_WHY].partition("?")[0]
