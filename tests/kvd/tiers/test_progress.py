"""Progress words: written by kvd, read in another mapping, waited for in threads."""

import asyncio
import gc
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from kvd.tiers.progress import Progress, Wakeup
from shared.kvd_client.arena_map import LAYERS_MASK, LoadProgress, ProgressWords
from shared.types.errors import LoadFailedError

LEASE = (7 << 40) + 1


@pytest.fixture
def progress():
    made = Progress(4)
    yield made
    made.close_all()


@pytest.fixture
def words(progress):
    return ProgressWords(progress.fd, progress.num_words)


def test_published_layers_are_never_taken_back(progress, words):
    """A wait returns for every published layer, at once."""
    index = progress.open(LEASE, words.wake)
    load = LoadProgress(words, index, LEASE)
    progress.publish(LEASE, 3)
    progress.publish(LEASE, 2)
    for layer in range(3):
        load.wait_layer(layer, 0)
    with pytest.raises(LoadFailedError, match="layer 3"):
        load.wait_layer(3, 0)


def test_engines_cannot_write_progress(progress):
    """Neither through the descriptor they get, nor by opening it again."""
    with pytest.raises(PermissionError):
        mmap.mmap(progress.fd, 4096)
    again = os.open(f"/proc/self/fd/{progress.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, 4096)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"1", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(again, 0)
    os.close(again)


@pytest.mark.parametrize("end", ["fail", "close", "end"])
def test_a_waiting_thread_is_woken_at_the_end(progress, words, end):
    """By a failed load, a lease that ended, an attachment that ended."""
    load = LoadProgress(words, progress.open(LEASE, words.wake), LEASE)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(load.wait_layer, 0, 60)
        if end == "end":
            words.end("kvd is gone")
        else:
            getattr(progress, end)(LEASE)
        with pytest.raises(LoadFailedError):
            waiting.result(30)


def test_words_of_another_lease_are_ignored(progress, words):
    """A word that another load has taken over fails the old waiter."""
    index = progress.open(LEASE, words.wake)
    progress.close(LEASE)
    assert progress.open(LEASE + 1, words.wake) == index
    progress.publish(LEASE, 9)  # a late read of the old lease
    assert words.word(index) & 0xFFFF == 0
    progress.publish(LEASE + 1, 5)
    with pytest.raises(LoadFailedError):
        LoadProgress(words, index, LEASE).wait_layer(0, 60)
    LoadProgress(words, index, LEASE + 1).wait_layer(4, 0)


def test_words_are_reused(progress, words):
    """A load without a word is possible; a closed one is free again."""
    assert sorted(progress.open(LEASE + n, words.wake) for n in range(4)) == [0, 1, 2, 3]
    assert progress.open(LEASE + 9, words.wake) is None
    progress.publish(LEASE + 9, 1)
    progress.close(LEASE + 9)
    progress.close(LEASE + 2)
    assert progress.open(LEASE + 9, words.wake) == 2


def test_reads_that_end_after_the_arena_publish_nothing():
    """The words are closed with the arena; a late publisher finds none, and wakes no thread."""
    woken = []
    progress = Progress(4)
    progress.open(LEASE, lambda: woken.append(LEASE))
    progress.close_all()
    progress.publish(LEASE, 1)
    progress.fail(LEASE)
    progress.close(LEASE)
    progress.close_all()
    assert (woken, progress.open(LEASE + 1, woken.clear)) == ([], None)


def test_closed_words_take_no_memory():
    """Even if references to them remain."""

    def held():
        return Path("/proc/self/maps").read_text("ascii").count("kvd-progress")

    gc.collect()  # garbage of other tests
    before = held(), psutil.Process().num_fds()
    progress = Progress(4)
    assert held() > before[0]
    progress.close_all()
    assert (held(), psutil.Process().num_fds()) == before


def test_many_threads_wait_while_many_publish(progress, words):
    """Each waiter sees its own load to the end, layer by layer, whichever publication wakes it."""
    leases = [LEASE + n for n in range(4)]
    indices = {lease: progress.open(lease, words.wake) for lease in leases}

    def wait_for_all(lease):
        load = LoadProgress(words, indices[lease], lease)
        for layer in range(200):
            load.wait_layer(layer, 60)
            yield words.word(indices[lease]) & LAYERS_MASK > layer

    def publish_all(lease, num_layers):
        for layers in range(num_layers + 1):
            progress.publish(lease, layers)

    with ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(lambda of=lease: list(wait_for_all(of))) for lease in leases * 2]
        # The last one reaches layer 199 only: its waiters have to wait on.
        publishing = [pool.submit(publish_all, lease, 200) for lease in leases[:-1]]
        publishing.append(pool.submit(publish_all, leases[-1], 199))
        for future in publishing:
            future.result(60)
        for future, lease in zip(waiting, leases * 2, strict=True):
            if lease != leases[-1]:
                assert future.result(60) == [True] * 200
        assert not any(future.done() for future in (waiting[3], waiting[7]))
        progress.publish(leases[-1], 200)
        for future in (waiting[3], waiting[7]):
            assert future.result(60) == [True] * 200


def test_too_few_words_are_refused(progress):
    """Mapping more than there is would end in SIGBUS."""
    for num_words in (0, 4096):
        with pytest.raises(ValueError, match="progress words"):
            ProgressWords(progress.fd, num_words)


async def test_the_wakeup_wakes_a_loop():
    """The reader sees a write from another thread; after close it does nothing."""
    wakeup = Wakeup()
    seen = asyncio.Event()
    reader = os.dup(wakeup.fd)
    asyncio.get_running_loop().add_reader(reader, seen.set)
    threading.Thread(target=wakeup.wake).start()
    await asyncio.wait_for(seen.wait(), 30)
    asyncio.get_running_loop().remove_reader(reader)
    assert os.read(reader, 8) == b"w"
    wakeup.close()
    wakeup.wake()
    os.close(reader)


def test_an_engine_cannot_block_kvd_by_its_wakeup():
    """It never reads, and makes its end blocking."""
    wakeup = Wakeup()
    theirs = os.dup(wakeup.fd)
    os.set_blocking(theirs, True)
    waking = threading.Thread(target=_wake_often, args=(wakeup,), daemon=True)
    waking.start()
    waking.join(30)
    assert not waking.is_alive()
    wakeup.close()
    os.close(theirs)


def _wake_often(wakeup):
    for _ in range(10_000):
        wakeup.wake()


def test_a_wakeup_closes_both_descriptors():
    """Waking does no harm afterwards."""
    num_open = psutil.Process().num_fds()
    wakeup = Wakeup()
    assert psutil.Process().num_fds() == num_open + 2
    wakeup.close()
    assert (psutil.Process().num_fds(), wakeup.fd) == (num_open, -1)
    wakeup.wake()
