"""The bench's directories: room is checked before a run, nothing is left after it."""

from pathlib import Path

import pytest

from kvd.bench.workspace import Workspace, machine_facts, workspace
from shared.measuring.workspace import NoRoomError, check_memory


def test_everything_is_removed_when_a_run_is_interrupted(tmp_path):
    used: list[Workspace] = []
    with pytest.raises(KeyboardInterrupt):
        _interrupt(tmp_path, used)
    assert not list(tmp_path.iterdir())
    assert not used[0].runtime.exists()


def _interrupt(directory: Path, used: list[Workspace]) -> None:
    with workspace(directory, 1) as work:
        (work.state / "volume").write_bytes(b"x")
        (work.runtime / "log").write_bytes(b"x")
        used.append(work)
        raise KeyboardInterrupt


def test_a_disk_without_room_is_refused_before_any_file_is_made(tmp_path):
    with pytest.raises(NoRoomError, match="--directory"), workspace(tmp_path, 1 << 60):
        pass
    assert not list(tmp_path.iterdir())


def test_missing_memory_is_refused():
    with pytest.raises(NoRoomError, match="--quick"):
        check_memory(1 << 60, "the bench", "measure less with --quick")


def test_the_facts_of_this_machine_are_found_and_nothing_is_left(tmp_path):
    facts = machine_facts(tmp_path)
    assert facts.cpu
    assert facts.cpus > 0
    assert facts.memory_bytes > 0
    assert facts.filesystem
    assert not list(tmp_path.iterdir())
