"""open_store: open the object store that a URL names, by its scheme."""

from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit

from shared.blobs.blob_store import BlobStore, StoreUrlError, bad_url
from shared.blobs.mooncake_store import open_mooncake
from shared.blobs.object_store import open_bucket, open_directory

OPENERS: dict[str, Callable[[SplitResult, float | None], BlobStore]] = {
    "s3": open_bucket,
    "gs": open_bucket,
    "az": open_bucket,
    "file": open_directory,
    "mooncake": open_mooncake,
}


def open_store(url: str, patience_s: float | None = None) -> BlobStore:
    """Open the store that a URL names; it is contacted at the first call only.

    Args:
        url: s3://BUCKET/PREFIX, gs://…, az://CONTAINER/PREFIX, mooncake://MASTER:PORT/PREFIX or
            file:///DIRECTORY, which is created if needed.
        patience_s: most seconds of a request with all its retries, where the package can be told;
            None: the package's own bound, which may be minutes.

    Raises:
        StoreUrlError: the URL names no store.
        StoreMissingError: the package for this store is not installed.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise bad_url("is not valid") from error
    if parts.scheme not in OPENERS:
        raise bad_url(f"has the unknown scheme {parts.scheme[:20]!r}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise StoreUrlError(
            "the URL of the store contains more than a place and a prefix",
            "pass credentials in the environment, such as AWS_ACCESS_KEY_ID",
        )
    return OPENERS[parts.scheme](parts, patience_s)
