"""The tables of `kvd stats`: tiers, queues, loads, tenants, engines, counters, process. Pure."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from kvd.views.views import Rates
from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal.printing import plain
from shared.terminal.tables import Column, fitted
from shared.types.units import format_bytes, format_duration

MOST_TENANTS = 20  # in the table; --json has all
PLACES = ("dram", "ssd", "gone")  # where a session's KV was when its next turn came


def stats_tables(
    stats: kvd_pb2.GetStatsResponse, width: int, before: kvd_pb2.GetStatsResponse | None = None
) -> Iterator[Table | Text]:
    """Yield all tables, in the order an operator reads them.

    Args:
        stats: the statistics now.
        width: columns of the terminal.
        before: the statistics at the poll before; loads and counters are then of the interval.
    """
    rates = Rates(stats, before)
    yield process_line(stats, rates)
    if stats.unavailable:
        yield unavailable_table(stats, width)
    yield _tiers_table(stats, width)
    yield _loads_table(stats, rates, width)
    if any(layout.counters.get(f"returns_{where}") for layout in stats.layouts for where in PLACES):
        yield _returns_table(stats, rates, width)
    yield _queues_table(stats, width)
    yield engines_table(stats, width)
    yield _layouts_table(stats, width)
    if any(layout.tenants for layout in stats.layouts):
        yield from _tenants_table(stats, width)
    yield _reading_table(stats, width)
    yield _counters_table(stats, rates, width)


def process_line(stats: kvd_pb2.GetStatsResponse, rates: Rates) -> Text:
    """Return the daemon's process as one line."""
    process = stats.process
    facts = (
        f"kvd {stats.version}",
        f"pid {process.pid}",
        f"up {format_duration(process.uptime_s)}",
        f"rss {format_bytes(process.rss_bytes)}",
        f"cpu {rates.cpu_share:.0%}",
        f"{format_bytes(process.memory_available_bytes)} free on the machine",
        f"{process.threads} threads",
        f"{process.open_files} files",
        "verifying" if stats.verifying else "",
        *encryption_facts(stats.encryption),
    )
    return Text("  ".join(fact for fact in facts if fact))


def unavailable_table(stats: kvd_pb2.GetStatsResponse, width: int) -> Table:
    """Return the table of layouts that cannot be opened."""
    columns = (
        Column("layout"),
        Column("for", is_number=True),
        Column("next attempt in", is_number=True, rank=1),
        Column("why", may_be_cut=True),
    )
    rows = [
        (
            layout.layout[:12],
            format_duration(layout.since_s),
            format_duration(layout.next_attempt_s),
            layout.why,
        )
        for layout in stats.unavailable
    ]
    return _table("unavailable: kvd reopen LAYOUT", columns, rows, width)


def encryption_facts(encryption: kvd_pb2.EncryptionStats) -> Iterator[str]:
    """Yield facts about encryption; none if kvd has no key."""
    if encryption.key:
        what = "encrypts" if encryption.encrypting else "encrypts nothing new"
        yield f"{what} (key {encryption.key[:8]})"
        if encryption.may_have_plain:
            yield "plain blocks may be left on ssd"


def _tiers_table(stats: kvd_pb2.GetStatsResponse, width: int) -> Table:
    columns = (
        Column("model"),
        Column("tier"),
        Column("used", is_number=True),
        Column("capacity", is_number=True),
        Column("allocated", is_number=True, rank=2),
        Column("blocks", is_number=True, rank=1),
        Column("kind", rank=3, may_be_cut=True, least=24),
        Column("state", may_be_cut=True, least=24),
    )
    rows = [
        (
            layout.model[:12],
            plain(tier)["tier"],
            format_bytes(tier.used_bytes),
            format_bytes(tier.capacity_bytes),
            format_bytes(tier.physical_bytes),
            str(tier.num_blocks),
            _arena(layout.arena) if tier.tier == kvd_pb2.TIER_DRAM else _volume(layout.volume),
            _state(tier),
        )
        for layout in stats.layouts
        for tier in layout.tiers
    ]
    return _table("tiers", columns, rows, width)


def _state(tier: kvd_pb2.TierStats) -> str:
    """Return whether writes to a tier work, and what it has yet to give back."""
    if tier.degraded:
        return f"degraded: {tier.degraded_reason}"
    return f"shrinks by {format_bytes(tier.surplus_bytes)}" if tier.surplus_bytes else "ok"


def _arena(arena: kvd_pb2.ArenaStats) -> str:
    """Return what the DRAM tier is made of, and how many blocks it kept over the last restart."""
    if not arena.arena_id:
        return "no arena: no engine yet"
    words = [f"kept: {arena.keep}"] + ([f"{arena.pages} pages"] if arena.pages else [])
    if arena.adopted_blocks:
        words.append(f"{arena.adopted_blocks} blocks adopted")
    return ", ".join(words)


def _volume(volume: kvd_pb2.VolumeStats) -> str:
    """Return the SSD tier's write policy and kind of I/O."""
    words = [volume.admission.replace("_", "-")] if volume.admission else []
    if volume.direct:
        words.append("direct I/O")
    elif volume.buffered_reason:
        words.append(f"buffered I/O ({volume.buffered_reason})")
    return ", ".join(words)


def _loads_table(stats: kvd_pb2.GetStatsResponse, rates: Rates, width: int) -> Table:
    """Return the table of loads and stores: what engines asked for, and got."""
    columns = (
        Column("model"),
        Column("loads", is_number=True),
        Column("hits", is_number=True),
        Column("tokens from dram", is_number=True),
        Column("from ssd", is_number=True),
        Column("stored", is_number=True),
        Column("refused", is_number=True, rank=1),
    )
    rows = []
    for layout in stats.layouts:
        key = layout.layout
        num_loads = rates.count(key, "load_hits") + rates.count(key, "load_misses")
        row = (
            layout.model[:12],
            str(num_loads),
            percent(rates.share(key, "load_hits", "load_misses")),
            str(rates.count(key, "load_tokens_dram")),
            str(rates.count(key, "load_tokens_ssd")),
            str(rates.count(key, "store_tokens")),
            str(rates.count(key, "stores_refused")),
        )
        rows.append(row)
    return _table(f"loads and stores, {_since(rates)}", columns, rows, width)


def _returns_table(stats: kvd_pb2.GetStatsResponse, rates: Rates, width: int) -> Table:
    """Return the table of where sessions' KV was when their next turns came."""
    columns = (
        Column("model"),
        Column("after"),
        Column("turns", is_number=True),
        Column("resident", is_number=True),
        *(Column(heading, is_number=True) for heading in PLACES),
    )
    rows = []
    for layout in stats.layouts:
        all_of = [rates.count(layout.layout, f"returns_{where}") for where in PLACES]
        tools = [rates.count(layout.layout, f"tool_returns_{where}") for where in PLACES]
        other_returns = [every - tool for every, tool in zip(all_of, tools, strict=True)]
        for after, counts in (("tools", tools), ("all else", other_returns)):
            num_turns = sum(counts)
            share = percent(counts[0] / num_turns if num_turns else None)
            rows.append((layout.model[:12], after, str(num_turns), share, *map(str, counts)))
    return _table(f"turns by where their session was, {_since(rates)}", columns, rows, width)


def percent(share: float | None) -> str:
    """Return a share (0 to 1) as a percentage; "-": None."""
    return "-" if share is None else f"{share:.0%}"


def _since(rates: Rates) -> str:
    if rates.is_of_interval:
        return f"in the last {format_duration(rates.seconds)}"
    return "since the start"


def _queues_table(stats: kvd_pb2.GetStatsResponse, width: int) -> Table:
    """Return the table of engines' queues and kvd's look-ahead windows, in requests."""
    columns = (
        Column("model"),
        Column("wait", is_number=True),
        Column("run", is_number=True),
        Column("prefetch window", is_number=True),
        Column("eviction window", is_number=True),
        Column("mean session", is_number=True, rank=1),
    )
    rows = [
        (
            layout.model[:12],
            str(layout.queue.waiting_jobs),
            str(layout.queue.running_sessions),
            str(layout.queue.prefetch_window),
            str(layout.queue.eviction_window),
            format_bytes(layout.queue.mean_session_bytes),
        )
        for layout in stats.layouts
    ]
    return _table("queues", columns, rows, width)


def _layouts_table(stats: kvd_pb2.GetStatsResponse, width: int) -> Table:
    columns = (
        Column("model"),
        Column("sessions", is_number=True),
        Column("pinned", is_number=True),
        Column("soft", is_number=True, rank=2),
        Column("retained", is_number=True, rank=3),
        Column("dirty", is_number=True),
        Column("unverified", is_number=True, rank=1),
        Column("leases", is_number=True),
        Column("quarantined slots", is_number=True),
    )
    rows = [
        (
            layout.model[:12],
            str(layout.num_sessions),
            str(layout.hard_pins),
            str(layout.soft_pins),
            str(layout.retained_sessions),
            format_bytes(layout.dirty_bytes),
            str(layout.unverified_blocks),
            str(layout.leases),
            str(layout.quarantined_slots),
        )
        for layout in stats.layouts
    ]
    return _table("layouts", columns, rows, width)


def _reading_table(stats: kvd_pb2.GetStatsResponse, width: int) -> Table:
    """Return the table of SSD traffic and prefetches."""
    headings = ("read", "written", "blocks ahead", "hits", "late", "wasted", "cancelled")
    columns = (Column("model"), *(Column(heading, is_number=True) for heading in headings))
    names = ("blocks", "hits", "late", "wasted", "cancelled")
    rows = [
        (
            layout.model[:12],
            format_bytes(layout.counters.get("ssd_read_bytes", 0)),
            format_bytes(layout.counters.get("ssd_written_bytes", 0)),
            *(str(layout.counters.get(f"prefetch_{name}", 0)) for name in names),
        )
        for layout in stats.layouts
    ]
    return _table("SSD, and what was read ahead of loads", columns, rows, width)


def _tenants_table(stats: kvd_pb2.GetStatsResponse, width: int) -> Iterator[Table | Text]:
    """Yield the table of the tenants that use most."""
    columns = (
        Column("tenant", may_be_cut=True),
        Column("model", rank=1),
        Column("used", is_number=True),
        Column("quota", is_number=True),
        Column("sessions", is_number=True),
    )
    usages = [(usage, layout) for layout in stats.layouts for usage in layout.tenants]
    usages.sort(key=lambda row: -row[0].used_bytes)
    rows = [
        (
            usage.tenant,
            layout.model[:12],
            format_bytes(usage.used_bytes),
            format_bytes(usage.quota_bytes) if usage.has_quota else "-",
            str(usage.num_sessions),
        )
        for usage, layout in usages[:MOST_TENANTS]
    ]
    yield _table("tenants", columns, rows, width)
    if len(usages) > MOST_TENANTS:
        yield Text(f"the largest {MOST_TENANTS} of {len(usages)}; --json lists all")


def engines_table(stats: kvd_pb2.GetStatsResponse, width: int) -> Table:
    """Return the table of attached engines."""
    columns = (
        Column("engine", may_be_cut=True),
        Column("pid", is_number=True),
        Column("rss", is_number=True, rank=1),
        Column("wait", is_number=True),
        Column("run", is_number=True),
        Column("attached for", is_number=True, rank=2),
    )
    rows = [
        (
            engine.name,
            str(engine.pid),
            format_bytes(engine.rss_bytes),
            str(engine.queue_jobs),
            str(engine.running_jobs),
            format_duration(engine.attached_s),
        )
        for engine in stats.engines
    ]
    return _table("engines" if rows else "engines: none is attached", columns, rows, width)


def _counters_table(stats: kvd_pb2.GetStatsResponse, rates: Rates, width: int) -> Table:
    columns = [
        Column("counter"),
        Column("model", rank=1),
        Column("since start", is_number=True),
        Column("a second", is_number=True),
    ]
    rows: list[tuple[str, ...]] = [
        (
            name,
            layout.model[:12],
            _count(name, count),
            f"{rates.per_second(layout.layout, name):.1f}",
        )
        for layout in stats.layouts
        for name, count in sorted(layout.counters.items())
        if count
    ]
    if not rates.is_of_interval:
        columns, rows = columns[:3], [row[:3] for row in rows]
    return _table("counters that are not 0", columns, rows, width)


def _count(name: str, count: int) -> str:
    """Return a counter's value for people; the end of its name is the unit."""
    return format_bytes(count) if name.endswith("_bytes") else str(count)


def _table(
    title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int
) -> Table:
    return fitted(columns, rows, width, f"\n{title}")
