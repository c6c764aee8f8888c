"""A follower's status file, and how readers know whether the follower still runs."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from kvd.config import RemoteSettings
from kvd.errors import NotFollowedError
from kvd.following.figures import Backlog, Figures, follower_status
from kvd.following.status import FILE, FRESH_S, own_place, read_status, write_status

NOW_S = 1_790_000_000.0
WAITING = Backlog(num_unpushed=4, oldest_s=2.5, num_drops=1, num_wanted=6, num_evicted=5)


def _status():
    figures = Figures(kvd_up=True, pulling=2)
    figures.pushes.add("pushed", amount=3)
    figures.pushes.add("failed")
    figures.requests.add("put", amount=7)
    figures.record_failure("remote_store_fails", "no answer")
    settings = RemoteSettings(url="file:///store", write="all", pull=True)
    return follower_status(figures, WAITING, settings, NOW_S - 60, NOW_S)


def test_a_status_round_trips(tmp_path):
    """Any user may read it, and no other file is left in the directory."""
    place = own_place(tmp_path, {})
    write_status(place, _status())
    write_status(place, _status())
    found = read_status(tmp_path, NOW_S + 1)
    assert (found.pid, found.url) == (os.getpid(), "file:///store")
    assert (found.num_unpushed, found.num_pulling, found.num_evicted) == (4, 2, 5)
    assert (found.pushes, found.requests) == ({"failed": 1, "pushed": 3}, {"put": 7})
    assert [failure.why for failure in found.failures] == ["no answer"]
    assert found.is_well
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert place.stat().st_mode & 0o777 == 0o644


def test_under_systemd_the_file_is_in_the_followers_directory(tmp_path):
    """It lies beside kvd's directory; of two files the newer one counts."""
    kvd, own = tmp_path / "kvd", tmp_path / "kvd-remote"
    for directory in (kvd, own):
        directory.mkdir()
    write_status(own_place(kvd, {"RUNTIME_DIRECTORY": str(own)}), _status())
    assert read_status(kvd, NOW_S).num_unpushed == 4
    write_status(own_place(kvd, {}), replace(_status(), unix_s=NOW_S - 9, num_unpushed=5))
    assert read_status(kvd, NOW_S).num_unpushed == 4


def test_where_none_runs_that_is_said(tmp_path):
    """None was there; it is silent; its process has ended; or its file is none."""
    with pytest.raises(NotFollowedError, match=r"the kvd in .* has no follower running"):
        read_status(tmp_path, NOW_S)
    write_status(own_place(tmp_path, {}), _status())
    with pytest.raises(NotFollowedError, match="has died, or hangs: it last reported 31 s ago"):
        read_status(tmp_path, NOW_S + FRESH_S + 1)
    command = (sys.executable, "-c", "import os; print(os.getpid())")
    ended = subprocess.run(command, capture_output=True, check=True)
    write_status(own_place(tmp_path, {}), replace(_status(), pid=int(ended.stdout)))
    with pytest.raises(NotFollowedError, match="has died, or hangs: it last reported 0 s ago"):
        read_status(tmp_path, NOW_S)
    write_status(own_place(tmp_path, {}), replace(_status(), start_ticks=1))  # its pid is reused
    with pytest.raises(NotFollowedError, match="has died, or hangs: it last reported 0 s ago"):
        read_status(tmp_path, NOW_S)
    (tmp_path / FILE).write_text('{"pid": 1}')
    with pytest.raises(NotFollowedError, match=r"the kvd in .* has no follower running"):
        read_status(tmp_path, NOW_S)


def test_a_killed_follower_counts_as_dead_before_it_is_reaped(tmp_path):
    """Its pid exists until then."""
    with subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE) as process:
        write_status(own_place(tmp_path, {}), replace(_status(), pid=process.pid, start_ticks=0))
        assert read_status(tmp_path, NOW_S).is_well
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(NotFollowedError, match="has died, or hangs: it last reported 0 s ago"):
            read_status(tmp_path, NOW_S)


@pytest.mark.parametrize(
    ("kvd_up", "store_up", "is_well"),
    [(True, None, True), (True, True, True), (True, False, False), (False, True, False)],
)
def test_it_is_healthy_while_store_and_kvd_answer(kvd_up, store_up, is_well):
    """A store that was not asked yet does not count as failing."""
    assert replace(_status(), kvd_up=kvd_up, store_up=store_up).is_well is is_well
