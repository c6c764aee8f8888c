"""A real systemd, booted in a container.

prepare.sh made the root file system; changes stay in memory and are dropped at the end. Commands
enter through the namespaces of its first process.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

VENV = "/opt/cachedattention"
# PYTHON's packages, for what the container's environment lacks: torch and similar ones.
HOST_PACKAGES = "/opt/host-packages"
BOOT_S = CHANGE_S = 60.0
POLL_S = 0.02


class Machine:
    """One boot.

    Args:

    root: the root file system.

    name: of the machine.

    binds: directories of the host, by their path inside; read-only.
    """

    def __init__(self, root: Path, name: str, binds: dict[str, Path]) -> None:
        self._root = root
        self._name = name
        self._binds = binds
        self._nspawn: asyncio.subprocess.Process | None = None
        self._leader = 0

    async def boot(self) -> None:
        """Start it, and return when systemd has started everything."""
        self._nspawn = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig=TERM"),  # nothing stays when the tests are killed
            *("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--boot"),
            *("--directory", str(self._root), "--volatile=overlay", f"--machine={self._name}"),
            *(f"--bind-ro={outside}:{inside}" for inside, outside in self._binds.items()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            # The unified cgroups, also on hosts with the old ones, which new releases refuse.
            env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
        )
        async with asyncio.timeout(BOOT_S):
            while not await self._has_booted():
                assert self._nspawn.returncode is None, "the container did not boot"
                await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Stop it and everything in it."""
        if self._nspawn is not None and self._nspawn.returncode is None:
            self._nspawn.terminate()
            try:
                async with asyncio.timeout(BOOT_S):
                    await self._nspawn.wait()
            except TimeoutError:
                self._nspawn.kill()
                await self._nspawn.wait()

    def path(self, inside: str) -> Path:
        """Return a path of the container, as seen from outside."""
        return Path(f"/proc/{self._leader}/root{inside}")

    async def run(self, *command: str) -> str:
        """Run a command inside as root; return its output."""
        code, output = await self.tried(*command)
        assert code == 0, f"{command}: {output}\n{await self._last_lines()}"
        return output

    async def tried(
        self, *command: str, user: str = "root", directory: str = "/"
    ) -> tuple[int, str]:
        """Run a command inside that may fail; return exit code and output."""
        process = await asyncio.create_subprocess_exec(
            *self._inside(user, directory),
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode().strip()

    async def spawn(
        self, *command: str, user: str, environment: Sequence[str] = ()
    ) -> asyncio.subprocess.Process:
        """Start a command inside as a user with all their groups, with pipes."""
        return await asyncio.create_subprocess_exec(
            *self._inside(user, "/"),
            *environment,
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def until(self, condition: Callable[[], Awaitable[object]]) -> None:
        """Return when the condition holds."""
        async with asyncio.timeout(CHANGE_S):
            while True:
                if await condition():
                    return
                await asyncio.sleep(POLL_S)

    async def systemd_version(self) -> int:
        """Return systemd's version, for example 252."""
        return int((await self.run("systemctl", "--version")).split()[1])

    async def property(self, name: str, unit: str = "kvd") -> str:
        """Return a property of a unit."""
        return await self.run("systemctl", "show", "--value", f"--property={name}", unit)

    async def journal(self, *matches: str) -> list[dict]:
        """Return the entries of the journal, oldest first, with all their fields."""
        await self.run("journalctl", "--sync")
        lines = await self.run("journalctl", "--output=json", "--all", *matches)
        return [json.loads(line) for line in lines.splitlines() if line.startswith("{")]

    # ------------------------------------------------------------------------------------ inside

    def _inside(self, user: str, directory: str) -> list[str]:
        command = ["nsenter", "--target", str(self._leader), "--all", "--"]
        if user != "root":
            command += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        return [*command, "env", f"--chdir={directory}"]

    async def _has_booted(self) -> bool:
        if not self._leader:
            self._leader = self._find_leader()
        if not self._leader:
            return False
        # "degraded" suffices: some unit needs a real machine.
        _, state = await self.tried("systemctl", "is-system-running", "--wait")
        return state.splitlines()[-1:] in (["running"], ["degraded"])

    def _find_leader(self) -> int:
        """Return the pid of the container's systemd, 0 before it listens."""
        assert self._nspawn is not None
        pid = self._nspawn.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        for child in children.read_text().split() if children.exists() else ():
            if Path(f"/proc/{child}/root/run/systemd/private").exists():
                return int(child)
        return 0

    async def _last_lines(self) -> str:
        _, lines = await self.tried("journalctl", "--no-pager", "--lines=50")
        return lines


def fitting_packages(root: Path) -> Path | None:
    """Return this Python's packages, if the container's Python has the same version."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not (root / VENV.removeprefix("/") / "lib" / version).is_dir():
        return None
    import torch  # imported late: it must be in place only here

    return Path(torch.__file__).parents[1]
