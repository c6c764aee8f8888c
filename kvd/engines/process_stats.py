"""Facts about processes, from psutil: this one, and the engines."""

import time

import psutil

from kvd.engines.attached import AttachedEngine
from shared.pb.kvd.v1 import kvd_pb2
from shared.process.dumps import may_be_dumped

MAX_COMMAND = 500  # characters of an engine's command line


def process_message() -> kvd_pb2.ProcessStats:
    """This process."""
    process = psutil.Process()
    with process.oneshot():
        times = process.cpu_times()
        return kvd_pb2.ProcessStats(
            pid=process.pid,
            rss_bytes=process.memory_info().rss,
            open_files=process.num_fds(),
            threads=process.num_threads(),
            cpu_s=times.user + times.system,
            memory_available_bytes=psutil.virtual_memory().available,
            uptime_s=max(0.0, time.time() - process.create_time()),
            dumps=may_be_dumped(),
        )


def engine_message(
    engine: AttachedEngine, queue_jobs: int, running_jobs: int
) -> kvd_pb2.EngineInfo:
    """One attached engine; what its process does not show us is left empty."""
    message = kvd_pb2.EngineInfo(
        engine_id=engine.shown_id,
        name=engine.name,
        layout=engine.cache.layout.fingerprint,
        pid=engine.peer.pid,
        attached_s=time.monotonic() - engine.since_s,
        queue_jobs=queue_jobs,
        running_jobs=running_jobs,
        version=engine.version,
    )
    try:
        process = psutil.Process(engine.peer.pid)
        message.command = " ".join(process.cmdline())[:MAX_COMMAND]
        message.rss_bytes = process.memory_info().rss
    except psutil.Error:
        pass  # it is gone, in another namespace, or not ours to see
    return message
