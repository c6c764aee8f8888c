"""New tokens, and what the settings keep of them."""

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
    """Draw a token that nobody can guess."""
    import secrets  # late: clients read tokens, and do without

    return PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def token_digest(token: str) -> str:
    """Return a token's SHA-256 in hex, as the settings have it: clients.NAME.token_sha256."""
    return sha256(token.encode()).hexdigest()


def make_token(file: Path | None) -> dict[str, str]:
    """Make a token for somebody, in a new file if one is named.

    Returns:
        What is shown of it, by name: "token" or "file", and "token_sha256".

    Raises:
        TokenFileError: the file is there already, or cannot be made.
    """
    token = new_token()
    shown = {"token": token}
    if file is not None:
        write_token(file, token)
        shown = {"file": str(file)}
    return {**shown, "token_sha256": token_digest(token)}


def token_text(name: str, token: dict[str, str]) -> str:
    """Write what `make_token` returns for people, with a client's table for the settings."""
    what, value = next(iter(token.items()))
    return (
        f"{what}: {value}\n\n[clients.{name}]\n"
        f'token_sha256 = ["{token["token_sha256"]}"]\ntenants = ["default"]'
    )


def write_token(path: Path, token: str) -> None:
    """Write a new file that only this user can read.

    Raises:
        TokenFileError: it is there already, or cannot be made.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(token + "\n")
    except OSError as error:
        raise TokenFileError(
            f"cannot make {path} ({error.strerror})", "name a file that does not exist yet"
        ) from error


def read_token(path: Path) -> str:
    """Read a token from its file.

    Raises:
        TokenFileError: there is none.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenFileError(f"cannot read the token file {path}", "name another one") from error
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise TokenFileError(f"{path} holds no token", "make one with: kvd token --file FILE")
    return token
