"""What a router of sessions takes of a processor, by the number of servers.

    python -m tests.benchmarks.routing

For each number of servers, in medians: choosing for a named session and counting its turn there and
back, where all servers are busy; the same for a turn of no session; taking in a report of 1,024
sessions of which a tenth has changed; knowing of one server that goes.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from statistics import median
from time import perf_counter

from shared.routing.hash_ring import name_hash
from shared.routing.session_router import ServerReport, SessionRouter

NUMBERS = (1, 10, 100, 1000)
SESSIONS = [f"conversation-{number}" for number in range(50_000)]
REPORT = ServerReport(num_turns=24, num_places=24, turn_s=10.0, compute_s=1e-4, fetch_s=1e-5)
REPORTED = 1024


def main() -> None:
    """Measure, and print a row for each number of servers."""
    print(f"{'servers':>8}{'session':>12}{'no session':>12}{'report':>12}{'one goes':>12}")
    for number in NUMBERS:
        found = "".join(f"{micros:>9,.0f} µs" for micros in measure(number))
        print(f"{number:>8,}{found}")


def measure(num_servers: int) -> tuple[float, ...]:
    """Return the medians, in µs."""
    servers = [f"10.0.{number // 250}.{number % 250}:7430" for number in range(num_servers)]
    router = SessionRouter(seed=0)
    router.set_servers(servers)
    for server in servers:
        router.report(server, REPORT)
    names, busy = cycle(SESSIONS), cycle(servers)
    reports = cycle(replace(REPORT, sessions=session_report(change)) for change in (0, 1))

    def turn(session: str | None) -> None:
        server = router.choose(session).server
        router.on_begin(server, session)
        router.on_end(server, session, 1000)

    return (
        median_us(lambda: turn(next(names)), len(SESSIONS)),
        median_us(lambda: turn(None), 2000),
        median_us(lambda: router.report(next(busy), next(reports)), 2 * num_servers + 2),
        median_us(lambda: router.set_servers(servers[1:]), 1),
    )


def session_report(change: int) -> dict[int, int]:
    """Return a report's sessions, of which a tenth alternates between two values."""
    return {
        name_hash(name): 900 + change * (index % 10 == 0)
        for index, name in enumerate(SESSIONS[:REPORTED])
    }


def median_us(work: Callable[[], None], times: int) -> float:
    """Return the median time of a function, in µs."""
    taken = []
    for _ in range(times):
        began = perf_counter()
        work()
        taken.append(perf_counter() - began)
    return median(taken) * 1e6


if __name__ == "__main__":
    main()
