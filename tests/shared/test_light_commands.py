"""Commands import only what they use: help, versions and lists are fast. No time is measured."""

import asyncio
import os
import subprocess
import sys

import pytest
import typer

from inference_svc.cli import main as inference_cli
from inference_svc.cli.main import COMMANDS as INFERENCE_COMMANDS
from kvd.cli.main import COMMANDS as KVD_COMMANDS
from kvd.cli.main import root_command
from shared.config.lazy_commands import summary
from tests.processes import running_kvd

PROGRAMS = {"kvd": "kvd.cli.main", "inference-svc": "inference_svc.cli.main"}
ENGINE = {"torch", "transformers", "safetensors", "jinja2", "llguidance"}
SERVERS = {
    "kvd.config",
    "kvd.daemon",
    "inference_svc.config",
    "shared.config.settings",
    "shared.process.log",
}
NEVER = {"aiohttp", "cryptography", "numpy", "pydantic", "structlog", "uvloop", *ENGINE, *SERVERS}
FOR_CALLS = {"asyncio", "grpc", "google.protobuf"}
FOR_TABLES = {"rich"}
_SHOW = """
import importlib, sys
program = importlib.import_module(sys.argv.pop(1))
try:
    program.main()
except SystemExit as end:
    print(end.code or 0, *sys.modules, file=sys.stderr)
"""


def imports_of(program, *arguments):
    """Return the exit code of a command, and its imports at the end."""
    done = subprocess.run(
        [sys.executable, "-c", _SHOW, PROGRAMS[program], *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        # Coverage and the like add their own modules.
        env={name: value for name, value in os.environ.items() if not name.startswith("COV")},
    )
    code, *modules = done.stderr.splitlines()[-1].split()
    return int(code), set(modules)


@pytest.mark.parametrize("name", KVD_COMMANDS)
def test_each_kvd_command_is_listed_with_its_own_first_sentence(name):
    """The list is written without importing the commands."""
    command = root_command().commands[name]
    assert (command.name, command.hidden) == (name, KVD_COMMANDS[name].hidden)
    assert summary(command) == KVD_COMMANDS[name].summary


@pytest.mark.parametrize("name", INFERENCE_COMMANDS)
def test_each_service_command_is_listed_with_its_own_first_sentence(name):
    """As above."""
    command = typer.main.get_command(inference_cli.app).commands[name]
    assert (command.name, command.hidden) == (name, INFERENCE_COMMANDS[name].hidden)
    assert summary(command) == INFERENCE_COMMANDS[name].summary


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("kvd", ("--help",)),
        ("kvd", ("version",)),
        ("kvd", ("token",)),
        ("inference-svc", ("--help",)),
        ("inference-svc", ("--version",)),
    ],
)
def test_local_commands_import_no_client(program, arguments):
    """Neither gRPC nor settings nor tables are imported, nor checks of unused options."""
    code, modules = imports_of(program, *arguments)
    assert code == 0
    assert sorted(modules & (NEVER | FOR_CALLS | FOR_TABLES)) == []


@pytest.mark.parametrize("arguments", [("ls",), ("leases",), ("stats",)])
async def test_a_list_needs_no_settings(tmp_path, monkeypatch, arguments):
    """Commands that ask the daemon import gRPC and tables, and none of its own modules."""
    async with running_kvd(tmp_path, "--dram", "1MB") as kvd:
        # By the environment, as it usually is.
        monkeypatch.setenv("KVD_RUNTIME_DIR", str(kvd.runtime_dir))
        code, modules = await asyncio.to_thread(imports_of, "kvd", *arguments)
    assert code == 0
    assert "grpc" in modules
    assert sorted(modules & NEVER) == []


def test_a_client_of_the_service_needs_no_model(tmp_path, monkeypatch):
    """`status` imports neither PyTorch nor settings; here no service answers."""
    monkeypatch.setenv("INFERENCE_ADDRESS", f"unix:{tmp_path}/nobody.sock")
    code, modules = imports_of("inference-svc", "status")
    assert code == 69
    assert sorted(modules & (NEVER - {"pydantic"})) == []


@pytest.mark.parametrize("program", PROGRAMS.values())
def test_a_process_that_ends_runs_no_garbage_collection(program):
    """It would take a quarter of the time of `kvd ls`."""
    script = f"""
import atexit, gc, importlib, sys
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # after what is registered later
importlib.import_module("{program}").main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "version"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "True"
