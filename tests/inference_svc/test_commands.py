"""Settings, the command line and the listening socket."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from structlog.testing import capture_logs

from inference_svc.cli.chat import describe
from inference_svc.cli.connection import default_address
from inference_svc.cli.status import format_gauge, status_lines, status_tables
from inference_svc.config import load_inference_settings
from inference_svc.core.counters import COUNTERS
from inference_svc.core.errors import ListenError
from inference_svc.core.submission import ModelTraits
from inference_svc.installation import default_listen
from inference_svc.service.listening import prepare_sockets
from inference_svc.service.submissions import turn_defaults
from shared.access.settings import UnguardedError
from shared.config.settings import InvalidSettingsError
from shared.pb.inference.v1 import inference_pb2 as pb
from tests.kvd_as_user import let_others_enter

SHIPPED = Path(__file__).parents[2] / "systemd" / "inference-svc.toml"

AS_NOBODY = """
import contextlib, os, sys
from inference_svc.cli.main import main
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(open(os.devnull, "w")):
    main()  # by root, which imports all that is needed: others may not be able to read it
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
sys.argv[0] = "inference-svc"
main()
"""


def run(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "inference_svc.cli.main", *arguments],
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
    assert rows["scheduler.max_running"] == {"value": 3, "source": "env", "live": False}
    assert rows["log.level"]["live"]
    assert rows["cache.mode"]["source"] == "default"
    settings = load_inference_settings(None, {"scheduler.max_running": 5}).settings
    assert settings.scheduler.max_running == 5


def test_config_check_lists_every_problem_on_a_line(tmp_path):
    """Unknown keys, bad values and bad addresses, each with what is accepted."""
    path = tmp_path / "inference.toml"
    path.write_text('[cache]\nmodus = "x"\nmode = "fast"\n[server]\nlisten = "anywhere"\n')
    checked = run("config", "check", "--config", str(path))
    assert checked.returncode == 78
    for line, said in zip(
        checked.stderr.splitlines(),
        (
            ("cache.modus", "did you mean cache.mode"),
            ("server.listen", "anywhere", "host:port"),
            ("cache.mode", "'fast'"),
        ),
        strict=True,
    ):
        assert line.startswith("inference-svc: ")
        assert all(part in line for part in said), line


def test_a_model_that_is_not_there_is_a_problem_of_the_settings(tmp_path):
    """As the start would say; of a model that is there nothing more is looked at."""
    path = tmp_path / "inference.toml"
    path.write_text(f'[model]\npath = "{tmp_path}/none"\n')
    checked = run("config", "check", "--config", str(path))
    assert checked.returncode == 78
    assert f"model directory {tmp_path}/none does not exist" in checked.stderr


def test_the_shipped_settings_file_has_every_key():
    """It is the reference: each key of the model is in it, and each value is accepted."""
    loaded = load_inference_settings(SHIPPED, {})
    written = SHIPPED.read_text(encoding="utf-8")
    for key in loaded.provenance:
        assert f"{key.split('.')[-1]} = " in written, key


def test_the_shipped_settings_file_says_the_defaults():
    """But for the paths, which are the system's; and it is no second source of truth."""
    shipped = load_inference_settings(SHIPPED, {}).settings
    defaults = load_inference_settings(None, {}).settings
    for section in ("cache", "scheduler", "overflow", "compression", "limits", "log"):
        written = getattr(shipped, section).model_dump()
        for key, value in getattr(defaults, section).model_dump().items():
            assert key == "kvd_runtime_dir" or written[key] == value, key
    assert shipped.model.attention == defaults.model.attention


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cache.load_policy", "sometimes", "'auto'"),
        ("cache.preload", "blocks", "'layers'"),
        ("cache.read_buffer_layers", -2, "-1"),
        ("cache.saving", "later", "'async'"),
        ("cache.residents", "perhaps", "valid boolean"),
        ("model.attention", "flash9", "'torch'"),
        ("scheduler.mixed_step_tokens", 1, "16"),
        ("scheduler.answer_tokens", 0, "1"),
        ("scheduler.kv_tokens", 3, "3 leaves no window for a turn"),
        ("scheduler.kv_tokens", 1 << 50, "this machine has"),
        ("server.max_message_bytes", 1 << 31, "less than or equal to"),
        ("scheduler.tenant_weights", "acme=-1", "greater than 0"),
        ("overflow.sink_tokens", -1, "greater than or equal to 0"),
        ("overflow.sink_tokens", "few", "valid integer"),
    ],
)
def test_values_that_cannot_be_are_named_with_what_is_accepted(key, value, said):
    """Each key of the executor has its bounds."""
    with pytest.raises(InvalidSettingsError) as refused:
        load_inference_settings(None, {key: value})
    assert key in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "least", "said"),
    [
        ({}, 32, "31 leaves no window for a turn beside the write ring: write at least 32"),
        ({"cache.saving": "off"}, 16, "15 leaves no window for a turn: write at least 16"),
        ({"cache.mode": "recompute"}, 16, "15 leaves no window for a turn: write at least 16"),
    ],
)
def test_the_shortest_window_is_one_that_the_service_has(settings, least, said):
    """What the smallest write ring leaves, or all if nothing is saved; one less is refused."""
    kept = load_inference_settings(None, {**settings, "scheduler.kv_tokens": least}).settings
    assert kept.scheduler.kv_tokens == least
    with pytest.raises(InvalidSettingsError, match=said):
        load_inference_settings(None, {**settings, "scheduler.kv_tokens": least - 1})


def test_sockets_and_ports_in_a_list(tmp_path):
    """In the file a list or one address, in the environment a,b; "auto" is the usual socket."""
    client = {"clients.a.token_sha256": ("0" * 64,), "clients.a.tenants": ("a",)}
    path = tmp_path / "inference.toml"
    for text, listen in (
        ('["auto", "127.0.0.1:1"]', (default_listen(), "127.0.0.1:1")),
        ('"unix:/run/a.sock"', ("unix:/run/a.sock",)),
        ('"unix:/run/a.sock, [::1]:2"', ("unix:/run/a.sock", "[::1]:2")),
    ):
        path.write_text(f"[server]\nlisten = {text}\n")
        assert load_inference_settings(path, client).settings.server.listen == listen
    path.write_text('[server]\nlisten = ["auto", "10.0.0.1:1"]\n')
    with pytest.raises(UnguardedError, match=r"10\.0\.0\.1"):  # whatever stands before it
        load_inference_settings(path, client)
    for text in ("[]", '["auto", "auto"]', '["auto", ""]'):
        path.write_text(f"[server]\nlisten = {text}\n")
        with pytest.raises(InvalidSettingsError, match=r"server\.listen"):
            load_inference_settings(path, {})


@pytest.mark.parametrize("section", ["openai", "metrics"])
def test_http_is_served_at_a_list_of_addresses_too(tmp_path, section):
    """As gRPC is: a list or one address; "" and [] are nowhere, and each is to be guarded."""
    path = tmp_path / "inference.toml"

    def listen(text):
        path.write_text(f"[{section}]\nlisten = {text}\n")
        client = {"clients.a.token_sha256": ("0" * 64,), "clients.a.tenants": ("a",)}
        return getattr(load_inference_settings(path, client).settings, section).listen

    assert listen('["unix:/run/a.sock", "127.0.0.1:1"]') == ("unix:/run/a.sock", "127.0.0.1:1")
    assert listen('"127.0.0.1:1"') == ("127.0.0.1:1",)
    assert listen('""') == listen("[]") == ()
    with pytest.raises(UnguardedError, match=r"10\.0\.0\.1"):
        listen('["unix:/run/a.sock", "10.0.0.1:1"]')
    for text in ('"anywhere"', '["unix:/run/a.sock", "unix:b"]', '["auto"]'):
        with pytest.raises(InvalidSettingsError, match=rf"{section}\.listen .* is no address"):
            listen(text)


def test_auto_is_what_the_supervisor_has_made(monkeypatch):
    """Each instance of the unit has directories of its own, under the one file of settings."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/inference-svc-a")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/inference-svc/a")
    server = load_inference_settings(SHIPPED, {}).settings.server
    assert server.listen == ("unix:/run/inference-svc-a/inference.sock",)
    assert server.state_dir == Path("/var/lib/inference-svc/a")


@pytest.mark.parametrize("listen", ["unix:relative", "unix:/" + "x" * 120, "host:port", "80"])
def test_addresses_that_cannot_be_served(listen):
    """A socket path must be absolute and short, a port has a host."""
    with pytest.raises(InvalidSettingsError, match=r"server\.listen"):
        load_inference_settings(None, {"server.listen": listen})


def test_a_port_that_anybody_could_use_is_refused():
    """TCP is for clients that are known; tokens go over TLS or stay on the machine."""
    client = {"clients.a.token_sha256": ("0" * 64,), "clients.a.tenants": ("a",)}
    with pytest.raises(UnguardedError, match="anybody could connect"):
        load_inference_settings(None, {"server.listen": "127.0.0.1:1"})
    with pytest.raises(UnguardedError, match="overheard"):
        load_inference_settings(None, {"server.listen": "10.0.0.1:1", **client})
    load_inference_settings(None, {"server.listen": "127.0.0.1:1", **client})


def test_serve_without_a_model_is_one_line(tmp_path):
    """The error names the flag; no traceback."""
    served = run(
        *("serve", "--listen", f"unix:{tmp_path}/s", "--state-dir", str(tmp_path / "state"))
    )
    assert served.returncode == 78
    assert served.stderr.splitlines()[-1].startswith("inference-svc: no model is named")
    assert "Traceback" not in served.stderr


@pytest.mark.parametrize(
    "command",
    [("serve",), ("bench", "decode"), ("eval", "perplexity", "--text", "a.txt")],
    ids=lambda command: command[0],
)
def test_a_mistyped_model_directory_is_told_at_once(tmp_path, command):
    """In one line, before torch is imported, which takes seconds; nothing is left behind."""
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
        f"inference-svc: model directory {tmp_path}/typo does not exist: give"
    )
    assert "shared.types.errors" in imported
    assert "torch" not in imported
    assert list(tmp_path.iterdir()) == []


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
            prepare_sockets([f"unix:{path}"])
        assert path.exists()
    prepare_sockets([f"unix:{path}"])
    assert not path.exists()


def test_a_socket_far_from_any_directory_is_refused(short_dir):
    """One directory is made for it, and logged; a path that is wrong from the start is not."""
    with pytest.raises(ListenError, match="there is no directory") as refused:
        prepare_sockets([f"unix:{short_dir}/a/b/s"])
    assert f"mkdir -p -m 700 {short_dir}/a/b" in str(refused.value)
    assert not list(short_dir.iterdir())
    with capture_logs() as lines:
        prepare_sockets([f"unix:{short_dir}/a/s"])
        prepare_sockets([f"unix:{short_dir}/a/t"])
    made = [line["directory"] for line in lines if line["event"] == "directory_made"]
    assert made == [str(short_dir / "a")]
    assert (short_dir / "a").stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_way_is_not_removed(short_dir):
    """It is not ours."""
    path = Path(short_dir / "s")
    path.write_text("precious")
    with pytest.raises(ListenError):
        prepare_sockets([f"unix:{path}"])
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


def test_chat_says_what_held_a_turn_up():
    """Only if anything did."""
    line = describe(pb.Usage(stall_s=0.05, preemptions=2))
    assert "waited 50 ms for layers" in line
    assert "interrupted 2 times" in line
    assert "waited" not in describe(pb.Usage())


def test_status_shows_gauges_and_counters_with_their_meaning():
    """A person sees units and explanations; counters that this version does not know come last."""
    model = pb.Model(
        name="tiny",
        gauges={"pool_bytes": 1 << 20, "retry_after_s": 0.25, "waiting": 3.0},
        counters={"turns_finished": 1234, "future": 5},
    )
    console = Console(width=120)
    with console.capture() as captured:
        for table in status_tables(model):
            console.print(table)
    shown = captured.get()
    for said in ("tiny", "1.0 MB", "250 ms", "1,234", COUNTERS["turns_finished"], "future"):
        assert said in shown
    assert shown.index("turns_finished") < shown.index("future")


def test_status_is_one_screen():
    """What is asked first, in 80 columns and 24 lines; of a service that has just begun, too."""
    counts = {"turns_finished": 12, "history_tokens": 2000, "reused_tokens": 1900}
    counts |= {"recomputed_tokens": 100, "output_tokens": 600, "load_errors": 2, "expired": 0}
    gauges = {"uptime_s": 507.0, "compute_busy_s": 20.0, "ttft_p50_s": 0.025, "ttft_p95_s": 0.2}
    model = pb.Model(name="tiny", counters=counts, gauges=gauges)
    lines = list(status_lines(model, 80))
    shown = " ".join(" ".join(lines).split())
    for said in ("95.0% of 2,000", "after 25 ms", "30 tokens/s", "up 8m27s", "12 answered"):
        assert said in shown
    assert f"troubles 2 {COUNTERS['load_errors']}" in shown
    screens = (lines, list(status_lines(pb.Model(name="new"), 80)))
    for screen in screens:
        rows = "\n".join(screen).splitlines()
        assert len(rows) < 24
        assert max(map(len, rows)) <= 80
    assert "none yet" in "".join(screens[1])


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("prefill_tokens_per_s", 12345.6, "12,346 /s"),
        ("load_s", 0.002, "2 ms"),
        ("resident_bytes", 2048.0, "2.0 KB"),
        ("kv_tokens", 4096.0, "4,096"),
        ("busy", 0.4567, "0.457"),
    ],
)
def test_gauges_are_shown_in_their_unit(name, value, shown):
    """The end of the name is the unit."""
    assert format_gauge(name, value) == shown


@pytest.mark.parametrize(("given", "shown", "kept"), [({}, "auto", 16), ("2", "2", 2), (0, "0", 0)])
def test_sinks_are_those_of_the_model_unless_the_settings_say_how_many(given, shown, kept):
    """For turns that do not say; `config show` shows what was left to the model."""
    flags = {"overflow.sink_tokens": given} if given != {} else {}
    settings = load_inference_settings(None, flags).settings
    assert str(settings.model_dump(mode="json")["overflow"]["sink_tokens"]) == shown
    defaults = turn_defaults(settings, ModelTraits("ragged", sink_tokens=16))
    assert defaults.overflow.sink_tokens == kept
    assert defaults.model.sink_tokens == 16


@pytest.mark.parametrize(
    ("given", "keeps", "shown", "ratio"),
    [({}, True, "auto", 0.125), ({}, False, "auto", 0.5), ("0.3", True, "0.3", 0.3)],
)
def test_little_goes_at_once_where_what_is_kept_costs_nothing(given, keeps, shown, ratio):
    """Unless the settings say how much."""
    flags = {"overflow.ratio": given} if given != {} else {}
    settings = load_inference_settings(None, flags).settings
    assert str(settings.model_dump(mode="json")["overflow"]["ratio"]) == shown
    defaults = turn_defaults(settings, ModelTraits("ragged", keeps_truncated=keeps))
    assert defaults.overflow.ratio == ratio


def test_the_only_service_of_the_system_is_found(tmp_path, monkeypatch):
    """Without a socket of one's own; of several none is taken, and one's own comes first."""
    own = tmp_path / "own" / "inference-svc" / "inference.sock"
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "own"))
    run_dir = tmp_path / "run"
    (run_dir / "inference-svc-demo").mkdir(parents=True)
    demo = f"unix:{run_dir / 'inference-svc-demo' / 'inference.sock'}"
    assert default_address(run_dir) == demo
    (run_dir / "inference-svc-other").mkdir()
    assert default_address(run_dir) == f"unix:{own}"
    (run_dir / "inference-svc-other").rmdir()
    own.parent.mkdir(parents=True)
    own.touch()
    assert default_address(run_dir) == f"unix:{own}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_who_may_not_open_the_socket_is_told_so(short_dir):
    """Not that nobody answers: whose it is, and what group lets this user in; exit code 7."""
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
