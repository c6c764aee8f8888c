"""SessionFiles: sessions on their way into files and out of them; kvd/session_files asks for it.

Pure. An export is leased like a load (`exporting.py` says of what), an import is stored like what
an engine has computed. A tenant that is being erased can do neither.
"""

from kvd.core.operations import exporting, retention
from kvd.core.operations.erasing import Eraser
from kvd.core.operations.exporting import Export
from kvd.core.operations.loading import Loader
from kvd.core.operations.storing import Storer
from kvd.core.records.records import ExportedRows, LoadAnswer, StoreAnswer
from kvd.core.state.cache_state import CacheState
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey


class SessionFiles:
    """Exports and imports of one cache state."""

    def __init__(self, state: CacheState, loader: Loader, storer: Storer, erasing: Eraser) -> None:
        self._state = state
        self._loader = loader
        self._storer = storer
        self._erasing = erasing

    def begin_export(self, key: SessionKey) -> Export:
        """Begin to export a session: what it is now.

        Raises:
            UnknownSessionError: it is not stored.
            ErasingError: the tenant is being erased.
        """
        self._erasing.refuse(key.tenant)
        return exporting.begin(self._state, retention.find_session(self._state, key))

    def prepare_export(self, export: Export, max_spans: int, owner: int, now_ns: int) -> LoadAnswer:
        """Lease the next spans, as far as slots can be had; the caller owes what a load owes.

        When it is settled `exported` says what the rows are, before `complete_load`. The spans of
        the answer are at their places in the session.

        Raises:
            SessionChangedError: it is another session by now.
            TooManyLeasesError: at the bound.
            ErasingError: the tenant is being erased.
        """
        self._erasing.refuse(export.key.tenant)
        self._state.advance(now_ns)
        return self._loader.prepare_export(export, max_spans, owner)

    def exported(self, export: Export, lease_id: int) -> list[ExportedRows]:
        """Prove the rows of a settled lease, and go on behind them; none: a read did not come.

        Raises:
            LeaseLostError: the rows turned out corrupt.
            UnknownLineageError: nobody knows what they were computed after.
        """
        return exporting.take(self._state, export, self._state.leases.load_of(lease_id))

    def prepare_import(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        owner: int,
        lineage: Lineage,
        now_ns: int,
    ) -> StoreAnswer:
        """Lease slots as `prepare_store` does, for what no turn has computed."""
        self._erasing.refuse(key.tenant)
        self._state.advance(now_ns)
        return self._storer.prepare(key, token_ids, from_token, owner, lineage)
