"""memcpy on a fixed number of threads: the copy that is timed, with kvd and without."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvd.bench.buffers import BlockAt
from shared.types.units import ceil_div


class Copier:
    """Copies block after block, slice by slice; each thread has a run of blocks.

    Invariant: the work per slice is the same whatever memory is behind the blocks, so that two
    copies differ by that memory only.
    """

    def __init__(self, num_threads: int, block_bytes: int, slice_bytes: int) -> None:
        self.num_threads = num_threads
        self._block_bytes = block_bytes
        self._slice_bytes = slice_bytes
        self._pool = ThreadPoolExecutor(num_threads, "bench-copy")

    async def copy(self, target: BlockAt, source: BlockAt, num_blocks: int) -> None:
        """Copy blocks 0 … num_blocks - 1; returns when all threads are done."""
        loop = asyncio.get_running_loop()
        share = ceil_div(num_blocks, self.num_threads)
        starts = range(0, num_blocks, share)
        runs = [range(start, min(start + share, num_blocks)) for start in starts]
        copies = [
            loop.run_in_executor(self._pool, self._copy_run, target, source, run) for run in runs
        ]
        await asyncio.gather(*copies)

    def _copy_run(self, target: BlockAt, source: BlockAt, run: range) -> None:
        for index in run:
            to = np.frombuffer(target(index), np.uint8)
            came_from = np.frombuffer(source(index), np.uint8)
            for start in range(0, self._block_bytes, self._slice_bytes):
                end = start + self._slice_bytes
                np.copyto(to[start:end], came_from[start:end])  # a memcpy, without the GIL

    def close(self) -> None:
        """End the threads; waits for what they are copying."""
        self._pool.shutdown(wait=True, cancel_futures=True)
