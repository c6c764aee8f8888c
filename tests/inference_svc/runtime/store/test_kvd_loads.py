"""What is said of failures of kvd."""

from structlog.testing import capture_logs

from inference_svc.core.counters import Counters
from inference_svc.runtime.store.kvd_loads import KvdTalk
from shared.types.errors import UnavailableError
from tests.synthetic_engine import small_layout


def test_a_failure_is_logged_once_until_something_works_again():
    """Each is counted, one of another kind is logged too; ours has its traceback."""
    counters = Counters()
    talk = KvdTalk(small_layout(), counters)
    away, ours = UnavailableError("kvd is away", "start it"), RuntimeError("a mistake")
    with capture_logs() as logs:
        for error in (away, away, ours, ours):
            talk.note_problem("load", error)
        talk.note_success()
        talk.note_success()
        assert talk.note_problem("discard", away) == away.reason
    logged = [(line["event"], line.get("reason"), line.get("exc_info")) for line in logs]
    assert logged == [
        ("session_store_failed", away.reason, None),
        ("session_store_failed", "copy_failed", ours),
        ("session_store_works_again", None, None),
        ("session_store_failed", away.reason, None),
    ]
    assert counters.snapshot()["load_errors"] == 4
