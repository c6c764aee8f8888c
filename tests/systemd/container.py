"""A real systemd in a container, with kvd installed in it the way its unit file expects.

The root file system is the one that prepare.sh made; what happens in it goes to memory and is
forgotten at the end. Commands enter through the namespaces of its first process.
"""

import asyncio
import json
import os
import shutil
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.driven_engine import DrivenEngine

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS_INSIDE = "/opt/tests"  # what of tests/ is needed inside
DROP_IN = "/etc/systemd/system/kvd.service.d/test.conf"
VENV, NEXT_VENV = "/opt/cachedattention", "/opt/cachedattention-next"
NEXT_VERSION = "99.0.0"
BOOT_S = CHANGE_S = 60.0
POLL_S = 0.02
# Of the shipped unit and settings only sizes are changed, which depend on the machine otherwise.
SIZES = {
    "KVD_DRAM__BYTES": "4MB",
    "KVD_SSD__BYTES": "32MB",
    "KVD_SSD__RESERVE_BYTES": "0",
    "KVD_SSD__SEGMENT_BYTES": "1MB",
}


class Container:
    """One boot.

    Args:
        cache: the directory that prepare.sh filled.
        suite: the Debian release in it.
    """

    def __init__(self, cache: Path, suite: str) -> None:
        self._root = cache / suite
        (self._wheel,) = (cache / "kvd").glob("*.whl")
        self._nspawn: asyncio.subprocess.Process | None = None
        self._leader = 0

    async def boot(self) -> None:
        """Start it, and return when systemd has started everything."""
        self._nspawn = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig=TERM"),  # nothing stays when the tests are killed
            *("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--boot"),
            *("--directory", str(self._root), "--volatile=overlay", "--machine=kvd-test"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            # The new kind of cgroups, also on hosts with the old one, which new releases refuse.
            env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
        )
        async with asyncio.timeout(BOOT_S):
            while not await self._has_booted():
                assert self._nspawn.returncode is None, "the container did not boot"
                await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """End it and everything in it."""
        if self._nspawn is not None and self._nspawn.returncode is None:
            self._nspawn.terminate()
            try:
                async with asyncio.timeout(BOOT_S):
                    await self._nspawn.wait()
            except TimeoutError:
                self._nspawn.kill()
                await self._nspawn.wait()

    def path(self, inside: str) -> Path:
        """A path of the container, seen from outside."""
        return Path(f"/proc/{self._leader}/root{inside}")

    async def run(self, *command: str) -> str:
        """Run a command inside as root; returns its output."""
        process = await asyncio.create_subprocess_exec(
            *("nsenter", "--target", str(self._leader), "--all", "--", *command),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, f"{command}: {output.decode()}\n{await self._journal()}"
        return output.decode().strip()

    async def spawn(self, *command: str) -> asyncio.subprocess.Process:
        """Start a command inside as user kvd, with pipes."""
        return await asyncio.create_subprocess_exec(
            *("nsenter", "--target", str(self._leader), "--all", "--wd=/", "--"),
            *("setpriv", "--reuid=kvd", "--regid=kvd", "--clear-groups"),
            *("env", f"PYTHONPATH={TESTS_INSIDE}", *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def systemd_version(self) -> int:
        """252, for example."""
        return int((await self.run("systemctl", "--version")).split()[1])

    # --------------------------------------------------------------------------------------- kvd

    async def install(self) -> None:
        """Install kvd from its wheel, its unit and its settings, and the tests' engine."""
        shutil.copy(self._wheel, self.path("/opt"))
        wheel = f"/opt/{self._wheel.name}"
        pip = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        await self.run(f"{VENV}/bin/python", *pip, "--no-deps", "--no-index", wheel)
        self._copy(REPOSITORY / "systemd" / "kvd.service", "/etc/systemd/system")
        self._copy(REPOSITORY / "systemd" / "kvd.toml", "/etc/kvd")
        for module in ("synthetic_engine.py", "driven_engine.py"):
            self._copy(REPOSITORY / "tests" / module, f"{TESTS_INSIDE}/tests")
        await self.configure()
        # A unit that nothing refers to is forgotten by systemd once it stops, and its fd store too.
        await self.run("systemctl", "enable", "kvd")

    async def install_next(self) -> None:
        """Install a newer release of kvd in another place, and have the unit start that one."""
        site = f"lib/python{await self._python_version()}/site-packages"
        await self.run("python3", "-m", "venv", "--without-pip", NEXT_VENV)
        self.path(f"{NEXT_VENV}/{site}/dependencies.pth").write_text(f"{VENV}/{site}\n")
        with zipfile.ZipFile(self._wheel) as wheel:
            wheel.extractall(self.path(f"{NEXT_VENV}/{site}"))
        version = self.path(f"{NEXT_VENV}/{site}/shared/version.py")
        version.write_text(f'"""A newer release."""\n\n__version__ = "{NEXT_VERSION}"\n')
        start = f"{NEXT_VENV}/bin/python -m kvd serve --config /etc/kvd/kvd.toml"
        await self.configure(f"ExecStart=\nExecStart={start}")

    async def configure(self, *lines: str, **environment: str) -> None:
        """Write the drop-in of kvd.service: sizes, and whatever a test wants otherwise."""
        variables = [f"Environment={k}={v}" for k, v in {**SIZES, **environment}.items()]
        drop_in = self.path(DROP_IN)
        drop_in.parent.mkdir(exist_ok=True)
        drop_in.write_text("\n".join(["[Service]", *variables, *lines]) + "\n")
        await self.run("systemctl", "daemon-reload")

    async def fresh_kvd(self) -> None:
        """Start the shipped kvd with nothing stored."""
        await self.run("systemctl", "stop", "kvd")
        await self.run("systemctl", "clean", "--what=state", "kvd")
        if await self.property("NFileDescriptorStore") != "0":
            await self.run("systemctl", "clean", "--what=fdstore", "kvd")
        await self.run("systemctl", "reset-failed")
        await self.configure()
        await self.run("systemctl", "start", "kvd")

    async def property(self, name: str) -> str:
        """A property of kvd.service."""
        return await self.run("systemctl", "show", "--value", f"--property={name}", "kvd")

    async def until_replaced(self, pid: str) -> None:
        """Return when another process than `pid` is kvd, and says that it is ready."""
        async with asyncio.timeout(CHANGE_S):
            while True:
                state = await self.property("SubState")
                if state == "running" and await self.property("MainPID") != pid:
                    return
                await asyncio.sleep(POLL_S)

    async def stats(self) -> dict:
        """`kvd stats --json`, by whatever version is installed first."""
        return json.loads(await self.run(f"{VENV}/bin/kvd", "stats", "--json"))

    # ------------------------------------------------------------------------------------ inside

    async def _has_booted(self) -> bool:
        if not self._leader:
            self._leader = self._find_leader()
        if not self._leader:
            return False
        try:
            await self.run("systemctl", "is-system-running", "--wait")
        except AssertionError as error:  # "degraded" will do: some unit needs a real machine
            return "degraded" in str(error)
        return True

    def _find_leader(self) -> int:
        """The pid of the container's systemd, 0 before it listens."""
        assert self._nspawn is not None
        pid = self._nspawn.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        for child in children.read_text().split() if children.exists() else ():
            if Path(f"/proc/{child}/root/run/systemd/private").exists():
                return int(child)
        return 0

    async def _python_version(self) -> str:
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        return await self.run("python3", "-c", code)

    def _copy(self, file: Path, directory: str) -> None:
        target = self.path(directory)
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)

    async def _journal(self) -> str:
        process = await asyncio.create_subprocess_exec(
            *("nsenter", "--target", str(self._leader), "--all", "--"),
            *("journalctl", "--no-pager", "--unit", "kvd", "--lines", "50"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        return (await process.communicate())[0].decode()


@asynccontextmanager
async def engine_inside(container: Container) -> AsyncIterator[DrivenEngine]:
    """An attached engine in the container, that stays up until the end."""
    command = (f"{VENV}/bin/python", "-m", "tests.driven_engine", "/run/kvd")
    engine = DrivenEngine(await container.spawn(*command))
    try:
        await engine.attached(1)
        yield engine
    finally:
        await engine.end()
