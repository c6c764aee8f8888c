"""The queue of blocks to be written: the extents it needs are known at any time."""

from kvd.core.state.block import Block
from kvd.core.state.extents import ExtentTable
from kvd.core.state.under_way import WriteQueue
from tests.property.cache_world import BLOCK_TOKENS, SHAPE

PARTIAL = 1  # tokens: such blocks are packed


def queue_of(sizes: list[int], num_extents: int) -> tuple[WriteQueue, list[Block]]:
    """Make a queue of blocks of so many tokens each."""
    queue = WriteQueue(SHAPE, ExtentTable(num_extents, SHAPE.sectors_per_extent))
    blocks = [Block(bytes([number]) * 16, num_tokens) for number, num_tokens in enumerate(sizes)]
    for block in blocks:
        queue.add(block)
    return queue, blocks


def test_each_whole_block_needs_an_extent():
    """A block that is taken out needs none; free extents, and those about to be, are available."""
    queue, blocks = queue_of([BLOCK_TOKENS] * 5, num_extents=1)
    assert [queue.num_short(num_freed) for num_freed in (0, 1, 4, 9)] == [4, 3, 0, 0]
    for num_short, block in zip((3, 2, 1, 0, 0), blocks, strict=True):
        queue.discard(block)
        queue.discard(block)
        assert queue.num_short(0) == num_short
    assert not len(queue)


def test_partial_blocks_share_an_extent():
    """As many as fit into one."""
    assert SHAPE.sectors_per_extent // SHAPE.num_sectors(PARTIAL) == 2
    queue, blocks = queue_of([PARTIAL] * 5, num_extents=0)
    assert queue.num_short(0) == 2, "as if they fitted without gaps"
    queue.discard(blocks[0])
    queue.discard(blocks[1])
    queue.discard(blocks[2])
    assert queue.num_short(0) == 1


def test_a_block_waits_once_however_often_it_is_added():
    """It keeps its place."""
    queue, blocks = queue_of([BLOCK_TOKENS] * 2, num_extents=0)
    queue.add(blocks[0])
    assert (queue.oldest, queue.newest) == (blocks[0], blocks[1])
    assert (list(queue), queue.num_short(0)) == (blocks, 2)


def test_partial_blocks_use_free_parts_of_extents():
    """Only those that do not fit there need another extent."""
    extents = ExtentTable(1, SHAPE.sectors_per_extent)
    extents.allocate(SHAPE.num_sectors(PARTIAL))
    queue = WriteQueue(SHAPE, extents)
    blocks = [Block(bytes([number]) * 16, PARTIAL) for number in range(2)]
    queue.add(blocks[0])
    assert queue.num_short(0) == 0
    queue.add(blocks[1])
    assert (queue.num_short(0), queue.num_short(1)) == (1, 0)


def test_a_refused_block_waits_no_more_until_it_is_requested():
    """The first refused comes first; a forgotten one is neither waiting nor refused."""
    queue, blocks = queue_of([BLOCK_TOKENS] * 3, num_extents=0)
    for block in blocks[1:]:
        queue.refuse(block)
    assert (list(queue), list(queue.refused.values())) == (blocks[:1], blocks[1:])
    queue.add(blocks[1])
    assert (list(queue), list(queue.refused.values())) == (blocks[:2], blocks[2:])
    for block in blocks:
        queue.forget(block)
    assert (list(queue), list(queue.refused), queue.num_short(0)) == ([], [], 0)
