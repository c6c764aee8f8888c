"""The results of a run of the bench. Frozen values, which report.py writes. Pure.

Field names are the names in the JSON document, which scripts read: fields may be added freely, but
renamed or removed only with a new number in SCHEMA. Latencies are measured in rounds, in which
caches of different sizes take turns.
"""

from collections import defaultdict
from dataclasses import dataclass

from shared.measuring.statistics import Pair, Spread, growth, percentile, spread

SCHEMA = "kvd.bench/1"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The speed of kvd against the machine's floor.

    Attributes:
        operation: "store" or "load" (arena), and the copies in them alone, "store_copy" and
            "load_copy"; "write" or "read" (SSD) against I/O with memory of the arena's kind, and
            "write_huge", "read_huge" against I/O with private huge pages. Under `encryption` the
            floor is a kvd that does not encrypt.
        slice_bytes: size of one layer of one block, which one copy in the arena moves.
        io_bytes: size of one system call of the floor; 0: it makes none.
        pass_bytes: bytes moved in one half of a pair.
        num_threads, num_pairs: threads that move them, and pairs measured.
        ratio: kvd's speed divided by the floor's, over the pairs.
        kvd_bytes_per_s, floor_bytes_per_s: medians.
    """

    operation: str
    slice_bytes: int
    io_bytes: int
    pass_bytes: int
    num_threads: int
    num_pairs: int
    ratio: Spread
    kvd_bytes_per_s: float
    floor_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Latency:
    """The times of calls, made one at a time.

    Attributes:
        level: "rpc" (the project's client to a kvd process and back) or "core" (the pure engine in
            this process).
        operation: the call.
        num_sessions: sessions that are stored meanwhile.
        num_calls: number of calls.
        p50_us, p99_us: percentiles, in microseconds.
    """

    level: str
    operation: str
    num_sessions: int
    num_calls: int
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Growth:
    """The factor by which the median call is slower with more stored sessions."""

    level: str
    operation: str
    from_sessions: int
    to_sessions: int
    ratio: Spread


@dataclass(frozen=True, slots=True)
class QueueCosts:
    """The cost of an engine's queue for the pure engine: message parsed, decoded, applied.

    Attributes:
        num_jobs: number of requests that wait.
        policy: name of the eviction policy.
        full_s: seconds of processor time for the whole queue at once.
        change_s: the same for one change: one request leaves and one joins.
    """

    num_jobs: int
    policy: str
    full_s: Spread
    change_s: Spread


@dataclass(frozen=True, slots=True)
class Restart:
    """A start over a full index.

    Attributes:
        num_sessions, blocks_per_session: the content of the index.
        num_restored: sessions that kvd reports after the start.
        ready_s: seconds from exec to a health check that says SERVING.
        ready_cpu_s: processor time of that: the time on an idle machine whose disk never makes it
            wait.
        empty_ready_s: ready_s with an empty index.
        rss_bytes: resident memory once idle; empty_rss_bytes: with an empty index.
        rss_per_session_bytes: their difference, divided by the number of sessions.
        peak_rss_per_session_bytes: the same for the peak memory of the start.
        index_bytes: size of the index file.
    """

    num_sessions: int
    blocks_per_session: int
    num_restored: int
    ready_s: Spread
    ready_cpu_s: Spread
    empty_ready_s: Spread
    rss_bytes: int
    empty_rss_bytes: int
    rss_per_session_bytes: float
    peak_rss_per_session_bytes: float
    index_bytes: int


@dataclass(frozen=True, slots=True)
class LoopCalls:
    """The longest calls of the event loop with very many idle sessions, in processor time.

    Attributes:
        num_sessions, blocks_per_session: the idle sessions.
        policy: the eviction policy.
        restore_cpu_s: reading the index and restoring its sessions, before any engine is served.
        attach_ms: the first engine's attach, which includes the first choice of prefetches.
        look_ms: the timer's calls after it, while nothing expires.
        store_ms: stores of new sessions that evict idle ones.
        reload_ms: a reload that gives a tenant with all the sessions its first quota, and the calls
            that enforce it.
        expire_ms: the timer's calls that find all sessions expired.
    """

    num_sessions: int
    blocks_per_session: int
    policy: str
    restore_cpu_s: float
    attach_ms: float
    look_ms: float
    store_ms: float
    reload_ms: float
    expire_ms: float


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine on which the bench ran.

    Attributes:
        cpu: its name.
        cpus: number of CPUs that this process may use.
        load_average: load of the last minute before the run; much above 0 is a busy machine.
        huge_pages: when private memory gets transparent ones: "always", "madvise" or "never".
        shared_huge_pages: the same for shared memory, which arenas are: "advise", "never", …
        reserved_huge_pages: huge pages that an arena can have, if they are enough for it.
        direct_io: the file system supports O_DIRECT; otherwise the SSD's figures are those of the
            page cache.
    """

    cpu: str
    cpus: int
    load_average: float
    memory_bytes: int
    kernel: str
    huge_pages: str
    shared_huge_pages: str
    reserved_huge_pages: int
    filesystem: str
    device: str
    direct_io: bool
    python: str
    kvd: str
    libraries: dict[str, str]


@dataclass(frozen=True, slots=True)
class Report:
    """All results of a run; None: the part was not run."""

    started_unix_s: float
    elapsed_s: float
    command: tuple[str, ...]
    scale: str
    machine: Machine
    arena: tuple[Comparison, ...] | None = None
    ssd: tuple[Comparison, ...] | None = None
    encryption: tuple[Comparison, ...] | None = None
    latencies: tuple[Latency, ...] | None = None
    growths: tuple[Growth, ...] | None = None
    queue: QueueCosts | None = None
    restart: Restart | None = None
    loop_calls: LoopCalls | None = None


def comparison(
    operation: str, pairs: list[Pair], *, slice_bytes: int, io_bytes: int, num_threads: int
) -> Comparison:
    """Return the summary of interleaved pairs."""
    return Comparison(
        operation=operation,
        slice_bytes=slice_bytes,
        io_bytes=io_bytes,
        pass_bytes=pairs[0].floor.num_bytes,
        num_threads=num_threads,
        num_pairs=len(pairs),
        ratio=spread([pair.ratio for pair in pairs]),
        kvd_bytes_per_s=percentile([pair.kvd.bytes_per_s for pair in pairs], 0.5),
        floor_bytes_per_s=percentile([pair.floor.bytes_per_s for pair in pairs], 0.5),
    )


def latency(level: str, operation: str, num_sessions: int, seconds: list[float]) -> Latency:
    """Return the summary of the calls of all rounds."""
    return Latency(
        level=level,
        operation=operation,
        num_sessions=num_sessions,
        num_calls=len(seconds),
        p50_us=percentile(seconds, 0.50) * 1e6,
        p99_us=percentile(seconds, 0.99) * 1e6,
    )


class Rounds:
    """The times of single calls, by operation, number of stored sessions, and round.

    Args:
        level: "rpc" or "core", see Latency.
    """

    def __init__(self, level: str) -> None:
        self._level = level
        self._seconds: defaultdict[tuple[str, int], list[list[float]]] = defaultdict(list)

    def begin(self, operations: tuple[str, ...], num_sessions: int) -> dict[str, list[float]]:
        """Begin a cache's turn of a round; return lists to append seconds to, by operation."""
        turn: dict[str, list[float]] = {operation: [] for operation in operations}
        for operation, seconds in turn.items():
            self._seconds[operation, num_sessions].append(seconds)
        return turn

    def latencies(self) -> list[Latency]:
        """Return a latency for each operation and number of sessions, over all rounds."""
        return [
            latency(self._level, operation, num_sessions, [s for turn in turns for s in turn])
            for (operation, num_sessions), turns in sorted(self._seconds.items())
        ]

    def growths(self, from_sessions: int, to_sessions: int) -> list[Growth]:
        """Return the growth of the median call between two numbers of sessions, per operation."""
        operations = sorted({operation for operation, _ in self._seconds})
        return [
            Growth(
                self._level,
                operation,
                from_sessions,
                to_sessions,
                growth(
                    self._medians(operation, from_sessions), self._medians(operation, to_sessions)
                ),
            )
            for operation in operations
        ]

    def _medians(self, operation: str, num_sessions: int) -> list[float]:
        return [percentile(turn, 0.5) for turn in self._seconds[operation, num_sessions]]
