"""Runs `inference-svc` as a process."""

import os
import subprocess
import sys


def run(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "inference_svc.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb", **environ},
    )
