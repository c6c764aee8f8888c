"""Fills the metrics that both processes have, at a scrape."""

import resource

import psutil

from shared.serving.http_connections import ConnectionMetrics
from shared.serving.metric_export import Scrape


def fill_process(scrape: Scrape) -> None:
    """This process, now."""
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
    """Of the process's HTTP servers."""
    for server, count in metrics.open.items():
        scrape.put(f"{prefix}_http_connections", count, server)
    scrape.put_tally(f"{prefix}_http_cut_connections_total", metrics.cut)
