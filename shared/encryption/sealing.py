"""Sealing: authenticated encryption with AES-256-GCM; only holders of the key can read or make it.

Invariant: no two plaintexts are ever encrypted under the same key and nonce. Each sealed thing has
a key of its own: BLAKE2b, keyed with the long-lived key, of SALT_BYTES random bytes that are drawn
for this thing and stored beside it. Under that key nonces are counted: part n of the thing has
nonce n, and each part is sealed once. 256 random bits do not repeat by chance, however much is
written. And there is no counter that a kill, a restored backup or a cloned machine could set back.

*Source:* a derived key for each message: XAES-256-GCM (C2SP), AES-GCM-SIV (RFC 8452) §4.
"""

import hashlib
import secrets
from typing import TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
SALT_BYTES = 32
TAG_BYTES = 16
KEY_ID_BYTES = 16

_NONCE_BYTES = 12
_PERSON_SEAL = b"kvd seal"
_PERSON_ID = b"kvd key id"

Bytes: TypeAlias = bytes | memoryview


class Seal:
    """The key of one thing, which seals and opens its parts. Thread-safe.

    Args:
        key: the long-lived key.
        salt: the thing's salt, drawn by new_salt.
    """

    def __init__(self, key: bytes, salt: bytes) -> None:
        own = hashlib.blake2b(salt, digest_size=KEY_BYTES, key=key, person=_PERSON_SEAL).digest()
        self._cipher = AESGCM(own)

    def seal_into(self, part: int, data: Bytes, buffer: memoryview, bound: Bytes = b"") -> None:
        """Fill `buffer`, TAG_BYTES longer than `data`, with the sealed part and its tag.

        Args:
            part: the number of the part; each part is sealed once.
            data: the plaintext; must not overlap the buffer.
            buffer: takes the sealed part.
            bound: associated data: not stored, but has to be the same when the part is opened.
        """
        self._cipher.encrypt_into(_nonce(part), data, bound, buffer)

    def open(self, part: int, sealed: Bytes, bound: Bytes = b"") -> bytes | None:
        """Return the plaintext of a sealed part; None if it is not what was sealed."""
        try:
            return self._cipher.decrypt(_nonce(part), sealed, bound)
        except InvalidTag:
            return None

    def open_into(self, part: int, sealed: Bytes, buffer: memoryview) -> bool:
        """Decrypt a part into `buffer`; False, and garbage there, if it is not what was sealed."""
        try:
            self._cipher.decrypt_into(_nonce(part), sealed, b"", buffer)
        except InvalidTag:
            return False
        return True


def new_salt() -> bytes:
    """Return a random salt for one thing that is to be sealed."""
    return secrets.token_bytes(SALT_BYTES)


def key_id(key: bytes) -> bytes:
    """Return the public id of a key, which reveals nothing of it."""
    return hashlib.blake2b(digest_size=KEY_ID_BYTES, key=key, person=_PERSON_ID).digest()


def wrap(key: bytes, secret: bytes, bound: bytes) -> bytes:
    """Seal a small secret as one value: its salt, then the sealed part."""
    salt = new_salt()
    sealed = memoryview(bytearray(len(secret) + TAG_BYTES))
    Seal(key, salt).seal_into(0, secret, sealed, bound)
    return salt + sealed


def unwrap(key: bytes, wrapped: bytes, bound: bytes) -> bytes | None:
    """Undo `wrap`; None if the key or `bound` differs, or the value was changed."""
    if len(wrapped) < SALT_BYTES + TAG_BYTES:
        return None
    return Seal(key, wrapped[:SALT_BYTES]).open(0, wrapped[SALT_BYTES:], bound)


def _nonce(part: int) -> bytes:
    return part.to_bytes(_NONCE_BYTES, "big")
