"""Resident sequences: what a session's next turn can use, and what is freed."""

import pytest
import torch

from inference_svc.core.scheduling.write_slots import WriteSlots
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_tensors import LayerShape
from inference_svc.runtime.kv.write_ring import WriteRing
from inference_svc.runtime.transfer.compaction import Compactor
from inference_svc.runtime.transfer.resident_sequences import ResidentSequences
from inference_svc.runtime.worker_thread import WorkerThread
from shared.types.session_key import SessionKey

KEY = SessionKey("default", "m", "s")
BLOCK_TOKENS = 4
NUM_ROWS = 200
SHAPES = [LayerShape((1, 8), (1, 8)), LayerShape((2, 4), (1, 8))]


def make_ring(num_slots, shapes=SHAPES):
    return WriteRing(shapes, WriteSlots(num_slots), device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def ring():
    return make_ring(50)


@pytest.fixture
def pool():
    return KVPool(SHAPES, NUM_ROWS, device=torch.device("cpu"), dtype=torch.float32)


def numbered_buffer(pool, first_token, end_token):
    """Make a write buffer whose rows contain their own positions."""
    buffer = pool.new_write_buffer(first_token, 50)
    places = buffer.places(first_token, end_token - first_token)
    numbers = torch.arange(first_token, end_token)[:, None, None]
    for rows in (*buffer.keys.layers, *buffer.values.layers):
        places.write(rows, numbers.expand(-1, *rows.shape[1:]).to(rows.dtype))
    buffer.end_token = end_token
    return buffer


def positions(buffer, first_token, end_token):
    """Return the rows' contents, which are equal in all layers, keys and values."""
    found = set()
    places = buffer.places(first_token, end_token - first_token)
    for rows in (*buffer.keys.layers, *buffer.values.layers):
        found.add(tuple(places.read(rows).flatten(1)[:, 0].int().tolist()))
    assert len(found) == 1
    return list(found.pop())


@pytest.mark.parametrize(("first_token", "end_token"), [(0, 10), (3, 13), (0, 8), (6, 7)])
def test_the_next_buffer_begins_with_the_partial_blocks_rows(pool, ring, first_token, end_token):
    """When that block grows its tokens are stored again; the old buffer may be freed by then."""
    residents = ResidentSequences(pool, BLOCK_TOKENS)
    buffer = numbered_buffer(pool, first_token, end_token)
    residents.put(KEY, pool.new_kv(60), end_token, buffer)
    pool.release(buffer)
    numbered_buffer(pool, 100, 140)  # reuses its memory
    resident = residents.take(KEY)
    following = residents.next_buffer(resident, end_token, ring)
    boundary = end_token - (end_token - first_token) % BLOCK_TOKENS
    assert following.first_token == boundary
    assert following.end_token == end_token
    if end_token > boundary:
        assert positions(following, boundary, end_token) == list(range(boundary, end_token))


@pytest.mark.parametrize(("num_tokens", "first_token"), [(8, 8), (6, 8), (1, 4), (0, 0)])
def test_tokens_of_a_stored_block_are_not_saved_again(pool, ring, num_tokens, first_token):
    """The buffer begins behind it, though some of its tokens are recomputed."""
    residents = ResidentSequences(pool, BLOCK_TOKENS)
    assert residents.put(KEY, pool.new_kv(60), 14, numbered_buffer(pool, 0, 14)) == 12
    buffer = residents.next_buffer(residents.get(KEY), num_tokens, ring)
    assert buffer.first_token == buffer.end_token == first_token


def test_without_room_for_the_partial_block_it_stays_short(pool):
    """It is stored already: the next one begins behind it."""
    residents = ResidentSequences(pool, BLOCK_TOKENS)
    residents.put(KEY, pool.new_kv(60), 14, numbered_buffer(pool, 0, 14))
    following = residents.next_buffer(residents.get(KEY), 14, make_ring(1))
    assert (following.first_token, following.end_token, following.room_end) == (14, 14, 14)


@pytest.mark.parametrize(("kept", "left"), [(14, 14), (12, 12), (11, 8), (9, 8), (3, 0)])
def test_an_answer_cut_within_a_stored_block_keeps_whole_blocks(pool, kept, left):
    """Tokens of a block that is stored with later ones cannot be stored again."""
    residents = ResidentSequences(pool, BLOCK_TOKENS)
    buffer = numbered_buffer(pool, 0, 14)
    buffer.forget_before(12)
    assert residents.kept_tokens(buffer, kept) == left
    residents.put(KEY, pool.new_kv(60), left, buffer)
    assert residents.get(KEY).tail_from == left // BLOCK_TOKENS * BLOCK_TOKENS


def test_without_saving_there_is_no_tail(pool):
    """All rows are usable: the boundary is behind them."""
    residents = ResidentSequences(pool, BLOCK_TOKENS)
    assert residents.put(KEY, pool.new_kv(60), 14, None) == 14
    assert residents.get(KEY).tail is None


def test_a_released_resident_frees_everything(pool):
    """Sequence KV and tail."""
    residents = ResidentSequences(pool, BLOCK_TOKENS)
    buffer = numbered_buffer(pool, 0, 10)
    residents.put(KEY, pool.new_kv(60), 10, buffer)
    pool.release(buffer)
    residents.release(KEY)
    assert pool.num_free == NUM_ROWS


@pytest.fixture
def compactor(tiny):
    """Make the compactor of a model, with its own thread."""
    thread = WorkerThread("compact")
    yield Compactor(tiny("llama").calibration, thread)
    thread.close()


async def test_after_a_discard_the_next_buffer_begins_behind_the_rest(tiny, compactor):
    """Blocks cut by a discard never grow: position-free rows of the end are not needed."""
    shapes = [layer.shape for layer in tiny("llama").calibration.layers]
    pool = KVPool(
        shapes,
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
    assert residents.next_buffer(resident, 9, make_ring(50, shapes)).first_token == 9
    residents.release(KEY)
