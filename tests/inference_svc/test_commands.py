"""Settings, the command line and the listening socket."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from inference_svc.chat import describe
from inference_svc.config import load_inference_settings
from inference_svc.core.errors import ListenError
from inference_svc.listening import prepare_socket
from shared.config import InvalidSettingsError
from shared.pb.inference.v1 import inference_pb2 as pb

SHIPPED = Path(__file__).parents[2] / "systemd" / "inference-svc.toml"


def run(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "inference_svc.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb", **environ},
    )


def test_flags_win_over_the_environment():
    """And what is not given keeps its default."""
    shown = run("config", "show", "--json", INFERENCE_SCHEDULER__MAX_RUNNING="3")
    rows = json.loads(shown.stdout)
    assert rows["scheduler.max_running"] == {"value": "3", "source": "env"}
    assert rows["cache.mode"]["source"] == "default"
    settings = load_inference_settings(None, {"scheduler.max_running": 5}).settings
    assert settings.scheduler.max_running == 5


def test_config_check_lists_every_problem_in_one_line(tmp_path):
    """Unknown keys, bad values and bad addresses, each with what is accepted."""
    path = tmp_path / "inference.toml"
    path.write_text('[cache]\nmodus = "x"\nmode = "fast"\n[server]\nlisten = "0.0.0.0:80"\n')
    checked = run("config", "check", "--config", str(path))
    assert checked.returncode == 78
    (line,) = checked.stderr.splitlines()
    for said in ("cache.modus", "did you mean cache.mode", "'fast'", "0.0.0.0:80", "127.0.0.1"):
        assert said in line


def test_the_shipped_settings_file_has_every_key():
    """It is the reference: each key of the model is in it, and each value is accepted."""
    loaded = load_inference_settings(SHIPPED, {})
    written = SHIPPED.read_text(encoding="utf-8")
    for key in loaded.provenance:
        assert f"{key.split('.')[-1]} = " in written, key


@pytest.mark.parametrize("listen", ["unix:relative", "unix:/" + "x" * 120, "10.0.0.1:1", "80"])
def test_addresses_that_cannot_be_served(listen):
    """A socket path must be absolute and short, a port on the loopback."""
    with pytest.raises(InvalidSettingsError, match=r"server\.listen"):
        load_inference_settings(None, {"server.listen": listen})


def test_serve_without_a_model_is_one_line(tmp_path):
    """The error names the flag; no traceback."""
    served = run(
        *("serve", "--listen", f"unix:{tmp_path}/s", "--state-dir", str(tmp_path / "state"))
    )
    assert served.returncode == 78
    assert served.stderr.splitlines()[-1].startswith("inference-svc: no model is named")
    assert "Traceback" not in served.stderr


def test_chat_without_a_service_names_the_address(tmp_path):
    """Exit code 69, one line."""
    chat = run("chat", "--address", f"unix:{tmp_path}/none")
    assert chat.returncode == 69
    assert len(chat.stderr.splitlines()) == 1


def test_a_socket_in_use_is_refused_and_a_stale_one_replaced(short_dir):
    """Only a socket that nobody serves may be removed."""
    path = short_dir / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(ListenError, match="in use"):
            prepare_socket(f"unix:{path}")
        assert path.exists()
    prepare_socket(f"unix:{path}")
    assert not path.exists()


def test_a_file_in_the_way_is_not_removed(short_dir):
    """It is not ours."""
    path = Path(short_dir / "s")
    path.write_text("precious")
    with pytest.raises(ListenError):
        prepare_socket(f"unix:{path}")
    assert path.read_text() == "precious"


def test_chat_describes_a_turns_reuse():
    """One line: where the prompt's tokens came from."""
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
