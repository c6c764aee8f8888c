"""Tokens: making, writing and reading them, and the digests that the settings keep."""

import os
from hashlib import sha256
from pathlib import Path

from shared.types.errors import InvalidInputError

PREFIX = "kvt_"  # so that a scanner for leaked secrets can find one
TOKEN_BYTES = 32


class TokenFileError(InvalidInputError):
    """A token cannot be written to a file, or read from it."""

    reason = "token_file"


def new_token() -> str:
    """Return a new random token."""
    import secrets  # imported late, because clients that only read tokens do without

    return PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def token_digest(token: str) -> str:
    """Return a token's SHA-256 in hex, as in the settings: clients.NAME.token_sha256."""
    return sha256(token.encode()).hexdigest()


def make_token(file: Path | None) -> dict[str, str]:
    """Make a token, in a new file if one is named.

    Returns:
        The values to show, by name: "token" or "file", and "token_sha256".

    Raises:
        TokenFileError: the file exists already, or cannot be made.
    """
    token = new_token()
    shown = {"token": token}
    if file is not None:
        write_token(file, token)
        shown = {"file": str(file)}
    return {**shown, "token_sha256": token_digest(token)}


def token_text(name: str, token: dict[str, str]) -> str:
    """Return the result of `make_token` as text, with a client's table for the settings."""
    kind, value = next(iter(token.items()))
    return (
        f"{kind}: {value}\n\n[clients.{name}]\n"
        f'token_sha256 = ["{token["token_sha256"]}"]\ntenants = ["default"]'
    )


def write_token(path: Path, token: str) -> None:
    """Write a token to a new file that only this user can read.

    Raises:
        TokenFileError: the file exists already, or cannot be made.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(token + "\n")
    except OSError as error:
        raise TokenFileError(
            f"cannot create the token file {path} ({error.strerror})",
            "name a file that does not exist yet, in a directory that this user may write to",
        ) from error


def read_token(path: Path) -> str:
    """Read a token from its file.

    Raises:
        TokenFileError: the file cannot be read, or holds no token.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenFileError(
            f"cannot read the token file {path}", "let this user read it, or name another file"
        ) from error
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise TokenFileError(
            f"the token file {path} contains no token", "create one with: kvd token --file FILE"
        )
    return token
