"""The tables of `kvd show` for a session: properties, leases, history, blocks. Pure."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from kvd.views.views import expiry, leases_table, state
from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal.printing import counted, plain
from shared.terminal.tables import Column, fitted
from shared.types.units import format_bytes, format_duration

_BLOCK_COLUMNS = (
    Column("block"),
    Column("tokens", is_number=True),
    Column("first row", is_number=True, rank=2),
    Column("slot", is_number=True, rank=1),
    Column("extent", is_number=True, rank=1),
    Column("sessions", is_number=True),
    Column("copies"),
)
_STATE_COLUMNS = (
    Column("position", is_number=True),
    Column("size", is_number=True),
    Column("sessions", is_number=True),
    Column("copies"),
)
_WINDOW_COLUMNS = (Column("tokens", is_number=True), *_STATE_COLUMNS[1:])
_MOVE_COLUMNS = (
    Column("ago", is_number=True),
    Column("what"),
    Column("blocks", is_number=True),
    Column("tokens", is_number=True),
    Column("took", is_number=True, rank=1),
)
_MOVES = {  # texts for kinds of events, some with the event's reason
    "stored": "stored",
    "loaded": "loaded from {why}",
    "read": "read from SSD",
    "read_ahead": "read from SSD, ahead of a load",
    "written": "written to SSD",
    "evicted_dram": "evicted from DRAM",
    "evicted_ssd": "evicted from SSD",
    "cut": "cut: {why}",
    "parts_dropped": "state or window dropped: {why}",
    "discarded": "tokens discarded",
    "grafted": "tokens taken over from another session",
    "compacted": "compacted",
    "corrupt": "found corrupt in {why}",
    "dropped": "dropped: {why}",
    "expired": "expired",
    "flushed": "flushed",
    "ended": "ended by its engine",
    "awaiting": "awaits {why}",
    "superseded": "superseded: another session goes on in its place",
    "pinned": "pinned ({why})",
    "unpinned": "unpinned",
    "ttl_set": "TTL set",
    "retained": "retained, as its client wishes",
    "unretained": "retained no more",
    "missed": "missed: {why}",
}


def session_tables(found: kvd_pb2.DescribeSessionResponse, width: int) -> Iterator[Table]:
    """Yield all tables of a session, in the order an operator reads them."""
    yield session_table(found.info)
    if found.leases:
        yield _titled("leases", leases_table(found.leases, width))
    yield history_table(found.history, width)
    yield _titled("blocks", blocks_table(found.blocks, width))
    if found.states:
        yield _titled("states", states_table(found.states, width))
    if found.windows:
        num_tokens = sum(window.num_tokens for window in found.windows)
        title = f"windows, of {num_tokens} of {found.info.num_tokens} tokens"
        yield _titled(title, windows_table(found.windows, width))


def session_table(info: kvd_pb2.SessionInfo) -> Table:
    """Return the table of a session's properties."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    facts = (
        ("session", info.session.session_id),
        ("tenant", info.session.tenant),
        ("model", info.session.model),
        ("layout", info.layout),
        ("tokens", str(info.num_tokens)),
        ("size", f"{format_bytes(info.bytes)} in {counted(info.num_blocks, 'block')}"),
        ("in dram", format_bytes(info.dram_bytes)),
        ("on ssd", format_bytes(info.ssd_bytes)),
        ("dirty", format_bytes(info.dirty_bytes)),
        ("shared blocks", str(info.shared_blocks)),
        ("spans", str(info.num_spans)),
        ("unused rows", f"{format_bytes(info.waste_bytes)} in blocks of its own"),
        ("idle", format_duration(info.idle_s)),
        ("expires in", f"{expiry(info.expires_in_s)} (ttl: {_ttl_source(info)})"),
        ("retained for", _retention(info)),
        ("awaits", ", ".join(info.awaited_tools) or "-"),
        ("leases", str(info.leases)),
        ("state", state(info)),
    )
    for name, value in facts:
        table.add_row(name, value)
    return table


def blocks_table(blocks: Sequence[kvd_pb2.BlockInfo], width: int) -> Table:
    """Return the table of a session's blocks, a line per block."""
    rows = []
    for block in blocks:
        tiers = plain(block)["tiers"]
        row = (
            block.key[:16],
            f"{block.token_offset}..{block.token_offset + block.num_tokens}",
            str(block.start),
            str(block.slot_id) if "dram" in tiers else "-",
            str(block.extent) if "ssd" in tiers else "-",
            str(block.sessions),
            _copies(block),
        )
        rows.append(row)
    return fitted(_BLOCK_COLUMNS, rows, width)


def states_table(states: Sequence[kvd_pb2.StateInfo], width: int) -> Table:
    """Return the table of the model's states of a session, with their positions and tiers."""
    rows = [(str(found.position), *_place_of(found)) for found in states]
    return fitted(_STATE_COLUMNS, rows, width)


def windows_table(windows: Sequence[kvd_pb2.WindowInfo], width: int) -> Table:
    """Return the table of runs of tokens that have windows, with their tiers."""
    rows = []
    for found in windows:
        end = found.token_offset + found.num_tokens
        rows.append((f"{found.token_offset}..{end}", *_place_of(found)))
    return fitted(_WINDOW_COLUMNS, rows, width)


def _place_of(found: kvd_pb2.StateInfo | kvd_pb2.WindowInfo) -> tuple[str, str, str]:
    """Return size, sessions and tiers of a state or window."""
    words = (
        ("+".join(plain(found)["tiers"]) or "in parts", True),
        ("dirty", found.dirty),
        ("not hashed", not found.hashed),
    )
    copies = ", ".join(word for word, applies in words if applies)
    return format_bytes(found.bytes), str(found.sessions), copies


def history_table(moves: Sequence[kvd_pb2.SessionMove], width: int) -> Table:
    """Return the table of a session's last events, newest last; kvd forgets them at a restart."""
    rows = [
        (
            format_duration(move.age_s),
            _MOVES.get(move.kind, move.kind).format(why=move.why),
            str(move.num_blocks) if move.num_blocks else "-",
            str(move.num_tokens) if move.num_tokens else "-",
            format_duration(move.duration_s) if move.duration_s else "-",
        )
        for move in moves
    ]
    if not rows:
        rows.append(("-", "nothing since kvd has started", "-", "-", "-"))
    return _titled("history", fitted(_MOVE_COLUMNS, rows, width))


def _titled(title: str, table: Table) -> Table:
    table.title, table.title_justify = f"\n{title}", "left"
    return table


def _ttl_source(info: kvd_pb2.SessionInfo) -> str:
    sources = {
        kvd_pb2.TTL_SOURCE_SESSION: "its own",
        kvd_pb2.TTL_SOURCE_TENANT: "its tenant's",
    }
    return sources.get(info.ttl_source, "default")


def _retention(info: kvd_pb2.SessionInfo) -> str:
    if not info.retain_s:
        return "-"
    times = format_duration(info.retained_for_s), format_duration(info.retain_s)
    return "{} ({} after each use)".format(*times)


def _copies(block: kvd_pb2.BlockInfo) -> str:
    """Return the tiers of a block, and work that is still to be done on it."""
    tiers = plain(block)["tiers"]
    words = (
        ("+".join(tiers), True),
        ("dirty", block.dirty),
        ("not hashed", not block.hashed),
        ("unverified", "dram" in tiers and not block.verified),
    )
    return ", ".join(word for word, applies in words if applies)
