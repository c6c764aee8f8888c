"""Metrics of a process and its HTTP servers, equal in both processes: the table and its values.

The metrics of the process itself have Prometheus' standard names.
"""

import resource

import psutil

from shared.serving.http_connections import ConnectionMetrics
from shared.serving.metric_export import Metric, Scrape


def fill_process(scrape: Scrape) -> None:
    """Set the current values of this process."""
    process = psutil.Process()
    with process.oneshot():
        times = process.cpu_times()
        scrape.put("process_cpu_seconds_total", times.user + times.system)
        scrape.put("process_resident_memory_bytes", process.memory_info().rss)
        scrape.put("process_open_fds", process.num_fds())
        scrape.put("process_threads", process.num_threads())
        scrape.put("process_start_time_seconds", process.create_time())
    scrape.put("process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def fill_connections(prefix: str, metrics: ConnectionMetrics, scrape: Scrape) -> None:
    """Set the values of the process's HTTP servers."""
    for server, count in metrics.open.items():
        scrape.put(f"{prefix}_http_connections", count, server)
    scrape.put_tally(f"{prefix}_http_cut_connections_total", metrics.cut)


PROCESS_METRICS = (
    Metric("process_cpu_seconds_total", "counter", "CPU time of the process, user and system"),
    Metric("process_resident_memory_bytes", "gauge", "Resident memory, shared memory included"),
    Metric("process_open_fds", "gauge", "Open file descriptors"),
    Metric("process_max_fds", "gauge", "Limit of open file descriptors"),
    Metric("process_threads", "gauge", "Threads"),
    Metric("process_start_time_seconds", "gauge", "Start time, in seconds since 1970"),
)


def connection_metrics(prefix: str) -> tuple[Metric, ...]:
    """Return the rows about the connections of HTTP servers.

    Args:
        prefix: prefix of the process's metrics.
    """
    return (
        Metric(
            f"{prefix}_http_connections",
            "gauge",
            "Open HTTP connections, including idle ones and TLS handshakes",
            ("server",),
        ),
        Metric(
            f"{prefix}_http_cut_connections_total",
            "counter",
            "HTTP connections that were refused or closed, by why: no place for one more (`places`,"
            " `address`, `files`, `accept`), nothing came in time (`handshake`, `headers`), nothing"
            " was read (`unread`), or what came was no TLS (`tls`) or no HTTP (`malformed`)",
            ("server", "reason"),
        ),
    )
