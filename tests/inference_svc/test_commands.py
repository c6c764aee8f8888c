"""`inference-svc` before it serves: errors in one line, addresses, and summaries of reuse."""

import os
import socket
import subprocess
import sys

import pytest

from inference_svc.cli.chat import describe
from inference_svc.cli.connection import default_address
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import InvalidInputError
from tests.inference_svc.commands import run
from tests.kvd_as_user import let_others_enter

AS_NOBODY = """
import contextlib, os, sys
from inference_svc.cli.main import main
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(open(os.devnull, "w")):
    main()  # by root, which imports all that is needed: others may not be able to read it
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
sys.argv[0] = "inference-svc"
main()
"""


def test_serve_without_a_model_is_one_line(tmp_path):
    """The error names the flag, without a traceback."""
    served = run(
        *("serve", "--listen", f"unix:{tmp_path}/s", "--state-dir", str(tmp_path / "state"))
    )
    assert served.returncode == 78
    assert served.stderr.splitlines()[-1].startswith("inference-svc: no model is given")
    assert "Traceback" not in served.stderr


@pytest.mark.parametrize(
    "command",
    [("serve",), ("bench", "decode"), ("eval", "perplexity", "--text", "a.txt")],
    ids=lambda command: command[0],
)
def test_a_mistyped_model_directory_is_refused_at_once(tmp_path, command):
    """In one line, before torch is imported, which takes seconds; no file is left."""
    given = ("--listen", f"unix:{tmp_path}/s", "--state-dir", str(tmp_path / "state"))
    ran = run(
        *(*command, "--model", str(tmp_path / "typo"), *(given if command == ("serve",) else ())),
        PYTHONPROFILEIMPORTTIME="1",
    )
    said = [line for line in ran.stderr.splitlines() if not line.startswith("import time:")]
    imported = {line.split()[-1] for line in ran.stderr.splitlines() if line not in said}
    assert ran.returncode == 78
    assert len(said) == 1
    assert said[0].startswith(
        f"inference-svc: the model directory {tmp_path}/typo does not exist: give"
    )
    assert "shared.types.errors" in imported
    assert "torch" not in imported
    assert list(tmp_path.iterdir()) == []


def test_chat_without_a_service_names_the_address(tmp_path):
    """Exit code 69, one line."""
    chat = run("chat", "--address", f"unix:{tmp_path}/none")
    assert chat.returncode == 69
    assert len(chat.stderr.splitlines()) == 1


def test_chat_describes_a_turns_reuse():
    """One line: the sources of the prompt's tokens."""
    usage = pb.Usage(
        history_tokens=10,
        reused_tokens=8,
        recomputed_tokens=2,
        new_tokens=3,
        tier_tokens={"dram": 6, "ssd": 2},
        recompute_reason="partial",
    )
    line = describe(usage)
    for said in ("history 10", "reused 8 (6 from dram, 2 from ssd)", "recomputed 2 (partial)"):
        assert said in line


def test_chat_shows_a_turns_delays():
    """Only if there were any."""
    line = describe(pb.Usage(stall_s=0.05, preemptions=2))
    assert "waited 50 ms for layers" in line
    assert "interrupted 2 times" in line
    assert "waited" not in describe(pb.Usage())


def test_the_only_service_of_the_system_is_found(tmp_path, monkeypatch):
    """Without the user's own socket; several are listed and none is used; the user's is first."""
    own = tmp_path / "own" / "inference-svc" / "inference.sock"
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "own"))
    run_dir = tmp_path / "run"
    assert default_address(run_dir) == f"unix:{own}"
    (run_dir / "inference-svc-demo").mkdir(parents=True)
    demo = f"unix:{run_dir / 'inference-svc-demo' / 'inference.sock'}"
    assert default_address(run_dir) == demo
    (run_dir / "inference-svc-other").mkdir()
    other = f"unix:{run_dir / 'inference-svc-other' / 'inference.sock'}"
    with pytest.raises(InvalidInputError) as refused:
        default_address(run_dir)
    assert refused.value.message == "2 inference services run here"
    assert refused.value.remedy == f"choose one with --address {demo} or {other}"
    own.parent.mkdir(parents=True)
    own.touch()
    assert default_address(run_dir) == f"unix:{own}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_user_without_permission_learns_the_group(short_dir):
    """Not that the service is absent: its owner, and the group that allows access; exit code 7."""
    let_others_enter(short_dir)
    path = short_dir / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        os.chown(path, 0, 1)
        path.chmod(0o660)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, "status", "--address", f"unix:{path}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 7, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"nobody may not open {path} (root:" in line
    assert "usermod -aG" in line
