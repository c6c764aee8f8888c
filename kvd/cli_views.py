"""How the command line shows things: tables for people, plain values for --json."""

import sys
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from shared.pb.kvd.v1 import kvd_pb2
from shared.units import format_bytes, format_duration

PIPE_WIDTH = 200  # columns when the output is not a terminal: nothing is cut off


def console() -> Console:
    """Where tables go."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON values, every field present; numbers stay numbers, enums become words."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value: Any = getattr(message, field.name)
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            result[field.name] = dict(sorted(value.items()))
        elif field.is_repeated:
            result[field.name] = [_plain_value(field, item) for item in value]
        else:
            result[field.name] = _plain_value(field, value)
    return result


def _plain_value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name.rpartition("_")[2].lower()
    return value


def sessions_table(sessions: Sequence[kvd_pb2.SessionInfo], total: int) -> Table:
    """One line per session."""
    caption = None if len(sessions) == total else f"{len(sessions)} of {total} sessions"
    table = Table("session", "tenant", "model", box=None, caption=caption, caption_justify="left")
    for heading in ("tokens", "blocks", "dram", "ssd", "dirty", "idle", "expires in"):
        table.add_column(heading, justify="right")
    table.add_column("state")
    for info in sessions:
        table.add_row(
            info.session.session_id,
            info.session.tenant,
            info.session.model[:12],
            str(info.num_tokens),
            str(info.num_blocks),
            format_bytes(info.dram_bytes),
            format_bytes(info.ssd_bytes),
            format_bytes(info.dirty_bytes),
            format_duration(info.idle_s),
            expiry(info.expires_in_s),
            _state(info),
        )
    return table


def session_table(info: kvd_pb2.SessionInfo) -> Table:
    """The facts of one session."""
    table = Table(box=None, show_header=False)
    facts = (
        ("session", info.session.session_id),
        ("tenant", info.session.tenant),
        ("model", info.session.model),
        ("layout", info.layout),
        ("tokens", str(info.num_tokens)),
        ("size", f"{format_bytes(info.bytes)} in {info.num_blocks} blocks"),
        ("in dram", format_bytes(info.dram_bytes)),
        ("on ssd", format_bytes(info.ssd_bytes)),
        ("dirty", format_bytes(info.dirty_bytes)),
        ("shared blocks", str(info.shared_blocks)),
        ("idle", format_duration(info.idle_s)),
        ("expires in", expiry(info.expires_in_s)),
        ("leases", str(info.leases)),
        ("state", _state(info) or "-"),
    )
    for name, value in facts:
        table.add_row(name, value)
    return table


def blocks_table(blocks: Sequence[kvd_pb2.BlockInfo]) -> Table:
    """One line per block of a session."""
    table = Table("block", box=None)
    for heading in ("tokens", "first row", "slot", "extent", "sessions"):
        table.add_column(heading, justify="right")
    table.add_column("tiers")
    for block in blocks:
        tiers = plain(block)["tiers"]
        table.add_row(
            block.key[:16],
            f"{block.token_offset}..{block.token_offset + block.num_tokens}",
            str(block.start),
            str(block.slot_id) if "dram" in tiers else "-",
            str(block.extent) if "ssd" in tiers else "-",
            str(block.sessions),
            "+".join(tiers) + (" dirty" if block.dirty else ""),
        )
    return table


def stats_tables(stats: kvd_pb2.GetStatsResponse) -> list[Table]:
    """Tiers, engines and counters."""
    tiers = Table("model", "tier", box=None, title="tiers", title_justify="left")
    for heading in ("used", "capacity", "blocks", "sessions", "leases", "dirty"):
        tiers.add_column(heading, justify="right")
    tiers.add_column("state")
    for layout in stats.layouts:
        for tier in layout.tiers:
            tiers.add_row(
                layout.model[:12],
                plain(tier)["tier"],
                format_bytes(tier.used_bytes),
                format_bytes(tier.capacity_bytes),
                str(tier.num_blocks),
                str(layout.num_sessions),
                str(layout.leases),
                format_bytes(layout.dirty_bytes),
                f"degraded: {tier.degraded_reason}" if tier.degraded else "ok",
            )
    engines = Table("engine", "pid", "rss", "queue", "attached", box=None, title="engines")
    engines.title_justify = "left"
    for engine in stats.engines:
        engines.add_row(
            engine.name,
            str(engine.pid),
            format_bytes(engine.rss_bytes),
            str(engine.queue_jobs),
            format_duration(engine.attached_s),
        )
    counters = Table("counter", "model", box=None, title="counters", title_justify="left")
    counters.add_column("since start", justify="right")
    for layout in stats.layouts:
        for name, count in sorted(layout.counters.items()):
            counters.add_row(name, layout.model[:12], str(count))
    return [_process_table(stats), tiers, engines, counters]


def expiry(expires_in_s: float) -> str:
    """When a session expires, for people."""
    return "never" if expires_in_s < 0 else format_duration(expires_in_s)


def _process_table(stats: kvd_pb2.GetStatsResponse) -> Table:
    process = stats.process
    table = Table(box=None, show_header=False)
    table.add_row(
        f"kvd {stats.version}",
        f"pid {process.pid}",
        f"up {format_duration(process.uptime_s)}",
        f"rss {format_bytes(process.rss_bytes)}",
        f"{process.threads} threads",
        f"{process.open_files} files",
        f"{process.cpu_s:.1f} s cpu",
        f"{format_bytes(process.memory_available_bytes)} free on the machine",
    )
    return table


def _state(info: kvd_pb2.SessionInfo) -> str:
    words = (
        ("pinned", info.pinned),
        ("ended", info.ended),
        ("in use", bool(info.leases)),
    )
    return ", ".join(word for word, applies in words if applies)
