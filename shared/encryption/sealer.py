"""Sealer: seals whole values with the newest of several keys; older keys only open old values.

    value = "KVDSEAL1", id of the key, salt, sealed bytes and their tag (sealing.wrap)

A value that does not begin with "KVDSEAL1" was stored before there was a key, and is plain.
"""

from collections.abc import Sequence

from shared.encryption.key_file import SecretKey, read_key
from shared.encryption.sealing import KEY_ID_BYTES, key_id, unwrap, wrap

MARK = b"KVDSEAL1"
_HEAD_BYTES = len(MARK) + KEY_ID_BYTES


class KeyMissingError(Exception):
    """A value was sealed with a key that is not configured; the message is its fingerprint."""


class SealBrokenError(Exception):
    """A value was changed since it was sealed, or moved to another place."""


class Sealer:
    """Seals and opens values. Thread-safe.

    Args:
        keys: the keys, newest first; empty: values are stored plain.
        takes_plain: whether plain values may be opened; always so without a key.

    Attributes:
        seals: whether there is a key.
        takes_plain: whether plain values may be opened.
    """

    def __init__(self, keys: Sequence[SecretKey] = (), *, takes_plain: bool = True) -> None:
        self.seals = bool(keys)
        self.takes_plain = takes_plain or not keys
        self._newest = keys[0].key if keys else None
        self._keys = {key_id(key.key): key.key for key in keys}

    @classmethod
    def of_files(
        cls, key_file: str, old_key_files: Sequence[str] = (), *, takes_plain: bool = True
    ) -> "Sealer":
        """Return a sealer with the keys of these files.

        Args:
            key_file: the newest key; "": none, values are stored plain.
            old_key_files: older keys.
            takes_plain: whether plain values may be opened.

        Raises:
            KeyFileError: a key cannot be read.
        """
        keys = [read_key(name) for name in (key_file, *old_key_files) if name]
        return cls(keys, takes_plain=takes_plain)

    def seal(self, data: bytes, bound: str) -> bytes:
        """Return the sealed value to store, different each time; without a key return `data`.

        Args:
            data: the bytes to seal.
            bound: the place where the value will be stored; it cannot be opened elsewhere.
        """
        if self._newest is None:
            return data
        return MARK + key_id(self._newest) + wrap(self._newest, data, bound.encode())

    def open(self, value: bytes, bound: str) -> bytes:
        """Return the bytes that were sealed in a value.

        Raises:
            KeyMissingError: the value was sealed with a key that is not configured.
            SealBrokenError: it was changed or moved; or it is plain, and that is not allowed.
        """
        if not is_sealed(value):
            if not self.takes_plain:
                raise SealBrokenError
            return value
        name = value[len(MARK) : _HEAD_BYTES]
        key = self._keys.get(name)
        if key is None:
            raise KeyMissingError(name.hex())
        data = unwrap(key, value[_HEAD_BYTES:], bound.encode())
        if data is None:
            raise SealBrokenError
        return data


def is_sealed(value: bytes) -> bool:
    """Whether a value is sealed, with any key."""
    return value.startswith(MARK)


PLAIN = Sealer()  # without a key
