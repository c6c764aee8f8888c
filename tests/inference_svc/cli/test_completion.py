"""What may come next on a command line of the service's, and what a shell makes of it."""

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
    """Words that are offered for the last of those typed."""
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
        ("serve --model ", []),  # a shell offers files then
        ("token ", []),
    ],
)
def test_what_may_come_next(capsys, line, expected):
    """Commands, options, what options may be."""
    assert words_after(capsys, *line.split(" ")) == expected


def test_what_shells_call_is_not_offered(capsys):
    """It is not for people; everything else is there."""
    assert set(words_after(capsys, "")) == set(root_command().commands) - {"complete"}


def test_choices_are_those_of_the_settings():
    """What completion offers is what the service takes."""
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
def test_bash_completes(capsys, tmp_path: Path):
    """The script, in a real bash, with the program that is in PATH."""
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
