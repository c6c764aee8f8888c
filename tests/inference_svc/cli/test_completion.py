"""Completion of the service's command lines, and its use by a shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from inference_svc.cli.completion import CHOICES
from inference_svc.cli.main import main, root_command
from inference_svc.config import CacheSettings, LogSettings, ModelSettings
from shared.config.completion import Shell

BASH = shutil.which("bash")


def words_after(capsys, *typed):
    """Return the words that are offered for the last typed one."""
    with pytest.raises(SystemExit) as ended:
        main(["complete", "--", *typed])
    assert ended.value.code == 0
    return [line.partition("\t")[0] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("st", ["status"]),
        ("bench sh", ["sharing"]),
        ("serve --load", ["--load-policy"]),
        ("serve --load-policy ", ["auto", "always", "never"]),
        ("serve --saving=s", ["--saving=sync"]),
        ("bench turns --dtype b", ["bfloat16"]),
        ("completion z", ["zsh"]),
        ("serve --model ", []),  # a shell completes files then
        ("token ", []),
    ],
)
def test_candidates_fit_their_place(capsys, line, expected):
    """Commands, options, and options' values."""
    assert words_after(capsys, *line.split(" ")) == expected


def test_hidden_commands_are_not_offered(capsys):
    """The commands that shells call are hidden; all others are offered."""
    assert set(words_after(capsys, "")) == set(root_command().commands) - {"complete"}


def test_completed_choices_are_those_of_the_settings():
    """The service accepts what completion offers."""
    settings = {
        "attention": ModelSettings,
        "dtype": ModelSettings,
        "mode": CacheSettings,
        "saving": CacheSettings,
        "log_level": LogSettings,
        "log_format": LogSettings,
    }
    for name, section in settings.items():
        field = section.model_fields[name.removeprefix("log_")]
        assert CHOICES[name] == get_args(field.annotation), name
    assert CHOICES["load_policy"] == tuple(CacheSettings.model_fields["load_policy"].annotation)
    assert CHOICES["shell"] == tuple(Shell)
    assert set(CHOICES) == {*settings, "load_policy", "shell"}


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_completion_in_bash(capsys, tmp_path: Path):
    """A real bash runs the script, with the program that is in PATH."""
    with pytest.raises(SystemExit):
        main(["completion", "bash"])
    program = tmp_path / "inference-svc"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m inference_svc.cli.main "$@"\n')
    program.chmod(0o755)
    asked = """
        complete -p inference-svc
        COMP_WORDS=(inference-svc serve --mode "") COMP_CWORD=3; _inference_svc
        echo "${COMPREPLY[*]}"
    """
    done = subprocess.run(
        [BASH, "--norc", "-c", capsys.readouterr().out + asked],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        timeout=60,
        check=True,
    )
    registered, *offered = done.stdout.split("\n")[:-1]
    assert registered == "complete -o default -F _inference_svc inference-svc"
    assert " ".join(offered).split() == ["cached", "recompute"]
