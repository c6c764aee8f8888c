"""Errors of object stores."""

from shared.types.errors import (
    ConfigError,
    ConflictError,
    DeniedError,
    InvalidInputError,
    NotFoundError,
    StateError,
    UnavailableError,
)


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
