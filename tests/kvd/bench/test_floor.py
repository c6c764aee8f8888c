"""The floors move the bytes that they claim to move."""

import errno

import pytest

from kvd.bench.floor import Buffer, Copier, DirectFloor

BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 11  # not a multiple of threads or of a segment's extents


def new_floor(directory, num_extents=NUM_BLOCKS):
    return DirectFloor(
        directory,
        header_bytes=4096,
        block_bytes=BLOCK_BYTES,
        num_extents=num_extents,
        segment_bytes=4 * (BLOCK_BYTES + 4096),
        num_threads=3,
    )


def test_the_floor_reads_what_it_wrote(tmp_path):
    written = Buffer(NUM_BLOCKS, BLOCK_BYTES)
    for index in range(NUM_BLOCKS):
        written.block(index)[:4] = index.to_bytes(4, "little")
    expected = [bytes(written.block(index)) for index in range(NUM_BLOCKS)]
    floor = new_floor(tmp_path / "floor")
    floor.open()
    try:
        floor.write(written.block)
        for index in range(NUM_BLOCKS):
            written.block(index)[:] = bytes(BLOCK_BYTES)
        floor.read(written.block)
    finally:
        floor.close()
    assert [bytes(written.block(index)) for index in range(NUM_BLOCKS)] == expected


def test_the_floor_leaves_no_file(tmp_path):
    floor = new_floor(tmp_path / "floor")
    floor.open()
    assert len(list((tmp_path / "floor").iterdir())) == 3
    floor.close()
    assert not list((tmp_path / "floor").iterdir())


def test_a_truncated_file_is_an_error(tmp_path):
    floor = new_floor(tmp_path / "floor")
    floor.open()
    try:
        (tmp_path / "floor" / "00001.floor").write_bytes(b"")
        with pytest.raises(OSError, match="moved only 0 bytes") as caught:
            floor.read(Buffer(NUM_BLOCKS, BLOCK_BYTES).block)
        assert caught.value.errno == errno.EIO
    finally:
        floor.close()


@pytest.mark.parametrize("num_threads", [1, 2, 4, 16])
async def test_a_copy_copies_every_block_on_any_number_of_threads(num_threads):
    source, target = Buffer(NUM_BLOCKS, BLOCK_BYTES), Buffer(NUM_BLOCKS, BLOCK_BYTES)
    for index in range(NUM_BLOCKS):
        target.block(index)[:] = bytes(BLOCK_BYTES)
    copier = Copier(num_threads, BLOCK_BYTES, slice_bytes=16 << 10)
    await copier.copy(target.block, source.block, NUM_BLOCKS)
    copier.close()
    for index in range(NUM_BLOCKS):
        assert target.block(index) == source.block(index)
