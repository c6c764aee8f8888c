"""Log lines about a failing disk, and when it is tried again."""

import errno

import pytest
from structlog.testing import capture_logs

from inference_svc.runtime.turns.disk_trouble import DiskTrouble


async def test_a_healthy_disk_is_not_tried(tmp_path):
    """Nothing is written to it for that."""
    await DiskTrouble(tmp_path / "gone").check_room()


@pytest.mark.parametrize(
    ("number", "event", "remedy"),
    [
        (errno.ENOSPC, "transcript_disk_full", "free some space there"),
        (errno.EIO, "transcript_unavailable", "check that disk"),
    ],
)
def test_one_line_a_second_has_the_remedy(tmp_path, number, event, remedy):
    """The next one has the number of omitted lines."""
    trouble = DiskTrouble(tmp_path)
    seconds = iter((0.0, 0.5, 0.9, 1.0))
    trouble._lines._clock_s = lambda: next(seconds)
    with capture_logs() as lines:
        for _ in range(4):
            trouble.record_failure("s", tmp_path / "file", OSError(number, "why"), "write")
    assert [(one["event"], one["remedy"], one["more"]) for one in lines] == [
        (event, remedy, 0),
        (event, remedy, 2),
    ]
    assert {(one["path"], one["error"]) for one in lines} == {(str(tmp_path / "file"), "why")}
