"""SessionFiles: export of sessions into files and import from files (see kvd/session_files).

Pure. An export leases the session's own spans like a load, a few at a time, and checks that each
holds the tokens that the file will claim. It does not count as a use of the session: it changes
neither its age nor its place in any order, although its blocks on SSD are read through DRAM. Blocks
in DRAM are verified before they are exported, because the file outlives the memory. An import is
stored like KV that an engine has computed. Both are refused for a tenant that is being erased.

Besides tokens and KV another kvd needs the lineage: the discards that the context comes after. A
kvd that has restarted since may not know it. Then only what follows from the tokens alone can be
exported, until an engine has named the lineage again.

With states, the session's newest state is exported behind its tokens; with windows, those that a
load to the last possible end needs.

Invariant: an export consists of the session's tokens from the first one on, computed after
`lineage`, and of a state or windows of these tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvd.core.inspection.session_filter import find_session
from kvd.core.operations.chaining import Chaining
from kvd.core.operations.loading import Loader
from kvd.core.operations.matching import Piece, slice_tokens, token_spans
from kvd.core.operations.state_matching import StateChain
from kvd.core.operations.storing import Storer
from kvd.core.operations.window_matching import Rows, possible_ends
from kvd.core.records.entries import Span
from kvd.core.records.errors import SessionChangedError, UnknownLineageError
from kvd.core.records.records import ExportedRows, LoadAnswer, StoreAnswer
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import LoadLease
from kvd.core.state.stored_parts import group_parts
from shared.types.lineage import WHOLE, Lineage
from shared.types.session_key import SessionKey


@dataclass(slots=True, eq=False)
class Export:
    """The progress of one session's export.

    Attributes:
        key: the session.
        spans: its token spans when the export began.
        lineage: its lineage. If that is not known it is WHOLE, which the tokens have to prove.
        next_span: index of the first span that is not exported yet.
        num_tokens: number of tokens exported so far.
        chain: chain key of the last exported span.
        position: position of the newest state, or of the end that the windows are for; 0: none.
        parts: the parts of that state or of these windows.
        windows: first token, number of tokens and first row of each window.
        next_part: index of the first part that is not exported yet.
        token_ids: tokens exported so far; kept only if there are parts, to check a state's key.
    """

    key: SessionKey
    spans: tuple[Span, ...]
    lineage: Lineage
    next_span: int = 0
    num_tokens: int = 0
    chain: bytes = b""
    position: int = 0
    parts: tuple[Span, ...] = ()
    windows: tuple[Rows, ...] = ()
    next_part: int = 0
    token_ids: bytes = b""

    @property
    def is_done(self) -> bool:
        """Whether every span is exported."""
        return self.next_span == len(self.spans)


class SessionFiles:
    """Exports and imports sessions of one cache state."""

    def __init__(self, state: CacheState, loader: Loader, storer: Storer) -> None:
        self._state = state
        self._loader = loader
        self._storer = storer

    def begin_export(self, key: SessionKey) -> Export:
        """Begin to export a session as it is now.

        The caller owes `prepare_export` until the export `is_done`, then `prepare_export_parts`
        until all parts are exported.

        Raises:
            UnknownSessionError: the session is not stored.
            ErasingError: the tenant is being erased.
        """
        state = self._state
        state.tenants.refuse_erased(key.tenant)
        session = find_session(state, key)
        spans = [*session.spans, *session.tail_spans()]
        runs = tuple(span for span in spans if span.num_tokens)
        is_coupled = state.layout.position_mode == "coupled"
        lineage = WHOLE if is_coupled or session.lineage is None else session.lineage
        root = Chaining(state.layout, state.salt_of(key.tenant), WHOLE).root
        export = Export(key, runs, lineage, chain=root)
        others = group_parts(spans)
        if state.layout.window:
            self._add_windows(export, others)
        elif others:
            newest = max(others.values(), key=lambda parts: parts[0].start)
            export.parts = tuple(newest)
            export.position = export.parts[0].start
        return export

    def _add_windows(self, export: Export, others: Mapping[bytes, Sequence[Span]]) -> None:
        """Add the windows to be exported, and that of one block more.

        The block before lets a load end a little earlier, if the next turn diverges there.
        """
        layout, runs = self._state.layout, export.spans
        ends = list(accumulate(run.num_tokens for run in runs))
        has_window = [run.block_key in others for run in runs]
        last = max(possible_ends(ends, has_window, layout.window), default=None)
        if last is None:
            return
        export.position = ends[last]
        first = last
        wanted = export.position - layout.window - layout.block_tokens
        while first and has_window[first - 1] and ends[first - 1] > wanted:
            first -= 1
        some = range(first, last + 1)
        export.parts = tuple(part for index in some for part in others[runs[index].block_key])
        export.windows = tuple(
            (ends[i] - runs[i].num_tokens, runs[i].num_tokens, runs[i].start) for i in some
        )

    def prepare_export(self, export: Export, max_spans: int, engine_id: int) -> LoadAnswer:
        """Lease the next spans, as far as there are slots; the caller owes the same as for a load.

        Once the load is settled the caller owes `confirm_export`, which returns what the slots
        hold, and then completes the load. The answer's spans are at their places in the session.

        Raises:
            SessionChangedError: the session has other spans by now.
            TooManyLeasesError: the bound on leases is reached.
            ErasingError: the tenant is being erased.
        """
        state = self._state
        state.tenants.refuse_erased(export.key.tenant)
        return self._grant(export, self._next_pieces(export, max_spans), engine_id)

    def prepare_export_parts(self, export: Export, max_parts: int, engine_id: int) -> LoadAnswer:
        """Lease the next parts, once all tokens before the position are exported.

        The slots are those of the settled answer's spans, which have no tokens. The caller owes
        `confirm_export_parts` and the load's completion.

        Raises:
            SessionChangedError: the session does not have these parts any more.
            TooManyLeasesError: the bound on leases is reached.
            ErasingError: the tenant is being erased.
        """
        state = self._state
        state.tenants.refuse_erased(export.key.tenant)
        session = state.sessions.get(export.key)
        if session is not None:
            state.tails.unpack(session)
        parts = export.parts[export.next_part : export.next_part + max_parts]
        if session is None or not set(parts) <= set(session.spans) or not self._are_proven(export):
            raise _session_changed(export.key)
        pieces = [Piece(span, state.blocks[span.block_key], export.position) for span in parts]
        return self._grant(export, pieces, engine_id)

    def _are_proven(self, export: Export) -> bool:
        """Whether the parts belong to the exported tokens.

        Windows do, because they are found by the keys of the exported blocks.
        """
        layout = self._state.layout
        if layout.window:
            return True
        chain = StateChain(self._chaining(export), layout.block_tokens, export.token_ids)
        return chain.spans_at([export.position])[export.position] == list(export.parts)

    def confirm_export_parts(self, export: Export, lease_id: int) -> list[int]:
        """Return the slots of a settled lease's parts, and advance the export behind them.

        Raises:
            LeaseLostError: a part was found corrupt.
        """
        lease = self._state.leases.load_of(lease_id)
        export.next_part += len(lease.entries)
        return [granted.slot_id for _, granted in lease.entries]

    def _grant(self, export: Export, pieces: list[Piece], engine_id: int) -> LoadAnswer:
        """Grant a load lease on pieces that counts as an export."""
        state = self._state
        lease = LoadLease(
            state.leases.next_id(),
            engine_id,
            export.key,
            export.num_tokens,
            since_ns=state.now_ns,
            is_export=True,
        )
        return self._loader.grant(lease, pieces, len(pieces))

    def _chaining(self, export: Export) -> Chaining:
        state = self._state
        return Chaining(state.layout, state.salt_of(export.key.tenant), export.lineage)

    def confirm_export(self, export: Export, lease_id: int) -> list[ExportedRows]:
        """Check the KV of a settled lease, and advance the export behind it.

        Returns:
            The rows to export; empty if a read has failed.

        Raises:
            LeaseLostError: the KV was found corrupt.
            UnknownLineageError: it is not known which discards the KV was computed after.
        """
        lease = self._state.leases.load_of(lease_id)
        chaining = self._chaining(export)
        rows: list[ExportedRows] = []
        for block, granted in lease.entries:
            span = export.spans[export.next_span]
            tokens = slice_tokens(block.token_ids, span.start, span.start + span.num_tokens)
            if not chaining.holds(span, export.chain, export.num_tokens, tokens):
                if rows:
                    break  # export these first; the next call raises
                raise UnknownLineageError(
                    f"session {export.key} has discarded tokens, and since kvd started nobody has "
                    f"told it which tokens preceded those from {export.num_tokens} on",
                    "let the session's next turn run first, or export only the tokens before them "
                    "with --prefix",
                )
            rows.append(ExportedRows(granted.slot_id, granted.start, granted.num_tokens, tokens))
            export.chain = span.chain
            export.next_span += 1
            export.num_tokens += span.num_tokens
            if export.parts:
                export.token_ids += tokens
        return rows

    def prepare_import(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        engine_id: int,
        lineage: Lineage,
        load_ends: Sequence[int] = (),
    ) -> StoreAnswer:
        """Lease slots like a store, for imported KV, which belongs to no turn."""
        self._state.tenants.refuse_erased(key.tenant)
        return self._storer.lease_slots(key, token_ids, from_token, engine_id, lineage, load_ends)

    def _next_pieces(self, export: Export, max_spans: int) -> list[Piece]:
        """Return the next spans with their blocks.

        Raises:
            SessionChangedError: the session does not have these spans any more.
        """
        state = self._state
        session = state.sessions.get(export.key)
        if session is None:
            raise SessionChangedError(
                f"session {export.key} was dropped in the meantime",
                "list the stored sessions with: kvd ls",
            )
        state.tails.unpack(session)
        end = min(export.next_span + max_spans, len(export.spans))
        wanted = export.spans[export.next_span : end]
        if tuple(token_spans(state, session)[export.next_span : end]) != wanted:
            raise _session_changed(export.key)
        pieces = []
        offset = export.num_tokens
        for span in wanted:
            pieces.append(Piece(span, state.blocks[span.block_key], offset))
            offset += span.num_tokens
        return pieces


def _session_changed(key: SessionKey) -> SessionChangedError:
    return SessionChangedError(
        f"session {key} has changed in the meantime",
        "export it again when no turn of it is running",
    )
