"""What loads and saves have in common in their talk with kvd: its failures, its arena."""

from inference_svc.core.counters import Counters
from inference_svc.runtime.kv.arena_kv import ArenaKv
from shared.kvd_client.arena_map import ArenaMap
from shared.process.log import get_logger
from shared.types.errors import ReportedError
from shared.types.kv_layout import KVLayout

log = get_logger(__name__)


class KvdTalk:
    """See the module docstring."""

    def __init__(self, layout: KVLayout, counters: Counters) -> None:
        self.layout = layout
        self.counters = counters
        self._last_problem = ""
        self._rows: tuple[ArenaMap, ArenaKv] | None = None

    def rows_of(self, arena: ArenaMap) -> ArenaKv:
        """The arena as tensors; made once per arena."""
        known = self._rows  # read once: loads and saves ask from threads of their own
        if known is None or known[0] is not arena:
            known = self._rows = arena, ArenaKv(arena, self.layout)
        return known[1]

    def note_problem(self, what: str, error: Exception) -> str:
        """Count and log a failure, the log once until something works again; return its slug."""
        if what in ("load", "save"):
            self.counters.add(f"{what}_errors")
        slug = error.reason if isinstance(error, ReportedError) else "copy_failed"
        if slug != self._last_problem:
            # An error that is not of kvd's making is ours: it needs its traceback.
            trace = None if isinstance(error, ReportedError) else error
            log.warning("session_store_failed", what=what, reason=slug, exc_info=trace)
        self._last_problem = slug
        return slug

    def note_success(self) -> None:
        """Say that kvd works again, if it did not."""
        if self._last_problem:
            log.info("session_store_works_again", after=self._last_problem)
        self._last_problem = ""
