"""How long a start takes over a full index, and what an idle session costs in memory."""

from kvd.bench.figures import Restart
from kvd.bench.filled_index import MANIFEST_NAME, FilledIndexes
from kvd.bench.options import BenchOptions
from kvd.bench.process import running_kvd
from kvd.bench.workspace import Workspace
from shared.measuring.statistics import percentile, spread


async def measure_restart(
    options: BenchOptions, work: Workspace, indexes: FilledIndexes
) -> Restart:
    """Start kvd over a full and over an empty index, in turns."""
    num_sessions = max(options.scale.session_counts)
    options.on_progress(f"restart, an index of {num_sessions} sessions")
    full_dir = await indexes.state_dir(num_sessions)
    empty_dir = await indexes.state_dir(0)
    full, empty = _Starts(), _Starts()
    for turn in range(options.scale.restarts):
        for starts, state_dir in ((empty, empty_dir), (full, full_dir)):
            options.on_progress(f"restart, {state_dir.name}, {turn + 1}")
            name = f"restart-{state_dir.name}-{turn}"
            sizes = indexes.sizes(options.io_threads)
            async with running_kvd(work, name, sizes, state_dir) as kvd:
                starts.ready_s.append(kvd.process.ready_s)
                starts.ready_cpu_s.append(kvd.process.cpu_s())
                await kvd.until_quiet()
                starts.rss_bytes.append(kvd.process.rss_bytes())
                starts.peak_bytes.append(kvd.process.peak_rss_bytes())
                layouts = (await kvd.stats()).layouts
                starts.num_restored = sum(layout.num_sessions for layout in layouts)
    rss, empty_rss = full.median_rss(), empty.median_rss()
    return Restart(
        num_sessions=num_sessions,
        blocks_per_session=indexes.blocks_per_session,
        num_restored=full.num_restored,
        ready_s=spread(full.ready_s),
        ready_cpu_s=spread(full.ready_cpu_s),
        empty_ready_s=spread(empty.ready_s),
        rss_bytes=rss,
        empty_rss_bytes=empty_rss,
        rss_per_session_bytes=(rss - empty_rss) / num_sessions,
        peak_rss_per_session_bytes=(percentile(full.peak_bytes, 0.5) - empty_rss) / num_sessions,
        index_bytes=(full_dir / MANIFEST_NAME).stat().st_size,
    )


class _Starts:
    """What was seen at the starts over one index."""

    def __init__(self) -> None:
        self.ready_s: list[float] = []
        self.ready_cpu_s: list[float] = []
        self.rss_bytes: list[float] = []
        self.peak_bytes: list[float] = []
        self.num_restored = 0

    def median_rss(self) -> int:
        """Of all starts."""
        return int(percentile(self.rss_bytes, 0.5))
