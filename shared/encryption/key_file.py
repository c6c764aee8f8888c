"""Key files: a secret key of 32 random bytes, as one line of 64 hex digits.

The file is needed at every start. A name without "/" is that of a systemd credential, which is in
$CREDENTIALS_DIRECTORY and nowhere on disk in plain text.
"""

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from shared.encryption.sealing import KEY_BYTES, key_id
from shared.types.errors import ConfigError

CREDENTIALS_ENV = "CREDENTIALS_DIRECTORY"
MAX_FILE_BYTES = 1024  # a longer file is not a key file
PRIVATE_MODE = 0o600
_TOO_OPEN = 0o037  # mode bits that are refused: the group may at most read, others may not


class KeyFileError(ConfigError):
    """The file of a key cannot be read, written or used."""

    reason = "key_file"


@dataclass(frozen=True)
class SecretKey:
    """A key from a file: kvd's master key, or the key of transcripts that services share."""

    key: bytes = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """Public name of the key, for messages and the index; it reveals nothing of the key."""
        return key_id(self.key).hex()


def new_key() -> SecretKey:
    """Return a new random key."""
    return SecretKey(secrets.token_bytes(KEY_BYTES))


def is_credential(key_file: str) -> bool:
    """Return whether a setting names a systemd credential, instead of a path."""
    return "/" not in key_file


def read_key(key_file: str) -> SecretKey:
    """Read a key.

    Args:
        key_file: a path, or the name of a systemd credential.

    Raises:
        KeyFileError: the file is missing, others may read it, or it contains no key.
    """
    path = _path_of(key_file)
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise KeyFileError(
            f"cannot read the key file {path} ({error.strerror})",
            f"create one with: kvd key new {path}; or let the user of this process read it",
        ) from error
    if not is_credential(key_file) and mode & _TOO_OPEN:
        raise KeyFileError(
            f"other users may read the key file {path} (mode {mode & 0o777:o})",
            f"run: chmod 600 {path}",
        )
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise KeyFileError(
            f"the key file {path} does not contain {2 * KEY_BYTES} hex digits",
            "name a file that kvd key new has created",
        )
    return SecretKey(key)


def write_key(path: Path, key: SecretKey) -> None:
    """Write a key to a new file that only its owner may read; it is durable when this returns.

    Raises:
        KeyFileError: the file exists, or cannot be created.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_MODE)
        with os.fdopen(fd, "wb") as file:
            file.write(key.key.hex().encode() + b"\n")
            file.flush()
            os.fsync(fd)
    except FileExistsError as error:
        raise KeyFileError(
            f"the key file {path} already exists", "name a new file: overwriting a key loses it"
        ) from error
    except OSError as error:
        raise KeyFileError(
            f"cannot create the key file {path} ({error.strerror})",
            "name a file in a directory that this user may write to",
        ) from error


def _path_of(key_file: str) -> Path:
    """Return the path of a key file or systemd credential."""
    if not is_credential(key_file):
        return Path(key_file)
    directory = os.environ.get(CREDENTIALS_ENV)
    if not directory:
        raise KeyFileError(
            f"systemd passed no credential {key_file!r} (${CREDENTIALS_ENV} is not set)",
            "give a path instead, or have systemd start the process with "
            f"LoadCredential={key_file}:PATH",
        )
    return Path(directory) / key_file
