"""Directories, memory, the end of a run, and facts about the machine."""

import asyncio
import os
import signal

import pytest

from shared.measuring.workspace import (
    NoRoomError,
    check_memory,
    common_facts,
    cpu_name,
    directories,
    private_huge_pages,
    run_until_signal,
    shared_huge_pages,
)


def test_the_facts_of_this_machine_can_be_read():
    assert cpu_name()
    assert private_huge_pages() in {"", "always", "madvise", "never"}
    assert isinstance(shared_huge_pages(), str)


def test_every_report_has_the_machines_facts():
    """By the names of the documents."""
    facts = common_facts(["numpy"])
    said = "cpu cpus load_average memory_bytes huge_pages kernel python libraries"
    assert list(facts) == said.split()
    assert facts["cpus"] > 0
    assert list(facts["libraries"]) == ["numpy"]


def test_directories_are_removed_with_their_contents(tmp_path):
    """However the block ends."""

    def broken_off() -> None:
        with directories(tmp_path, "kit-") as (state, runtime):
            (state / "volume").write_bytes(b"x")
            made.extend((state, runtime))
            raise KeyboardInterrupt

    made = []
    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert made[0].parent == tmp_path
    assert not any(path.exists() for path in made)


def test_missing_memory_is_refused():
    """With its purpose, and the remedy."""
    check_memory(1, "a byte", "nothing")
    with pytest.raises(NoRoomError, match="the arena would take") as raised:
        check_memory(1 << 60, "the arena", "measure less")
    assert raised.value.remedy == "measure less"


def test_a_run_ends_on_sigterm_as_on_ctrl_c():
    """Its files are removed, and its result is returned if it ends by itself."""
    ended = []

    async def interrupted() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            ended.append("removed")

    async def complete() -> int:
        return 7

    with pytest.raises(KeyboardInterrupt):
        run_until_signal(interrupted)
    assert ended == ["removed"]
    assert run_until_signal(complete) == 7
