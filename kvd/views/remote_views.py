"""The sessions in a remote store as a table for people. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal.tables import Column, fitted
from shared.types.units import format_bytes, format_duration

_COLUMNS = (
    Column("session", may_be_cut=True, least=36),  # a UUID
    Column("tenant", rank=2, may_be_cut=True, least=12),
    Column("model", rank=6),
    Column("tokens", is_number=True),
    Column("bytes", is_number=True),
    Column("owner", rank=4, may_be_cut=True, least=12),
    Column("epoch", is_number=True, rank=5),
    Column("pushed", is_number=True),
    Column("expires in", is_number=True, rank=3),
    Column("sealed", rank=7),
)


@dataclass(frozen=True)
class PushedRow:
    """A session in a store, as a row of the table.

    Attributes:
        expires_in_s: seconds until it expires; None: it does not.
        age_s: seconds since its manifest was stored.
    """

    tenant: str
    model: str
    session: str
    num_tokens: int
    num_bytes: int
    owner: str
    epoch: int
    age_s: float
    expires_in_s: float | None
    sealed: bool


def pushed_row(manifest: kvd_pb2.SessionManifest, age_s: float) -> PushedRow:
    """Return the row of a session whose manifest was stored `age_s` ago."""
    return PushedRow(
        tenant=manifest.session.tenant,
        model=manifest.session.model,
        session=manifest.session.session_id,
        num_tokens=manifest.num_tokens,
        num_bytes=sum(chunk.num_bytes for chunk in manifest.chunks),
        owner=manifest.owner_name,
        epoch=manifest.epoch,
        age_s=age_s,
        expires_in_s=None if manifest.expires_after_s < 0 else manifest.expires_after_s - age_s,
        sealed=manifest.HasField("seal"),
    )


def pushed_table(rows: Sequence[PushedRow], width: int) -> Table:
    """Return the table, a line per session."""
    return fitted(_COLUMNS, [_cells(row) for row in rows], width)


def _cells(row: PushedRow) -> tuple[str, ...]:
    expires = "never" if row.expires_in_s is None else format_duration(max(0.0, row.expires_in_s))
    return (
        row.session,
        row.tenant,
        row.model[:12],
        str(row.num_tokens),
        format_bytes(row.num_bytes),
        row.owner,
        str(row.epoch),
        format_duration(max(0.0, row.age_s)),
        expires,
        "yes" if row.sealed else "no",
    )
