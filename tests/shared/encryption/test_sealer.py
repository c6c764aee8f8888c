"""Values are sealed with the newest key, open with any, and only in their place."""

import pytest

from shared.encryption.key_file import KeyFileError, new_key, write_key
from shared.encryption.sealer import MARK, KeyMissingError, SealBrokenError, Sealer

DATA = b"what was said" * 50


def test_without_a_key_values_are_plain():
    assert Sealer().seal(DATA, "here") == DATA
    assert Sealer().open(DATA, "here") == DATA
    assert Sealer([new_key()]).open(DATA, "here") == DATA, "from before there was a key"


def test_a_sealed_value_opens_in_its_place():
    sealer = Sealer([new_key()])
    value = sealer.seal(DATA, "here")
    assert DATA[:13] not in value
    assert sealer.seal(DATA, "here") != value
    assert sealer.open(value, "here") == DATA
    with pytest.raises(SealBrokenError):
        sealer.open(value, "there")


@pytest.mark.parametrize("at", range(len(MARK), len(MARK) + 16 + 32 + 16, 7))
def test_a_changed_value_does_not_open(at):
    sealer = Sealer([new_key()])
    value = bytearray(sealer.seal(b"", "here"))
    value[at] ^= 1
    with pytest.raises((SealBrokenError, KeyMissingError)):
        sealer.open(bytes(value), "here")


def test_a_truncated_value_does_not_open():
    sealer = Sealer([new_key()])
    value = sealer.seal(DATA, "here")
    for length in range(len(MARK), len(value), 61):
        with pytest.raises((SealBrokenError, KeyMissingError)):
            sealer.open(value[:length], "here")


def test_old_keys_open_but_do_not_seal():
    old, new = new_key(), new_key()
    value = Sealer([old]).seal(DATA, "here")
    both = Sealer([new, old])
    assert both.open(value, "here") == DATA
    with pytest.raises(KeyMissingError, match=old.fingerprint):
        Sealer([new]).open(value, "here")
    with pytest.raises(KeyMissingError, match=new.fingerprint):
        Sealer([old]).open(both.seal(DATA, "here"), "here")
    with pytest.raises(KeyMissingError, match=old.fingerprint):
        Sealer().open(value, "here")


def test_a_plain_value_can_be_refused():
    """Once all are sealed: otherwise a writer decides what a value is."""
    key = new_key()
    sealer = Sealer([key], takes_plain=False)
    with pytest.raises(SealBrokenError):
        sealer.open(DATA, "here")
    assert sealer.open(Sealer([key]).seal(DATA, "here"), "here") == DATA
    assert Sealer(takes_plain=False).open(DATA, "here") == DATA, "there is no key"


def test_keys_are_read_from_their_files(tmp_path):
    old, new = new_key(), new_key()
    write_key(tmp_path / "old", old)
    write_key(tmp_path / "new", new)
    files = str(tmp_path / "new"), [str(tmp_path / "old")]
    assert Sealer.of_files(*files).open(Sealer([old]).seal(DATA, "x"), "x") == DATA
    assert Sealer([new]).open(Sealer.of_files(*files).seal(DATA, "x"), "x") == DATA
    assert Sealer.of_files("").seal(DATA, "x") == DATA
    with pytest.raises(KeyFileError):
        Sealer.of_files(str(tmp_path / "nowhere"))
