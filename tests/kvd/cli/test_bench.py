"""What `kvd bench` refuses before it measures anything."""

from pathlib import Path

from tests.processes import run_cli


async def test_an_unknown_part_is_refused():
    """A part that there is not: exit 2, and the line names those there are."""
    code, _, line = await run_cli("bench", "--only", "network")
    assert (code, "arena, ssd, encryption, control, queue, restart" in line) == (2, True)


async def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path):
    """Where nothing can be made nothing is measured: exit 78 and one line."""
    (tmp_path / "file").touch()
    arguments = ("bench", "--quick", "--only", "arena", "--directory", str(tmp_path / "file"))
    code, _, stderr = await run_cli(*arguments)
    (line,) = stderr.strip().splitlines()
    assert (code, "--directory" in line) == (78, True)
