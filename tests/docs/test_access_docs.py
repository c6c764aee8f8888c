"""docs/access.md: its settings load, and its commands exist with their options."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from inference_svc.cli.main import app as inference_app
from inference_svc.config import load_inference_settings
from kvd.cli.main import app as kvd_app
from kvd.config import load

TEXT = (Path(__file__).parents[2] / "docs" / "access.md").read_text(encoding="utf-8")
SETTINGS = re.findall(r"```toml\n(# (\S+)\n.*?)```", TEXT, re.DOTALL)
SCRIPTS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for script in SCRIPTS for line in script.splitlines()]


@pytest.mark.parametrize(("text", "name"), SETTINGS)
def test_settings_load(tmp_path, text, name):
    """Each example is complete, and leaves no port unprotected."""
    path = tmp_path / name
    path.write_text(text)
    if name == "kvd.toml":
        load(path, {})
    else:
        load_inference_settings(path, {})


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist(line):
    """Each option belongs to the command, or to the program."""
    program, *words = shlex.split(line)
    group = get_command(kvd_app if program == "kvd" else inference_app)
    name = next(word for word in words if word in group.commands)
    known = {
        option
        for command in (group, group.commands[name])
        for parameter in command.params
        for option in parameter.opts
    }
    assert {word for word in words if word.startswith("--")} <= known
