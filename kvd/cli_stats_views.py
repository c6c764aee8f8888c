"""Tables of `kvd stats`: tiers, arenas, tenants, engines, counters, the process."""

from rich.table import Table

from kvd.cli_views import facts_row, plain
from shared.pb.kvd.v1 import kvd_pb2
from shared.units import format_bytes, format_duration

MOST_TENANTS = 20  # lines; --json has them all


def stats_tables(stats: kvd_pb2.GetStatsResponse) -> list[Table]:
    """Everything, in the order an operator reads it."""
    tables = [_process_table(stats), _tiers_table(stats), _layouts_table(stats)]
    if any(layout.tenants for layout in stats.layouts):
        tables.append(_tenants_table(stats))
    return [*tables, _reading_table(stats), _engines_table(stats), _counters_table(stats)]


def _process_table(stats: kvd_pb2.GetStatsResponse) -> Table:
    process = stats.process
    return facts_row(
        f"kvd {stats.version}",
        f"pid {process.pid}",
        f"up {format_duration(process.uptime_s)}",
        f"rss {format_bytes(process.rss_bytes)}",
        f"{process.threads} threads",
        f"{process.open_files} files",
        f"{process.cpu_s:.1f} s cpu",
        f"{format_bytes(process.memory_available_bytes)} free on the machine",
        "verifying" if stats.verifying else "",
    )


def _tiers_table(stats: kvd_pb2.GetStatsResponse) -> Table:
    table = _table("tiers", "model", "tier")
    for heading in ("used", "capacity", "allocated", "blocks"):
        table.add_column(heading, justify="right")
    table.add_column("kind")
    table.add_column("state")
    for layout in stats.layouts:
        for tier in layout.tiers:
            table.add_row(
                layout.model[:12],
                plain(tier)["tier"],
                format_bytes(tier.used_bytes),
                format_bytes(tier.capacity_bytes),
                format_bytes(tier.physical_bytes),
                str(tier.num_blocks),
                _arena(layout.arena) if tier.tier == kvd_pb2.TIER_DRAM else _volume(layout.volume),
                f"degraded: {tier.degraded_reason}" if tier.degraded else "ok",
            )
    return table


def _arena(arena: kvd_pb2.ArenaStats) -> str:
    """What the DRAM tier is made of, and what became of the last kvd's."""
    if not arena.arena_id:
        return "no arena: no engine yet"
    words = [f"kept: {arena.keep}", f"{arena.pages} pages"]
    if arena.adopted_blocks:
        words.append(f"{arena.adopted_blocks} blocks adopted")
    return ", ".join(words)


def _volume(volume: kvd_pb2.VolumeStats) -> str:
    """How the SSD tier is written."""
    words = [volume.admission.replace("_", "-")] if volume.admission else []
    if volume.direct:
        words.append("direct I/O")
    elif volume.buffered_reason:
        words.append(f"buffered I/O ({volume.buffered_reason})")
    return ", ".join(words)


def _layouts_table(stats: kvd_pb2.GetStatsResponse) -> Table:
    table = _table("layouts", "model")
    headings = ("sessions", "pinned", "soft", "dirty", "unverified", "leases", "quarantined slots")
    for heading in headings:
        table.add_column(heading, justify="right")
    for layout in stats.layouts:
        table.add_row(
            layout.model[:12],
            str(layout.num_sessions),
            str(layout.hard_pins),
            str(layout.soft_pins),
            format_bytes(layout.dirty_bytes),
            str(layout.unverified_blocks),
            str(layout.leases),
            str(layout.quarantined_slots),
        )
    return table


def _reading_table(stats: kvd_pb2.GetStatsResponse) -> Table:
    """What came from SSD, how much of it ahead of its load, and what became of that."""
    table = _table("SSD, and what was read ahead of loads", "model")
    for heading in ("read", "written", "blocks ahead", "hits", "late", "wasted", "cancelled"):
        table.add_column(heading, justify="right")
    for layout in stats.layouts:
        counters = layout.counters
        names = ("blocks", "hits", "late", "wasted", "cancelled")
        table.add_row(
            layout.model[:12],
            format_bytes(counters.get("ssd_read_bytes", 0)),
            format_bytes(counters.get("ssd_written_bytes", 0)),
            *(str(counters.get(f"prefetch_{name}", 0)) for name in names),
        )
    return table


def _tenants_table(stats: kvd_pb2.GetStatsResponse) -> Table:
    """The largest tenants of each layout."""
    table = _table("tenants", "tenant", "model")
    for heading in ("used", "quota", "sessions"):
        table.add_column(heading, justify="right")
    rows = [(usage, layout) for layout in stats.layouts for usage in layout.tenants]
    rows.sort(key=lambda row: -row[0].used_bytes)
    for usage, layout in rows[:MOST_TENANTS]:
        table.add_row(
            usage.tenant,
            layout.model[:12],
            format_bytes(usage.used_bytes),
            format_bytes(usage.quota_bytes) if usage.has_quota else "-",
            str(usage.num_sessions),
        )
    if len(rows) > MOST_TENANTS:
        table.caption = f"the largest {MOST_TENANTS} of {len(rows)}; --json lists all"
        table.caption_justify = "left"
    return table


def _engines_table(stats: kvd_pb2.GetStatsResponse) -> Table:
    table = _table("engines", "engine", "pid", "rss", "queue", "runs", "attached")
    for engine in stats.engines:
        table.add_row(
            engine.name,
            str(engine.pid),
            format_bytes(engine.rss_bytes),
            str(engine.queue_jobs),
            str(engine.running_jobs),
            format_duration(engine.attached_s),
        )
    return table


def _counters_table(stats: kvd_pb2.GetStatsResponse) -> Table:
    table = _table("counters", "counter", "model")
    table.add_column("since start", justify="right")
    for layout in stats.layouts:
        for name, count in sorted(layout.counters.items()):
            table.add_row(name, layout.model[:12], str(count))
    return table


def _table(title: str, *headings: str) -> Table:
    return Table(*headings, box=None, title=title, title_justify="left")
