"""A session on its way into a file: its own spans, leased a few at a time, each proven as it goes.

Pure. An export is no use of the session: it changes neither its age nor its place in any order,
though what is on SSD comes through DRAM. Blocks in DRAM are verified before they are given out: a
file outlives the memory.

What another kvd needs besides tokens and rows is the lineage: which discards the context comes
after. A kvd that has restarted since may not know it; then what follows from the tokens alone can
be exported, and the rest only once an engine has named the lineage again.

Invariant: what is given out is the session's tokens from the first one on, computed as `lineage`
says.
"""

from dataclasses import dataclass

from kvd.core.operations.chaining import Chaining
from kvd.core.operations.matching import Piece, slice_tokens
from kvd.core.records.errors import SessionChangedError, UnknownLineageError
from kvd.core.records.records import ExportedRows
from kvd.core.records.rows import Span
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import LoadLease
from kvd.core.state.session import Session
from shared.types.lineage import WHOLE, Lineage
from shared.types.session_key import SessionKey


@dataclass(slots=True, eq=False)
class Export:
    """How far the export of one session is.

    Attributes:
        spans: the session's, when it began.
        lineage: as it is known; where it is not, what the tokens have to prove: that it is whole.
        next_span: the first one that is not exported.
        num_tokens: exported so far.
        chain: of the span before the next one.
    """

    key: SessionKey
    spans: tuple[Span, ...]
    lineage: Lineage
    next_span: int = 0
    num_tokens: int = 0
    chain: bytes = b""

    @property
    def is_done(self) -> bool:
        """Whether every span is exported."""
        return self.next_span == len(self.spans)


def begin(state: CacheState, session: Session) -> Export:
    """Begin to export a session as it is now."""
    spans = (*session.spans, *session.tail_spans())
    is_coupled = state.layout.position_mode == "coupled"
    lineage = WHOLE if is_coupled or session.lineage is None else session.lineage
    chaining = Chaining(state, session.key.tenant, WHOLE)
    return Export(session.key, spans, lineage, chain=chaining.root)


def next_pieces(state: CacheState, export: Export, max_spans: int) -> list[Piece]:
    """Find the blocks of the next spans.

    Raises:
        SessionChangedError: the session does not have them any more.
    """
    session = state.sessions.get(export.key)
    if session is None:
        raise SessionChangedError(f"session {export.key} has gone meanwhile", "see: kvd ls")
    state.tails.unpack(session)
    end = min(export.next_span + max_spans, len(export.spans))
    wanted = export.spans[export.next_span : end]
    if tuple(session.spans[export.next_span : end]) != wanted:
        raise SessionChangedError(
            f"session {export.key} has changed meanwhile", "export it again when it is idle"
        )
    pieces = []
    offset = export.num_tokens
    for span in wanted:
        pieces.append(Piece(span, state.blocks[span.block_key], offset))
        offset += span.num_tokens
    return pieces


def take(state: CacheState, export: Export, lease: LoadLease) -> list[ExportedRows]:
    """Prove the rows that a settled lease has, and go on behind them.

    Raises:
        UnknownLineageError: what the next ones were computed after is not known.
    """
    chaining = Chaining(state, export.key.tenant, export.lineage)
    rows: list[ExportedRows] = []
    for block, granted in lease.entries:
        span = export.spans[export.next_span]
        tokens = slice_tokens(block.token_ids, span.start, span.start + span.num_tokens)
        if not chaining.holds(span, export.chain, export.num_tokens, tokens):
            if rows:
                break  # these first
            raise UnknownLineageError(
                f"session {export.key} has discarded tokens, and kvd was not told since it started "
                f"what its tokens from {export.num_tokens} on were computed after",
                "let its next turn run first, or export what comes before them with --prefix",
            )
        rows.append(ExportedRows(granted.slot_id, granted.start, granted.num_tokens, tokens))
        export.chain = span.chain
        export.next_span += 1
        export.num_tokens += span.num_tokens
    return rows
