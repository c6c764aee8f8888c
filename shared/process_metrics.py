"""What every process says of itself, by the names that Prometheus has for it everywhere. Pure."""

from shared.metric_table import Metric

PROCESS_METRICS = (
    Metric("process_cpu_seconds_total", "counter", "CPU time of the process, user and system"),
    Metric("process_resident_memory_bytes", "gauge", "Memory it has in RAM, shared one included"),
    Metric("process_open_fds", "gauge", "File descriptors that are open"),
    Metric("process_max_fds", "gauge", "File descriptors that may be open"),
    Metric("process_threads", "gauge", "Threads"),
    Metric("process_start_time_seconds", "gauge", "When it began, in seconds since 1970"),
)
