"""Resident sequences: what a session's next turn can build on, and what goes back to the pool."""

import pytest
import torch

from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.sequence_kv import LayerShape
from inference_svc.runtime.transfer.compaction import Compactor
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from inference_svc.runtime.worker_thread import WorkerThread
from shared.types.session_key import SessionKey

KEY = SessionKey("default", "m", "s")
BLOCK_TOKENS = 4
NUM_ROWS = 200


@pytest.fixture
def pool():
    shapes = [LayerShape((1, 8), (1, 8)), LayerShape((2, 4), (1, 8))]
    return KVPool(shapes, NUM_ROWS, device=torch.device("cpu"), dtype=torch.float32)


def numbered_buffer(pool, first_token, end_token):
    """A write buffer whose rows hold their own positions."""
    buffer = pool.new_write_buffer(first_token, 50)
    for token in range(first_token, end_token):
        for views in buffer.cut(token, 1):
            for view in views:
                view.fill_(token)
    buffer.end_token = end_token
    return buffer


def positions(buffer, first_token, end_token):
    """What the rows hold, the same in all layers, keys and values."""
    found = set()
    for views in buffer.cut(first_token, end_token - first_token):
        found |= {tuple(view.flatten(1)[:, 0].int().tolist()) for view in views}
    assert len(found) == 1
    return list(found.pop())


@pytest.mark.parametrize(("first_token", "end_token"), [(0, 10), (3, 13), (0, 8), (6, 7)])
def test_the_next_buffer_begins_with_the_rows_of_the_partial_block(pool, first_token, end_token):
    """Growing that block stores its tokens again; the old buffer may be long gone by then."""
    residents = ResidentSequences(pool, BLOCK_TOKENS)
    buffer = numbered_buffer(pool, first_token, end_token)
    residents.put(KEY, pool.new_kv(60), end_token, buffer)
    pool.release(buffer)
    numbered_buffer(pool, 100, 140)  # reuses its memory
    resident = residents.take(KEY)
    following = residents.next_buffer(resident, end_token, 60)
    boundary = end_token - (end_token - first_token) % BLOCK_TOKENS
    assert following.first_token == boundary
    assert following.end_token == end_token
    if end_token > boundary:
        assert positions(following, boundary, end_token) == list(range(boundary, end_token))


def test_rows_whose_position_free_keys_are_gone_are_not_built_on(pool):
    """Fewer tokens than the tail has are rounded down to a block."""
    residents = ResidentSequences(pool, BLOCK_TOKENS)
    residents.put(KEY, pool.new_kv(60), 14, numbered_buffer(pool, 0, 14))
    resident = residents.get(KEY)
    assert [residents.usable_tokens(resident, n) for n in (14, 13, 12, 11, 8, 5, 3)] == [
        *(14, 13, 12),
        *(8, 8, 4, 0),
    ]
    assert residents.next_buffer(resident, 8, 60).first_token == 8


def test_without_saving_there_is_no_tail(pool):
    """All rows can be built on."""
    residents = ResidentSequences(pool, BLOCK_TOKENS)
    residents.put(KEY, pool.new_kv(60), 14, None)
    assert residents.usable_tokens(residents.get(KEY), 14) == 14


def test_a_released_resident_gives_everything_back(pool):
    """Sequence KV and tail."""
    residents = ResidentSequences(pool, BLOCK_TOKENS)
    buffer = numbered_buffer(pool, 0, 10)
    residents.put(KEY, pool.new_kv(60), 10, buffer)
    pool.release(buffer)
    residents.release(KEY)
    assert pool.num_free == NUM_ROWS


@pytest.fixture
def compactor(tiny):
    """Of a model, on a thread of their own."""
    thread = WorkerThread("compact")
    yield Compactor(tiny("llama").calibration, thread)
    thread.close()


async def test_after_a_discard_the_next_buffer_begins_behind_what_is_left(tiny, compactor):
    """What a discard has touched never grows: the position-free rows of its end are not needed."""
    pool = KVPool(
        [layer.shape for layer in tiny("llama").calibration.layers],
        NUM_ROWS,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    residents = ResidentSequences(pool, BLOCK_TOKENS)
    buffer = pool.new_write_buffer(0, 14)
    buffer.end_token = 14
    residents.put(KEY, pool.new_kv(60), 14, buffer)
    pool.release(buffer)
    assert await residents.discard(KEY, [(2, 5), (8, 14)], compactor) == 9
    resident = residents.get(KEY)
    assert (resident.kv.num_tokens, resident.tail_from, resident.tail) == (9, 9, None)
    assert residents.next_buffer(resident, 9, 60).first_token == 9
    residents.release(KEY)
