"""Sealed parts open in their place only."""

from shared.encryption.sealing import TAG_BYTES, Seal, new_salt, unwrap, wrap


def test_parts_open_in_their_place_only():
    """A part does not open as another part, of another object, or with other bound data."""
    key, salt = b"k" * 32, new_salt()
    sealed = memoryview(bytearray(5 + TAG_BYTES))
    Seal(key, salt).seal_into(3, b"bytes", sealed, b"bound")
    assert Seal(key, salt).open(3, sealed, b"bound") == b"bytes"
    others = (
        Seal(key, salt).open(2, sealed, b"bound"),
        Seal(key, salt).open(3, sealed, b"other"),
        Seal(key, new_salt()).open(3, sealed, b"bound"),
        Seal(b"K" * 32, salt).open(3, sealed, b"bound"),
    )
    assert others == (None,) * 4
    assert unwrap(key, wrap(key, b"secret", b"x"), b"y") is None
    assert wrap(key, b"secret", b"x") != wrap(key, b"secret", b"x")
