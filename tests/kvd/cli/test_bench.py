"""What `kvd bench` refuses before it measures."""

from pathlib import Path

from tests.processes import run_cli


async def test_an_unknown_part_is_refused():
    """An unknown part ends with exit 2, and the line names the known ones."""
    code, _, line = await run_cli("bench", "--only", "network")
    assert (code, "arena, ssd, encryption, control, queue, restart" in line) == (2, True)


async def test_an_unusable_directory_is_refused(tmp_path: Path):
    """If no file can be made no part is measured: exit 78 and one line."""
    (tmp_path / "file").touch()
    arguments = ("bench", "--quick", "--only", "arena", "--directory", str(tmp_path / "file"))
    code, _, stderr = await run_cli(*arguments)
    (line,) = stderr.strip().splitlines()
    assert (code, "--directory" in line) == (78, True)
