"""Commands import what they use: what each says of itself is known without, help stays quick."""

import subprocess
import sys

import pytest

from kvd.cli.candidates import summary
from kvd.cli.commands import COMMANDS
from kvd.cli.main import root_command

HEAVY = ("asyncio", "grpc", "google.protobuf", "numpy", "pydantic", "rich", "structlog", "uvloop")
_SHOW = """
import sys
from kvd.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(end.code, *sys.modules, file=sys.stderr)
"""


def imported_by(*arguments):
    """What a command has imported when it ends; its exit code must be 0."""
    done = subprocess.run(
        [sys.executable, "-c", _SHOW, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    code, *modules = done.stderr.split()
    assert code in ("0", "None"), done.stderr
    assert done.stdout
    return set(modules)


@pytest.mark.parametrize("name", COMMANDS)
def test_what_help_says_of_a_command_is_its_own_first_sentence(name):
    """The list of commands is written without importing them, and says what they say."""
    command = root_command().commands[name]
    assert (command.name, command.hidden) == (name, COMMANDS[name].hidden)
    assert summary(command) == COMMANDS[name].summary


def test_help_comes_without_what_commands_need():
    """Neither gRPC nor settings nor tables are imported for a list of commands."""
    assert not imported_by("--help") & {*HEAVY, "kvd.cli.sessions", "kvd.config"}


def test_the_version_comes_without_the_daemon():
    """The command line library may check what was typed; nothing of ours is imported for it."""
    allowed = {"pydantic"}  # of typer
    found = imported_by("version")
    assert not found & ({*HEAVY, "kvd.config", "kvd.cli.operator_client"} - allowed)
