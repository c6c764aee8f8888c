"""The product of `make wheel`, installed alone: kvd and clients need no PyTorch."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference_svc.runtime.cpu.native_library import HEADERS, KERNELS
from shared.children.child_process import wait_serving
from shared.version import __version__

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).parents[2]
OPERATIONS = REPOSITORY / "docs/operations.md"
INSTALL_S = 1500.0  # from an index, on a machine that may be busy


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Return the commands' directory of a wheel without extras, in its own environment."""
    directory = tmp_path_factory.mktemp("wheel")
    # Unchanged: the environment that runs this test must not be rebuilt meanwhile.
    build = ("make", "--old-file=.venv/.installed", "wheel", f"DIST={directory}")
    subprocess.run(build, cwd=REPOSITORY, check=True, timeout=INSTALL_S)
    (wheel,) = directory.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(directory / "venv")], check=True, timeout=300)
    pins = ("--constraint", str(REPOSITORY / "constraints.txt"))
    pip = (str(directory / "venv/bin/pip"), "install", "--quiet", *pins, str(wheel))
    subprocess.run(pip, check=True, timeout=INSTALL_S)
    return directory / "venv/bin"


def run(programs, program, *arguments):
    """Run one of the installed commands outside of the working tree; return the result."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [programs / program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=programs,
        env=environment,
    )


def test_pytorch_and_transformers_are_not_installed(programs):
    """The environment is not that of the tests, which has both."""
    found = run(programs, "python", "-c", "import torch")
    assert "No module named 'torch'" in found.stderr
    assert "No module named" in run(programs, "python", "-c", "import transformers").stderr


def test_commands_without_a_daemon(programs):
    """Both print what they are."""
    assert run(programs, "kvd", "version").stdout.strip() == __version__
    assert run(programs, "inference-svc", "--version").stdout.strip() == __version__
    assert "install-units" in run(programs, "kvd", "--help").stdout
    assert "chat" in run(programs, "inference-svc", "--help").stdout
    assert run(programs, "kvd", "config", "check").returncode == 0


def test_it_has_what_is_compiled_at_start(programs):
    """The sources of kernels for CPUs, which are no Python."""
    (directory,) = programs.parent.rglob("inference_svc/runtime/cpu")
    assert {*KERNELS, *HEADERS} <= {path.name for path in directory.iterdir()}


async def test_a_daemon_starts_and_answers(programs, tmp_path):
    """kvd serves, and `kvd ls` and the inference client get its answers."""
    places = ("--runtime-dir", str(tmp_path / "run"), "--state-dir", str(tmp_path / "state"))
    command = (programs / "kvd", "serve", *places, "--dram", "1MB", "--ssd", "4MB")
    environment = {**os.environ, "KVD_DRAM__KEEP": "none"}
    daemon = await asyncio.create_subprocess_exec(*command, env=environment, cwd=tmp_path)
    try:
        await wait_serving(f"unix:{tmp_path}/run/operator.sock")
        listed = await asyncio.to_thread(run, programs, "kvd", "ls", *places[:2])
        assert (listed.returncode, listed.stderr) == (0, "")
        assert "no session is stored" in listed.stdout
    finally:
        daemon.terminate()
        code = await daemon.wait()
    assert code == 0


def test_a_client_reports_a_missing_service_rather_than_missing_pytorch(programs, tmp_path):
    """Chat and status need no model on their host."""
    for command in ("status", "chat"):
        asked = run(programs, "inference-svc", command, "--address", f"unix:{tmp_path}/none.sock")
        assert (asked.returncode, asked.stderr.count("\n")) == (69, 1), asked.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--model", "/nowhere"),
        ("demo",),
        ("bench", "turns", "--random", "2x64"),
        ("eval", "perplexity", "--model", "/nowhere", "--text", "/nowhere"),
    ],
)
def test_commands_that_need_a_model_name_the_extra(programs, arguments):
    """One line, with what to install."""
    asked = run(programs, "inference-svc", *arguments)
    assert (asked.returncode, asked.stderr.count("\n")) == (78, 1), asked.stderr
    assert "pip install 'cachedattention[engine]'" in asked.stderr


def test_units_and_man_pages_are_in_it(programs, tmp_path):
    """install-units finds its files in the wheel itself."""
    done = run(programs, "kvd", "install-units", "--root", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for name in ("kvd-ls.1", "inference-svc-chat.1"):
        page = (tmp_path / "usr/local/share/man/man1" / name).readlink()
        assert page.is_relative_to(programs.parent)
        assert page.is_file()


def test_the_tested_versions_are_in_it(programs):
    """A host without a checkout has them where docs/operations.md says."""
    installed = programs.parent / "share/cachedattention/constraints.txt"
    assert str(installed.relative_to(programs.parent)) in OPERATIONS.read_text(encoding="utf-8")
    assert installed.read_bytes() == (REPOSITORY / "constraints.txt").read_bytes()
