"""kvd bench: how close kvd comes to the machine's limits, measured with a kvd of its own.

    kvd bench [--json] [--quick] [--directory DIR] [--only PART] [--sessions N] [--blocks N]

It starts real `kvd serve` processes in new directories (under DIR: the disk to measure), drives
them with the project's own client, and removes everything at the end. No other kvd is touched. All
parts take a few minutes; --quick takes half a minute and says less: smaller sizes, fewer rounds.

The measurements:

    arena    store and load of a session through leases (prepare, memcpy of every layer slice
             between the engine's memory and the slots, complete), as bytes per second. Floor: the
             same memcpy, on the same threads, between pieces of private, pre-faulted memory.
             store_copy and load_copy: without the calls.
    ssd      write: from complete_store until nothing is dirty (hashed, written, synced, indexed).
             read: prepare_load of a session that is on SSD only (read, verified, in the arena).
             Floor: pwritev/preadv with O_DIRECT of the same extents, on the same number of threads,
             to files of the same size on the same file system, with the same cadence of
             fdatasync, with memory of the arena's kind; no kvd, no checksums, no index.
             write_huge, read_huge: against that floor with private huge pages.
    encryption  the same with a kvd that has a key (docs/encryption.md). Floor: a kvd without a key,
             on the same disk at the same time.
    control  p50 and p99 of single calls. Level "rpc": client, socket, kvd and back. Level "core":
             the pure engine in this process, its I/O done in memory. Growth: how many times longer
             the median call takes with the largest number of sessions than with the middle one.
             Longest calls: processor time of single calls of the pure engine over the fullest
             index, each of which would stop the loop. They include what `restart` measures.
    queue    the cost of a queue of ten thousand requests for the pure engine, parsed, decoded and
             applied: the whole queue at once, and one change of it.
    restart  exec to SERVING over an index full of sessions, and the memory of one idle session:
             (RSS with them - RSS without) / their number; the same for the peak of the start.

The method: kvd and the floor, or the different numbers of sessions, take turns, and are compared
turn by turn; the result is the median of these ratios, with their quartiles. All buffers are
pre-faulted and full of random bytes; all files are written once before anything is timed; kvd is
idle before each half of a pair; all numbers of threads are fixed. The goals (report.py) are shown,
not asserted: a busy machine misses them.

*Hashing* after a store counts in the write figures, not in the arena's: no engine waits for it.

Start reading with runner.py; then arena.py, ssd.py with floor.py, control.py and lookups.py over
filled_index.py. figures.py, report.py and options.py are pure.
"""
