"""What a start has found out is there at the next one, or is found out again."""

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
    """Until they are forgotten."""
    file_at(path).remember({"one": {"n": 1}, "two": {"n": 2}})
    file_at(path).remember({"one": None})
    again = file_at(path)
    assert (again.find("one"), again.find("two")) == (None, {"n": 2})


def test_those_that_were_used_last_are_kept(path):
    """To be remembered again is a use."""
    file = file_at(path)
    file.remember({name: {"name": name} for name in "abc"})
    file.remember({"a": {"name": "a"}, "d": {"name": "d"}})
    again = file_at(path)
    assert [name for name in "abcd" if again.find(name)] == ["a", "c", "d"]


def test_another_format_is_not_believed(path):
    """Nor is a file in which one byte is another."""
    file_at(path).remember({"one": {"n": 1}})
    assert file_at(path, b"numbers 2").find("one") is None
    path.write_bytes(path.read_bytes().replace(b": 1}", b": 7}"))
    assert file_at(path).find("one") is None


def test_a_directory_that_is_missing_costs_the_next_start_its_time(path):
    """The entry is known to this one all the same."""
    file = file_at(path.parent / "missing" / "numbers.json")
    file.remember({"one": {"n": 1}})
    assert file.find("one") == {"n": 1}
    assert not (path.parent / "missing").exists()


def test_what_is_remembered_is_on_disk(path, monkeypatch):
    """The whole file before it has its name, then the name; for no other user."""
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


def test_what_is_wrong_with_the_file_is_logged(path):
    """With its name: whoever runs the service may mend it."""
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
