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
        ("spans", str(info.num_spans)),
        ("unused rows", f"{format_bytes(info.waste_bytes)} in blocks of its own"),
        ("idle", format_duration(info.idle_s)),
        ("expires in", f"{expiry(info.expires_in_s)} (ttl: {_ttl_source(info)})"),
        ("leases", str(info.leases)),
        ("state", _state(info)),
    )
    for name, value in facts:
        table.add_row(name, value)
    return table


def blocks_table(blocks: Sequence[kvd_pb2.BlockInfo]) -> Table:
    """One line per block of a session."""
    table = Table("block", box=None)
    for heading in ("tokens", "first row", "slot", "extent", "sessions"):
        table.add_column(heading, justify="right")
    table.add_column("copies")
    for block in blocks:
        tiers = plain(block)["tiers"]
        table.add_row(
            block.key[:16],
            f"{block.token_offset}..{block.token_offset + block.num_tokens}",
            str(block.start),
            str(block.slot_id) if "dram" in tiers else "-",
            str(block.extent) if "ssd" in tiers else "-",
            str(block.sessions),
            _copies(block),
        )
    return table


def leases_table(leases: Sequence[kvd_pb2.LeaseInfo]) -> Table:
    """One line per lease."""
    table = Table("lease", "kind", "session", "tenant", "model", box=None)
    for heading in ("slots", "bytes", "age", "pid"):
        table.add_column(heading, justify="right")
    table.add_column("process")
    table.add_column("state")
    for lease in leases:
        table.add_row(
            str(lease.lease_id),
            plain(lease)["kind"],
            lease.session.session_id or "-",
            lease.session.tenant or "-",
            lease.session.model[:12] or "-",
            str(lease.num_slots),
            format_bytes(lease.bytes),
            format_duration(lease.age_s),
            str(lease.pid) if lease.pid else "-",
            " ".join(word for word in (lease.engine_name, lease.process_status) if word) or "-",
            _lease_state(lease),
        )
    return table


def verify_line(progress: kvd_pb2.VerifyProgress) -> str:
    """How far a verification is, in one line of a terminal."""
    num_checked = progress.dram.num_blocks + progress.ssd.num_blocks
    share = min(1.0, num_checked / progress.num_copies) if progress.num_copies else 1.0
    num_corrupt = progress.dram.num_corrupt + progress.ssd.num_corrupt
    checked_bytes = format_bytes(progress.dram.bytes + progress.ssd.bytes)
    return f"{share:4.0%}  {num_checked} copies, {checked_bytes}, {num_corrupt} corrupt"


def verify_table(report: kvd_pb2.VerifyProgress) -> Table:
    """What a verification found."""
    table = Table("tier", box=None)
    for heading in ("copies checked", "bytes", "corrupt"):
        table.add_column(heading, justify="right")
    for name, tier in (("dram", report.dram), ("ssd", report.ssd)):
        table.add_row(name, str(tier.num_blocks), format_bytes(tier.bytes), str(tier.num_corrupt))
    table.caption = (
        f"{report.num_repaired} repaired, {report.num_lost} lost, {report.num_errors} not checked"
    )
    table.caption_justify = "left"
    return table


def facts_row(*facts: str) -> Table:
    """A line of facts; empty ones are left out."""
    table = Table(box=None, show_header=False)
    table.add_row(*(fact for fact in facts if fact))
    return table


def temperature(info: kvd_pb2.SessionInfo) -> str:
    """How fast a session loads: hot (all in DRAM), warm (partly), cold (on SSD only)."""
    if not info.dram_bytes:
        return "cold"
    return "hot" if info.dram_bytes == info.bytes else "warm"


def expiry(expires_in_s: float) -> str:
    """When a session expires, for people."""
    return "never" if expires_in_s < 0 else format_duration(expires_in_s)


def _ttl_source(info: kvd_pb2.SessionInfo) -> str:
    sources = {
        kvd_pb2.TTL_SOURCE_SESSION: "its own",
        kvd_pb2.TTL_SOURCE_TENANT: "its tenant's",
    }
    return sources.get(info.ttl_source, "default")


def _state(info: kvd_pb2.SessionInfo) -> str:
    words = (
        (temperature(info), True),
        ("pinned", info.pin == kvd_pb2.PIN_HARD),
        ("soft-pinned", info.pin == kvd_pb2.PIN_SOFT),
        ("ended", info.ended),
        ("in use", bool(info.leases)),
    )
    return ", ".join(word for word, applies in words if applies)


def _copies(block: kvd_pb2.BlockInfo) -> str:
    """Where a block is, and what is still to be done with it."""
    tiers = plain(block)["tiers"]
    words = (
        ("+".join(tiers), True),
        ("dirty", block.dirty),
        ("not hashed", not block.hashed),
        ("unverified", "dram" in tiers and not block.verified),
    )
    return ", ".join(word for word, applies in words if applies)


def _lease_state(lease: kvd_pb2.LeaseInfo) -> str:
    if lease.quarantined:
        return "quarantined"
    return "attached, waits for reads" if lease.pending else "attached"
