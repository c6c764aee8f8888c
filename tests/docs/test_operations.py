"""Operators' pages name only existing commands, options, settings, metrics and files."""

import re
from pathlib import Path

import pytest
import typer

from inference_svc.cli.main import app as inference_app
from inference_svc.config import InferenceSettings, load_inference_settings
from inference_svc.metrics.table import METRICS as INFERENCE_METRICS
from kvd import config
from kvd.cli.main import app as kvd_app
from kvd.following.figures import METRICS as FOLLOWING_METRICS
from kvd.metrics.table import METRICS as KVD_METRICS

REPOSITORY = Path(__file__).parents[2]
TEXT = "\n".join(
    (REPOSITORY / "docs" / name).read_text() for name in ("operations.md", "remote-store.md")
)
# Spans of code, and lines of blocks without their comments.
CODE = [
    *re.findall(r"`([^`\n]+)`", TEXT),
    *(
        line.partition("   #")[0]
        for block in re.findall(r"```\w+\n(.*?)```", TEXT, re.DOTALL)
        for line in block.splitlines()
    ),
]


PROGRAM = re.compile(r"\s*(?:sudo )?(?:\S*/bin/)?((?:kvd|inference-svc) [a-z].*)")


def command_lines() -> list[str]:
    """Return every command line of this project, from its program on."""
    parts = [part for code in CODE for part in re.split(r"[;|]", code)]
    return sorted({match[1].strip() for part in parts if (match := PROGRAM.match(part))})


@pytest.mark.parametrize("line", command_lines())
def test_commands_and_options_exist(line):
    """Each command in the text exists, with its options."""
    program, name, *words = line.split()
    command = typer.main.get_command(kvd_app if program == "kvd" else inference_app).commands[name]
    if hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    options = {word for word in words if word.startswith("--")}
    assert options <= known, options - known


def test_metrics_exist():
    """Each metric in the text is in the tables."""
    named = {name for code in CODE for name in re.findall(r"^(?:kvd|inference)_[a-z_]+\b", code)}
    assert len(named) > 4
    tables = (KVD_METRICS, FOLLOWING_METRICS, INFERENCE_METRICS)
    assert named <= {metric.name for table in tables for metric in table}


def test_settings_exist():
    """Each dotted key is a setting of one of the processes."""
    keys = {key for key, _, _ in config.load(None, {}).rows()}
    keys |= {key for key, _, _ in load_inference_settings(None, {}).rows()}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    named = {
        code.split(" ")[0]
        for code in CODE
        if re.fullmatch(r"[a-z_]+\.[a-z_]+( = .*)?", code) and code.partition(".")[0] in sections
    }
    assert len(named) > 10
    assert named <= keys, named - keys
    for section in re.findall(r"^\[([a-z]+)\]", "\n".join(CODE), re.MULTILINE):
        fields = {**config.Settings.model_fields, **InferenceSettings.model_fields}
        assert section in fields, section


def test_files_of_the_repository_exist():
    """Each path in the text exists."""
    names = re.findall(r"`((?:docs|systemd|monitoring|kvd)/[\w./-]*\w)`", TEXT)
    assert names
    for name in names:
        assert (REPOSITORY / name).exists(), name
