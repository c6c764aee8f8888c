"""Sealer: seals whole values by the newest of some keys; the others only open what they sealed.

    value = "KVDSEAL1", id of the key, salt, sealed bytes and their tag (sealing.wrap)

A value that does not begin so was stored before there was a key: it is what it is.
"""

from collections.abc import Sequence

from shared.encryption.key_file import SecretKey, read_key
from shared.encryption.sealing import KEY_ID_BYTES, key_id, unwrap, wrap

MARK = b"KVDSEAL1"
_HEAD_BYTES = len(MARK) + KEY_ID_BYTES


class KeyMissingError(Exception):
    """A value was sealed by a key that is not there; its message is the key's fingerprint."""


class SealBrokenError(Exception):
    """A value is not what was sealed, or not where it was."""


class Sealer:
    """See the module docstring. Any thread.

    Args:
        keys: the newest first; none: values are stored as they are.
        takes_plain: whether values open that were never sealed; without a key they do.

    Attributes:
        seals: whether there is a key.
        takes_plain: see above.
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
        """Read the keys of a setting; "": there is none, and nothing is sealed.

        Raises:
            KeyFileError: a key cannot be read.
        """
        keys = [read_key(name) for name in (key_file, *old_key_files) if name]
        return cls(keys, takes_plain=takes_plain)

    def seal(self, data: bytes, bound: str) -> bytes:
        """Return what to store: with a key sealed, and unlike every other value; else `data`.

        Args:
            data: to be stored.
            bound: where it is stored: it opens nowhere else.
        """
        if self._newest is None:
            return data
        return MARK + key_id(self._newest) + wrap(self._newest, data, bound.encode())

    def open(self, value: bytes, bound: str) -> bytes:
        """Return what was sealed.

        Raises:
            KeyMissingError: by a key that is not there.
            SealBrokenError: it was changed, or is somewhere else; or is plain, and may not be.
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
    """Whether a value is one that was sealed, by whatever key."""
    return value.startswith(MARK)


PLAIN = Sealer()  # there is no key
