"""Commands as a reader types them: in a shell with its own home, and clients in its path."""

import asyncio
import os
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

COMMAND_S = 600.0


class Shell:
    """One user's shell: its home and working directory last over all commands.

    Args:

    home: directory of the user; commands run in a directory below it.

    programs: directories in the path, before those of the system.

    setting: lines before each command.
    """

    def __init__(self, home: Path, programs: list[Path], setting: str = "") -> None:
        self.directory = home / "work"
        self.directory.mkdir()
        path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
        # Nothing else: a key, a proxy or a server of the developer's is not part of the page.
        self._environ = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8"}
        self._setting = setting

    async def start(self, command: str, **options: int) -> asyncio.subprocess.Process:
        """Start a command; options set which streams are piped."""
        script = f"{self._setting}\n{command}"
        return await asyncio.create_subprocess_exec(
            *("bash", "-c", script), cwd=self.directory, env=self._environ, **options
        )

    async def run(self, command: str) -> str:
        """Run a command and return its output, which must contain the endings in order.

        Raises:

        AssertionError: it failed; with its output.
        """
        process = await self.start(
            command, stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=STDOUT
        )
        try:
            async with asyncio.timeout(COMMAND_S):
                printed, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        text = printed.decode()
        assert process.returncode == 0, f"{command}: exit code {process.returncode}:\n{text}"
        return text
