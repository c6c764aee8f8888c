"""A stamp tells whether the bytes behind it were stored under this very key."""

from hypothesis import given
from hypothesis import strategies as st

from shared.blobs.stamp import STAMP_BYTES, read_stamp, stamp_bytes

NONCE = b"12345678"


@given(st.text(), st.binary(max_size=100), st.integers(0, 2**64 - 1))
def test_a_stamp_has_the_time_and_the_digest(key: str, data: bytes, unix_ns: int) -> None:
    """It round-trips, and matches its bytes."""
    head = stamp_bytes(key, data, unix_ns, NONCE)
    stamp = read_stamp(key, head)
    assert len(head) == STAMP_BYTES
    assert stamp is not None
    assert (stamp.unix_ns, stamp.num_bytes, stamp.matches(data)) == (unix_ns, len(data), True)
    assert not stamp.matches(data + b"x")


@given(st.binary(min_size=1, max_size=100), st.data())
def test_every_damage_is_detected(data: bytes, draw: st.DataObject) -> None:
    """A flipped bit in the stamp makes it invalid, one in the bytes makes them different."""
    head = stamp_bytes("key", data, 1, NONCE)
    whole = bytearray(head + data)
    bit = draw.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << (bit % 8)
    stamp = read_stamp("key", bytes(whole[:STAMP_BYTES]))
    assert stamp is None or not stamp.matches(bytes(whole[STAMP_BYTES:]))


def test_a_stamp_belongs_to_its_key() -> None:
    """Memory that belongs to another object by now is not taken for this one."""
    head = stamp_bytes("one", b"data", 1, NONCE)
    assert read_stamp("two", head) is None
    assert read_stamp("one", head[:-1]) is None
    assert read_stamp("one", b"") is None
