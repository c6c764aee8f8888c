"""What a run of the bench finds. Frozen values; report.py writes them down.

Pure. The names of the fields are the names in the JSON document, which scripts read: a field is
added freely, but renamed or removed only with a new number in SCHEMA. Latencies are taken in
rounds, in which caches of different sizes take turns.
"""

from collections import defaultdict
from dataclasses import dataclass

from shared.measuring.statistics import Pair, Spread, growth, percentile, spread

SCHEMA = "kvd.bench/1"


@dataclass(frozen=True, slots=True)
class Comparison:
    """kvd against the machine's floor.

    Attributes:
        operation: "store" or "load" (arena), and the copies in them by themselves, "store_copy" and
            "load_copy"; "write" or "read" (SSD) against I/O with memory of the arena's kind, and
            "write_huge", "read_huge" against I/O with private huge pages. Under `encryption` the
            floor is a kvd that does not encrypt.
        slice_bytes: size of one layer of one block: what is copied at once in the arena.
        io_bytes: size of one system call of the floor; 0 where there is none.
        pass_bytes: moved in one half of a pair.
        ratio: kvd's speed by the floor's, of pairs.
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
    """How long calls take, one at a time.

    Attributes:
        level: "rpc" (the project's client to a kvd process and back) or "core" (the pure engine in
            this process).
        num_sessions: stored meanwhile.
    """

    level: str
    operation: str
    num_sessions: int
    num_calls: int
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Growth:
    """How many times longer the median call takes when more sessions are stored."""

    level: str
    operation: str
    from_sessions: int
    to_sessions: int
    ratio: Spread


@dataclass(frozen=True, slots=True)
class QueueCosts:
    """An engine's queue, reported to the pure engine: message parsed, decoded, applied.

    Attributes:
        num_jobs: number of requests that wait.
        policy: name of the eviction policy.
        full_s: seconds of a processor for the whole queue at once.
        change_s: the same, for one request that leaves and one that joins.
    """

    num_jobs: int
    policy: str
    full_s: Spread
    change_s: Spread


@dataclass(frozen=True, slots=True)
class Restart:
    """A start over a full index.

    Attributes:
        ready_s: seconds from exec to a health check that says SERVING.
        ready_cpu_s: processor time of that: what it would take on a machine with nothing else to do
            and a disk that never makes it wait.
        empty_ready_s: ready_s with an empty index.
        rss_bytes: resident memory once idle; empty_rss_bytes: with an empty index.
        rss_per_session_bytes: the difference of both, divided by the sessions.
        peak_rss_per_session_bytes: the same of the most memory that the start took.
        num_restored: sessions that kvd then says it has.
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
    """The longest calls of the event loop with very many idle sessions, by processor time.

    Attributes:
        restore_cpu_s: reading the index and restoring what it says; before anybody is served.
        attach_ms: the first engine's attach, which is the first look for sessions to read ahead.
        look_ms: the calls of the timer after it, while nothing expires.
        store_ms: stores of new sessions for which idle ones have to go.
        reload_ms: a reload that gives a tenant with all the sessions its first quota, and the calls
            that bring it about.
        expire_ms: the calls of the timer that find all sessions expired.
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
    """Where it was measured.

    Attributes:
        cpus: number of CPUs that this process may use.
        load_average: load of the last minute before the run; much above 0 is a busy machine.
        huge_pages: when private memory gets transparent ones: "always", "madvise" or "never".
        shared_huge_pages: the same for shared memory, as arenas are: "advise", "never", …
        reserved_huge_pages: number that an arena can have, if they suffice for it.
        direct_io: whether the file system takes O_DIRECT; without, the SSD figures are the page
            cache's.
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
    """Everything of one run; a part that was not run is None."""

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
    """Sum up interleaved pairs."""
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
    """Sum up the calls of all rounds."""
    return Latency(
        level=level,
        operation=operation,
        num_sessions=num_sessions,
        num_calls=len(seconds),
        p50_us=percentile(seconds, 0.50) * 1e6,
        p99_us=percentile(seconds, 0.99) * 1e6,
    )


class Rounds:
    """Seconds of each call, by operation, number of sessions stored, and round.

    Args:
        level: "rpc" or "core", see Latency.
    """

    def __init__(self, level: str) -> None:
        self._level = level
        self._seconds: defaultdict[tuple[str, int], list[list[float]]] = defaultdict(list)

    def begin(self, operations: tuple[str, ...], num_sessions: int) -> dict[str, list[float]]:
        """Open one cache's turn of a round: lists to append seconds to, one per operation."""
        turn: dict[str, list[float]] = {operation: [] for operation in operations}
        for operation, seconds in turn.items():
            self._seconds[operation, num_sessions].append(seconds)
        return turn

    def latencies(self) -> list[Latency]:
        """Return a latency for each operation and size, over all rounds."""
        return [
            latency(self._level, operation, num_sessions, [s for turn in turns for s in turn])
            for (operation, num_sessions), turns in sorted(self._seconds.items())
        ]

    def growths(self, from_sessions: int, to_sessions: int) -> list[Growth]:
        """Return how the median call grows between two sizes, for each operation."""
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
