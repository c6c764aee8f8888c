"""The pool: pieces never overlap, and memory is not lent again while it is read."""

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inference_svc.core.scheduling.slot_space import SlotSpace
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_tensors import LayerShape
from inference_svc.runtime.kv.sequence_kv import MemoryHold
from inference_svc.runtime.memory import HUGE_PAGE_BYTES, allocate_region, populate

CPU = torch.device("cpu")
SHAPES = [LayerShape((2, 4), (2, 4)), LayerShape((1, 8), (1, 6)), LayerShape((2, 4), (1, 6))]
FULL_LINES = [LayerShape((2, 8), (2, 8))] * 2  # their rows are a multiple of 64 bytes
SOON = 60.0  # seconds that only a broken test takes


def make_pool(num_slots, shapes=SHAPES, dtype=torch.float32):
    return KVPool(shapes, num_slots, device=CPU, dtype=dtype)


def tensors(rows):
    return [*rows.keys.layers, *rows.values.layers]


def fill(rows, number):
    for tensor in tensors(rows):
        tensor.fill_(number)


def holds(rows, number):
    return all(bool((tensor == number).all()) for tensor in tensors(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shapes", [SHAPES, FULL_LINES], ids=["padded rows", "full rows"])
def test_pieces_fill_the_region_and_do_not_overlap(shapes, dtype):
    """Sequences' KV and buffers that fill it keep their contents."""
    pool = make_pool(60, shapes, dtype=dtype)
    lent = [pool.new_kv(20), pool.new_write_buffer(5, 13), pool.new_kv(1)]
    lent.append(pool.new_write_buffer(0, pool.num_free))
    for number, rows in enumerate(lent):
        fill(rows, number)
    assert all(holds(rows, number) for number, rows in enumerate(lent))
    assert (pool.num_free, pool.num_outside) == (0, 0)
    region_begin = pool._region.data_ptr()
    region_end = region_begin + 60 * pool.token_slot_bytes
    for tensor in (tensor for rows in lent for tensor in tensors(rows)):
        end = tensor.data_ptr() + tensor.numel() * tensor.itemsize
        assert region_begin <= tensor.data_ptr() < end <= region_end


@pytest.mark.parametrize("shapes", [SHAPES, FULL_LINES], ids=["several shapes", "one shape"])
def test_layers_of_a_piece_do_not_overlap(shapes):
    """Keys and values of every layer have separate memory."""
    pool = make_pool(60, shapes)
    for rows in (pool.new_kv(7), pool.new_write_buffer(0, 9)):
        for number, tensor in enumerate(tensors(rows)):
            tensor.fill_(number)
        assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors(rows)))


def test_sequences_kv_begin_at_cache_lines():
    """With any row size, it begins at a multiple of 64 bytes."""
    pool = make_pool(10, [LayerShape((1, 5), (1, 2))])
    assert pool.token_slot_bytes == 64
    begins = [pool.new_kv(1).keys[0].data_ptr() for _ in range(10)]
    assert {begin % 64 for begin in begins} == {pool._region.data_ptr() % 64}
    assert sorted(begins) == list(range(min(begins), min(begins) + 640, 64))


def test_without_contiguous_room_rows_have_separate_memory():
    """KV that does not fit gets its own memory, which is counted, and not returned to the pool."""
    pool = make_pool(30)
    first, second = pool.new_kv(12), pool.new_kv(6)
    pool.release(first)
    assert pool.num_free == 24
    outside = pool.new_kv(20)  # 12 rows before and 12 after the second
    assert (pool.num_outside, pool.num_free) == (1, 24)
    fill(second, 1)
    fill(outside, 2)
    assert holds(second, 1)
    assert holds(outside, 2)
    pool.release(outside)
    assert pool.num_free == 24
    pool.check()


def test_released_rows_are_lent_again():
    """Released rows join their neighbours and are used for the next sequence KV."""
    pool = make_pool(30)
    lent = [pool.new_kv(10) for _ in range(3)]
    for rows in lent:
        pool.release(rows)
    pool.new_kv(30)
    assert (pool.num_free, pool.num_outside) == (0, 0)


def test_rows_are_not_lent_while_a_copy_holds_them():
    """A release during a copy only marks the rows: the last holder frees them."""
    pool = make_pool(10)
    kv = pool.new_kv(10)
    with kv.hold():
        with kv.hold():
            pool.release(kv)
            assert pool.num_free == 0
        assert pool.num_free == 0
        other = pool.new_kv(10)
        assert pool.num_outside == 1
        assert other.keys[0].data_ptr() != kv.keys[0].data_ptr()
    assert pool.num_free == 10


def test_a_hold_may_end_in_another_thread():
    """A save takes it where it is ordered, and releases it where it ends."""
    pool = make_pool(10)
    buffer = pool.new_write_buffer(0, 10)
    hold = buffer.hold()
    hold.__enter__()
    pool.release(buffer)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(hold.__exit__, None, None, None).result(SOON)
    assert pool.num_free == 10


def test_a_failed_copy_ends_its_hold():
    """An error inside a hold gives the rows back too."""
    pool = make_pool(10)
    kv = pool.new_kv(10)
    hold = kv.hold()
    hold.__enter__()
    pool.release(kv)
    error = OSError("torn")
    assert not hold.__exit__(OSError, error, None)
    assert pool.num_free == 10


def test_misuse_violates_an_invariant():
    """Releasing twice, holding released rows, and lending no rows."""
    pool = make_pool(10)
    kv = pool.new_kv(4)
    pool.release(kv)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(kv)
    with pytest.raises(AssertionError, match="taken hold of"), kv.hold():
        pass
    with pytest.raises(AssertionError, match="0 token slots"):
        pool.new_kv(0)
    assert pool.num_free == 10
    held = pool.new_kv(4)
    with held.hold():
        pool.release(held)
        with pytest.raises(AssertionError, match="taken hold of"), held.hold():
            pass
        with pytest.raises(AssertionError, match="twice"):
            pool.release(held)
    assert pool.num_free == 10


@pytest.fixture
def restless():
    """Let threads alternate as often as possible, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def exercise(pool, lend, num_rounds, num_threads):
    """Let owners write a number, start copies that verify it, and release the rows meanwhile.

    Return how many copies saw another number than was written.
    """
    num_wrong = [0] * num_threads

    def copy(rows, hold, number, begin, index):
        begin.wait(SOON)
        for _ in range(3):
            num_wrong[index] += not holds(rows, number)
        hold.__exit__(None, None, None)

    def own(index, copiers):
        chance = random.Random(index)  # noqa: S311 - not for secrets
        under_way = []
        for round_number in range(num_rounds):
            number = float(index * num_rounds + round_number)
            rows = lend(pool, chance)
            fill(rows, number)
            released = threading.Event()
            for _ in range(chance.randrange(3)):
                hold = rows.hold()
                hold.__enter__()
                under_way.append(copiers.submit(copy, rows, hold, number, released, index))
            num_wrong[index] += not holds(rows, number)
            pool.release(rows)
            released.set()
        for copied in under_way:
            copied.result(SOON)

    with ThreadPoolExecutor(3) as copiers, ThreadPoolExecutor(num_threads) as owners:
        for owning in [owners.submit(own, index, copiers) for index in range(num_threads)]:
            owning.result(SOON)
    return sum(num_wrong)


def lend_some(pool, chance):
    size = chance.randrange(1, 30)
    if chance.random() < 0.5:
        return pool.new_kv(size)
    return pool.new_write_buffer(chance.randrange(100), size)


def test_no_copy_reads_rows_of_another_owner(restless):
    """With threads that lend, copy and release at random."""
    pool = make_pool(64)
    assert exercise(pool, lend_some, num_rounds=150, num_threads=3) == 0
    pool.check()
    assert pool.num_free == 64


def test_the_exercise_detects_rows_lent_too_early(restless):
    """With holds that have no effect, it finds copies that read other owners' rows."""

    class Careless(MemoryHold):
        def __enter__(self):
            pass

        def __exit__(self, *_error):
            pass

    def lend(pool, chance):
        rows = lend_some(pool, chance)
        rows.memory = Careless(rows.memory._free)
        return rows

    pool = make_pool(32)
    assert exercise(pool, lend, num_rounds=150, num_threads=3) > 0


def test_the_accounts_change_under_the_lock_only():
    """Lending and releasing, which threads do at once, are serialised."""

    class Watched(SlotSpace):
        def allocate(self, num_slots, *, from_top=False):
            assert pool._lock.locked()
            return super().allocate(num_slots, from_top=from_top)

        def free(self, offset):
            assert pool._lock.locked()
            super().free(offset)

    pool = make_pool(10)
    pool._space = Watched(10)
    kv, buffer = pool.new_kv(4), pool.new_write_buffer(0, 4)
    pool.release(kv)
    with buffer.hold():
        pool.release(buffer)
    assert pool.num_free == 10


def test_sequences_and_write_buffers_lie_at_opposite_ends():
    """Small short-lived pieces do not fragment the room for large ones."""
    pool = make_pool(64)
    begin = pool._region.data_ptr()
    kv, buffer = pool.new_kv(10), pool.new_write_buffer(0, 10)
    assert kv.keys[0].data_ptr() == begin
    assert buffer.keys[0].data_ptr() == begin + 54 * pool.token_slot_bytes


def test_prefault_keeps_contents():
    """It changes no byte, and returns the allocated size."""
    num_slots = 3 * HUGE_PAGE_BYTES // make_pool(1).token_slot_bytes
    pool = make_pool(num_slots)
    kv = pool.new_kv(num_slots)
    fill(kv, 7.0)
    num_bytes = pool.prefault()
    assert num_bytes == populate(pool._region, lambda: False)
    assert num_bytes in (0, num_slots * pool.token_slot_bytes)  # 0: a kernel that cannot
    assert holds(kv, 7.0)


def test_prefault_stops_when_the_pool_is_closed():
    """Lent rows stay usable."""
    pool = make_pool(3 * HUGE_PAGE_BYTES // make_pool(1).token_slot_bytes)
    kv = pool.new_kv(10)
    pool.close()
    assert pool.prefault() == 0
    fill(kv, 3.0)
    assert holds(kv, 3.0)


def test_populate_works_in_steps():
    """In between it checks whether to continue, so that closing is fast."""
    region = allocate_region(HUGE_PAGE_BYTES, CPU, torch.float32)
    answers = iter([False, True])
    assert populate(region, lambda: next(answers)) in (0, region.numel() * region.itemsize)
    assert populate(allocate_region(16, CPU, torch.float32), lambda: False) == 0
