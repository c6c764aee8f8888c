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
    """The URL of a remote store names none."""

    reason = "store_url"


def bad_url(what: str) -> StoreUrlError:
    """Return the error of a URL, by what is wrong with it."""
    return StoreUrlError(
        f"the URL of the store {what}",
        "as in s3://BUCKET/PREFIX, gs://, az://, mooncake://MASTER:PORT/PREFIX "
        "or file:///DIRECTORY",
    )


class StoreMissingError(ConfigError):
    """The package that reaches remote stores is not installed."""

    reason = "store_missing"


class StoreSettingsError(ConfigError):
    """The environment says of a remote store what cannot be."""

    reason = "store_settings"


class StoreFailedError(UnavailableError):
    """A remote store did not answer, or did not do what was asked; perhaps it did all the same."""

    reason = "store_failed"


class StoreDeniedError(DeniedError):
    """A remote store does not let these credentials in, or not do this."""

    reason = "store_denied"


class UnfitStoreError(StateError):
    """A remote store cannot keep sessions: it is another version's, or promises too little."""

    reason = "unfit_store"


class BlobMissingError(NotFoundError):
    """There is no object of this name."""

    reason = "blob_missing"


class BlobDamagedError(StateError):
    """An object is not what was put there."""

    reason = "blob_damaged"


class BlobExistsError(ConflictError):
    """There is an object of this name, and there was to be none."""

    reason = "blob_exists"


class OvertakenError(ConflictError):
    """Somebody else has replaced a value meanwhile."""

    reason = "overtaken"
