"""Results of a start are found at the next one, or computed again."""

import errno
import os
import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from inference_svc.runtime.model.remembered_file import RememberedFile


def file_at(path, file_format=b"numbers 1", most=3):
    return RememberedFile(path, "numbers", file_format, most)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "numbers.json"


def test_entries_are_there_at_the_next_start(path):
    """Until they are deleted."""
    file_at(path).remember({"one": {"n": 1}, "two": {"n": 2}})
    file_at(path).remember({"one": None})
    again = file_at(path)
    assert (again.find("one"), again.find("two")) == (None, {"n": 2})


def test_the_most_recently_used_entries_are_kept(path):
    """Storing an entry again is a use."""
    file = file_at(path)
    file.remember({name: {"name": name} for name in "abc"})
    file.remember({"a": {"name": "a"}, "d": {"name": "d"}})
    again = file_at(path)
    assert [name for name in "abcd" if again.find(name)] == ["a", "c", "d"]


def test_another_format_is_ignored(path):
    """So is a file with a changed byte."""
    file_at(path).remember({"one": {"n": 1}})
    assert file_at(path, b"numbers 2").find("one") is None
    path.write_bytes(path.read_bytes().replace(b": 1}", b": 7}"))
    assert file_at(path).find("one") is None


def test_an_unwritable_directory_costs_the_next_start_time(path):
    """This start has the entry all the same."""
    file = file_at(path.parent / "missing" / "numbers.json")
    file.remember({"one": {"n": 1}})
    assert file.find("one") == {"n": 1}
    assert not (path.parent / "missing").exists()


def test_entries_are_durable(path, monkeypatch):
    """The file is synced before it is renamed, then its directory; only the user can read it."""
    synced, fsync = [], os.fsync

    def watched(descriptor):
        found = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((found.name, found.is_dir() or found.read_bytes().endswith(b"}}")))
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", watched)
    before = len(list(Path("/proc/self/fd").iterdir()))
    file = file_at(path)
    for _ in range(2):
        file.remember({"one": {"n": 1}})
    assert synced == [("numbers.json.new", True), (path.parent.name, True)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in path.parent.iterdir()] == ["numbers.json"]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_errors_of_the_file_are_logged(path):
    """With its path, so that an operator can mend it."""
    with capture_logs() as lines:
        file_at(path.parent)
        path.write_bytes(b"rubbish")
        file = file_at(path.parent / "missing" / "numbers.json")
        file.remember({"one": {"n": 1}})
        file_at(path)
    assert [(line["event"], line["what"]) for line in lines] == [
        ("remembered_file_unreadable", "numbers"),
        ("remembered_file_not_kept", "numbers"),
        ("remembered_file_damaged", "numbers"),
    ]
    assert [line.get("error") for line in lines] == [
        os.strerror(errno.EISDIR),
        os.strerror(errno.ENOENT),
        None,
    ]
