"""Sealed extents: all but the key's name is encrypted, and changed bytes do not open."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.records.actions import IoOutcome
from kvd.core.records.extent_shape import ExtentShape
from kvd.encryption.keyring import Keyring
from kvd.tiers.direct_io import STAGED_IO_BYTES, Staging
from kvd.tiers.extent_format import ExtentFormat
from kvd.tiers.sealed_extents import SEALED_MAGIC, SealedFormat
from shared.encryption.key_file import new_key
from shared.encryption.sealing import TAG_BYTES, key_id
from shared.types.kv_layout import Component, KVLayout, Layer
from tests.kvd.tiers.disk import LAYOUT, TENANT, Block, Disk, new_slot
from tests.sampled import examples

SHAPE = ExtentShape(LAYOUT)
WHOLE = SHAPE.sectors_per_extent
EXTENT = SHAPE.full_bytes
OTHER = "other"


def new_keys(*, is_sealing=True) -> Keyring:
    keys = Keyring(new_key(), is_sealing=is_sealing)
    for tenant in (TENANT, OTHER):
        keys.create(tenant)
    return keys


@pytest.fixture
def sealed(disk):
    """Return volumes that seal, in an empty directory."""
    disk.keys = new_keys()
    disk.volume()
    return disk


def _content(disk) -> bytes:
    return (disk.directory / "v" / "00000.segment").read_bytes()


def _windows(data: bytes, size: int = 16) -> set[bytes]:
    """Return all aligned pieces of random bytes, without zeros."""
    return {data[i : i + size] for i in range(0, len(data) - size + 1, size)} - {bytes(size)}


@settings(max_examples=examples(40), deadline=None)
@given(
    num_tokens=st.integers(1, LAYOUT.block_tokens),
    layered=st.booleans(),
    direct=st.sampled_from(["auto", "off"]),
)
def test_sealed_blocks_round_trip(num_tokens, layered, direct):
    """A block is read with its header, by the next volume, too; no other block is."""
    with tempfile.TemporaryDirectory() as directory:
        disk = Disk(Path(directory))
        disk.keys = new_keys()
        disk.volume(direct=direct)
        block = Block(num_tokens)
        assert disk.write(WHOLE, block) is IoOutcome.OK
        for _ in range(2):
            slot = new_slot()
            assert disk.read(WHOLE, block, slot, layered=layered) == (IoOutcome.OK, block.stored)
            assert block.is_in(slot)
            used = sum(byte != 0 for byte in bytes(slot))
            assert used <= LAYOUT.token_bytes * num_tokens
            assert disk.read(WHOLE, block, None) == (IoOutcome.OK, block.stored)
            disk.volume(direct=direct)
        disk.close()


@pytest.mark.parametrize("num_tokens", [16, 5])
def test_no_part_of_a_block_is_on_disk_in_plain(sealed, num_tokens):
    """Neither rows, token ids, checksums, block key nor the slot's unused parts."""
    block = Block(num_tokens)
    sealed.write(0, block)
    content = _content(sealed)
    pieces = _windows(block.stored.token_ids) | _windows(block.stored.checksums)
    pieces |= _windows(bytes(block.slot)) | {block.key}
    assert not [piece for piece in pieces if piece in content]
    assert content.startswith(SEALED_MAGIC)


def test_a_run_of_blocks_is_sealed_block_by_block(sealed):
    """Blocks that are written together are read separately, each with its own tenant's key."""
    volume = sealed.made[-1]
    blocks = [Block() for _ in range(3)]
    run = [block.at(index * WHOLE) for index, block in enumerate(blocks)]
    run[1] = run[1]._replace(tenant=OTHER)
    assert volume.sync([volume.write(run, sealed.staging)]) == [IoOutcome.OK]
    sealed.keys.forget(OTHER)
    for index, block in enumerate(blocks):
        slot = new_slot()
        outcome, _ = sealed.read(index * WHOLE, block, slot)
        assert outcome is (IoOutcome.CORRUPT if index == 1 else IoOutcome.OK)
        assert block.is_in(slot) == (index != 1)


def test_large_blocks_are_sealed_in_groups(disk):
    """A block larger than the staging buffer passes through it piece by piece."""
    layers = tuple(Layer((Component("k", (1 << 13,), "float32"),)) for _ in range(24))
    layout = KVLayout("cd" * 16, layers, block_tokens=16)  # slices of 512 KiB
    disk.keys = new_keys()
    disk.volume(layout=layout, extents_per_segment=2)
    full, partial = Block(16, layout), Block(15, layout)
    for extent, block in ((0, full), (disk.made[-1].shape.sectors_per_extent, partial)):
        assert disk.write(extent, block) is IoOutcome.OK
        for layered in (True, False):
            slot = new_slot(layout)
            assert disk.read(extent, block, slot, layered=layered) == (IoOutcome.OK, block.stored)
            assert block.is_in(slot)
    sizes = [len(piece) for _, piece in _pieces(layout, disk.keys, full)]
    assert len(sizes) == 3
    assert max(sizes) <= STAGED_IO_BYTES + SHAPE.header_bytes


def _pieces(layout, keys, block):
    sealed = SealedFormat(ExtentFormat(layout), keys)
    return [(offset, bytes(piece)) for offset, piece in sealed.pieces([block.at(0)], Staging())]


def test_no_key_is_used_with_a_nonce_twice(sealed):
    """Writing a block again gives other bytes everywhere, though block and tenant are the same."""
    block = Block()
    first, second = (_pieces(LAYOUT, sealed.keys, block)[0][1] for _ in range(2))
    start = SHAPE.header_bytes
    assert first[:32] == second[:32]  # magic and the key's name
    for layer in range(len(LAYOUT.layers)):
        used = ExtentFormat(LAYOUT).used_bytes(layer, block.num_tokens)
        if used:
            ours, others = first[start : start + used], second[start : start + used]
            assert sum(a == b for a, b in zip(ours, others, strict=True)) < used / 16
        start += SHAPE.slice_bytes(layer, block.num_tokens)


# ------------------------------------------------------------------------------- wrong bytes


@pytest.mark.parametrize("num_tokens", [16, 5])
def test_a_flipped_bit_is_corrupt(sealed, num_tokens):
    """Anywhere but in padding, in each way of reading."""
    block = Block(num_tokens)
    sealed.write(0, block)
    path = sealed.directory / "v" / "00000.segment"
    good = path.read_bytes()
    header_end = 64 + (TAG_BYTES + 8) * len(LAYOUT.layers) + 4 * num_tokens + TAG_BYTES
    positions = [0, 4, 16, 40, 70, header_end - 1]
    start = SHAPE.header_bytes
    for layer in range(len(LAYOUT.layers)):
        used = ExtentFormat(LAYOUT).used_bytes(layer, num_tokens)
        positions += [start, start + used - 1] if used else []
        start += SHAPE.slice_bytes(layer, num_tokens)
    for position in positions:
        damaged = bytearray(good)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        for slot in (new_slot(), None):
            for layered in (True, False):
                outcome, _ = sealed.read(0, block, slot, layered=layered)
                assert outcome is IoOutcome.CORRUPT, position


def test_only_the_block_named_by_the_index_opens(sealed):
    """In another's place it is corrupt: other key, length or layout."""
    block = Block()
    sealed.write(0, block)
    for other in (Block(), _like(block, num_tokens=15), _like(block, key=os.urandom(16))):
        assert sealed.read(0, other, new_slot())[0] is IoOutcome.CORRUPT
    layout = KVLayout("ef" * 16, LAYOUT.layers, LAYOUT.block_tokens)
    sealed.volume(layout=layout)
    assert sealed.read(0, block, new_slot())[0] is IoOutcome.CORRUPT


def _like(block, **changes):
    other = Block()
    other.__dict__ |= block.__dict__ | changes
    return other


def test_slices_of_two_writes_do_not_mix(sealed):
    """Slices of a block's earlier write are corrupt under the header of the later one."""
    block = Block()
    path = sealed.directory / "v" / "00000.segment"
    sealed.write(0, block)
    earlier = path.read_bytes()
    sealed.write(0, block)
    later = path.read_bytes()
    assert sealed.read(0, block, new_slot())[0] is IoOutcome.OK
    path.write_bytes(later[: SHAPE.header_bytes] + earlier[SHAPE.header_bytes :])
    assert sealed.read(0, block, new_slot())[0] is IoOutcome.CORRUPT


# ----------------------------------------------------------------------------- keys come and go


def test_without_its_key_an_extent_is_a_miss(sealed):
    """Also with a tenant's new key, another keyring, or a volume without any."""
    block = Block()
    sealed.write(0, block)
    name = key_id(sealed.keys.key_of(TENANT))
    assert name in _content(sealed)
    sealed.keys.create(TENANT)
    assert sealed.read(0, block, new_slot())[0] is IoOutcome.CORRUPT
    for keys in (new_keys(), None):
        sealed.keys = keys
        sealed.volume()
        assert sealed.read(0, block, new_slot())[0] is IoOutcome.CORRUPT


@pytest.mark.parametrize("num_tokens", [16, 5])
@pytest.mark.parametrize("layered", [True, False])
def test_plain_extents_stay_readable(disk, num_tokens, layered):
    """Blocks from before encryption was on are read; so are sealed ones after it is off."""
    disk.volume()
    plain = Block(num_tokens)
    disk.write(0, plain)
    disk.keys = new_keys()
    disk.volume()
    sealed = Block(num_tokens)
    disk.write(WHOLE, sealed)
    disk.keys.is_sealing = False
    disk.volume()
    after = Block(num_tokens)
    disk.write(2 * WHOLE, after)
    for extent, block in ((0, plain), (WHOLE, sealed), (2 * WHOLE, after)):
        slot = new_slot()
        read = disk.read(extent, block, slot, layered=layered)
        assert read == (IoOutcome.OK, block.stored)
        assert block.is_in(slot)
    content = _content(disk)
    magics = [content[i * EXTENT : i * EXTENT + 4] for i in range(3)]
    assert magics == [b"KVDX", SEALED_MAGIC, b"KVDX"]


@pytest.mark.parametrize("num_tokens", [1, 5, 16])
def test_padding_has_no_staged_bytes(sealed, num_tokens):
    """Staging memory may have any tenant's plain rows: padding is zeroed."""
    before = b"\xa5" * (3 * EXTENT)
    sealed.staging.take(len(before))[:] = before
    blocks = [Block(num_tokens) for _ in range(2 if num_tokens == LAYOUT.block_tokens else 1)]
    run = [block.at(index * WHOLE) for index, block in enumerate(blocks)]
    volume = sealed.made[-1]
    assert volume.sync([volume.write(run, sealed.staging)]) == [IoOutcome.OK]
    assert not _windows(_content(sealed)) & _windows(before)


@pytest.mark.parametrize("num_tokens", [16, 1])
def test_a_sealed_extent_is_copied_without_a_key(sealed, num_tokens):
    """The copy opens with the tenant's key, like the original."""
    block = Block(num_tokens)
    assert sealed.write(4 * WHOLE, block) is IoOutcome.OK
    keys, sealed.keys = sealed.keys, None
    volume = sealed.volume()
    copied = volume.copy(4 * WHOLE, 0, num_tokens, sealed.staging)
    assert volume.sync([copied]) == [IoOutcome.OK]
    sealed.keys = keys
    sealed.volume()
    slot = new_slot()
    assert sealed.read(0, block, slot)[0] is IoOutcome.OK
    assert block.is_in(slot)
