"""A machine with the pair installed as by an operator, and with small sizes for kvd."""

import json
import shutil
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.driven_engine import DrivenEngine
from tests.systemd.machine import HOST_PACKAGES, VENV, Machine, fitting_packages

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = "/opt/source"  # the repository, inside
TESTS_INSIDE = "/opt/tests"  # the needed parts of tests/, inside
DROP_IN = "/etc/systemd/system/kvd.service.d/test.conf"
NEXT_VENV = "/opt/cachedattention-next"
NEXT_VERSION = "99.0.0"
ENGINE_USER = "inference"
# Only the sizes of the shipped unit and settings change, since they depend on the machine.
SIZES = {
    "KVD_DRAM__BYTES": "4MB",
    "KVD_SSD__BYTES": "32MB",
    "KVD_SSD__RESERVE_BYTES": "0",
    "KVD_SSD__SEGMENT_BYTES": "1MB",
}


class Container(Machine):
    """One boot.

    Args:

    cache: the directory that prepare.sh filled.

    suite: the Debian release in it.

    name: of the machine.

    Attributes:

    wheel: this tree's, inside.

    has_torch: whether inference services can run in it.
    """

    def __init__(self, cache: Path, suite: str, name: str) -> None:
        root = cache / suite
        packages = fitting_packages(root)
        binds = {SOURCE: REPOSITORY}
        if packages is not None:
            binds[HOST_PACKAGES] = packages
        super().__init__(root, name, binds)
        (self._wheel,) = (cache / "kvd").glob("*.whl")
        self.wheel = f"/opt/{self._wheel.name}"
        self.has_torch = packages is not None

    async def boot(self) -> None:
        """Start it with the wheel inside; nothing is installed."""
        await super().boot()
        shutil.copy(self._wheel, self.path("/opt"))
        if self.has_torch:
            site = self.path(await self.site_packages())
            (site / "host-packages.pth").write_text(f"{HOST_PACKAGES}\n")

    async def site_packages(self, venv: str = VENV) -> str:
        """Return where a virtual environment of the container has its packages."""
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        return f"{venv}/lib/python{await self.run('python3', '-c', code)}/site-packages"

    async def install(self) -> None:
        """Install the pair from its wheel, its units and settings, and the tests' engine."""
        pip = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        await self.run(f"{VENV}/bin/python", *pip, "--no-deps", "--no-index", self.wheel)
        await self.run(f"{VENV}/bin/kvd", "install-units")
        for module in ("synthetic_engine.py", "driven_engine.py"):
            self._copy(REPOSITORY / "tests" / module, f"{TESTS_INSIDE}/tests")
        await self.configure()
        # systemd forgets an unreferenced unit when it stops, with its fd store.
        await self.run("systemctl", "enable", "kvd")

    async def install_next(self) -> None:
        """Install a newer release of kvd elsewhere, and have the unit start that one."""
        await self.run("python3", "-m", "venv", "--without-pip", NEXT_VENV)
        site = await self.site_packages(NEXT_VENV)
        self.path(f"{site}/dependencies.pth").write_text(f"{await self.site_packages()}\n")
        with zipfile.ZipFile(self._wheel) as wheel:
            wheel.extractall(self.path(site))
        version = self.path(f"{site}/shared/version.py")
        version.write_text(f'"""A newer release."""\n\n__version__ = "{NEXT_VERSION}"\n')
        start = f"{NEXT_VENV}/bin/python -m kvd serve --config /etc/kvd/kvd.toml"
        await self.configure(f"ExecStart=\nExecStart={start}")

    async def configure(self, *lines: str, **environment: str) -> None:
        """Write the drop-in of kvd.service: sizes, and a test's own settings."""
        variables = [f"Environment={k}={v}" for k, v in {**SIZES, **environment}.items()]
        drop_in = self.path(DROP_IN)
        drop_in.parent.mkdir(parents=True, exist_ok=True)
        drop_in.write_text("\n".join(["[Service]", *variables, *lines]) + "\n")
        await self.run("systemctl", "daemon-reload")

    async def fresh_kvd(self) -> None:
        """Start the shipped kvd with nothing stored."""
        await self.run("systemctl", "stop", "kvd")
        await self.run("systemctl", "reset-failed")
        await self.run("systemctl", "clean", "--what=state", "kvd")
        if await self.property("NFileDescriptorStore") != "0":
            await self.run("systemctl", "clean", "--what=fdstore", "kvd")
        await self.configure()
        await self.run("systemctl", "start", "kvd")

    async def until_replaced(self, pid: str, unit: str = "kvd") -> None:
        """Return when a process other than `pid` is the service, and is ready."""

        async def is_replaced() -> bool:
            shown = await self.run("systemctl", "show", "--property=MainPID,SubState", unit)
            return "SubState=running" in shown and f"MainPID={pid}" not in shown.splitlines()

        await self.until(is_replaced)

    async def stats(self) -> dict:
        """Return `kvd stats --json`, by the version that is installed first."""
        return json.loads(await self.run(f"{VENV}/bin/kvd", "stats", "--json"))

    def _copy(self, file: Path, directory: str) -> None:
        target = self.path(directory)
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)


@asynccontextmanager
async def engine_inside(container: Container) -> AsyncIterator[DrivenEngine]:
    """Run an attached engine in the container until the end."""
    command = (f"{VENV}/bin/python", "-m", "tests.driven_engine", "/run/kvd")
    path = (f"PYTHONPATH={TESTS_INSIDE}",)
    engine = DrivenEngine(await container.spawn(*command, user=ENGINE_USER, environment=path))
    try:
        await engine.attached(1)
        yield engine
    finally:
        await engine.end()
