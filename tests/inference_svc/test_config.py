"""Settings of the service: their sources, their valid values, and derived ones."""

import json
from pathlib import Path

import pytest

from inference_svc.config import load_inference_settings
from inference_svc.core.submission import ModelTraits
from inference_svc.installation import default_listen
from inference_svc.service.submissions import turn_defaults
from shared.access.settings import UnguardedError
from shared.config.settings import InvalidSettingsError
from tests.inference_svc.commands import run

SHIPPED = Path(__file__).parents[2] / "systemd" / "inference-svc.toml"


def test_flags_override_the_environment():
    """All others keep their defaults."""
    shown = run("config", "show", "--json", INFERENCE_SCHEDULER__MAX_RUNNING="3")
    rows = json.loads(shown.stdout)
    assert rows["scheduler.max_running"] == {"value": 3, "source": "env", "live": False}
    assert rows["log.level"]["live"]
    assert rows["cache.mode"]["source"] == "default"
    settings = load_inference_settings(None, {"scheduler.max_running": 5}).settings
    assert settings.scheduler.max_running == 5


def test_config_check_lists_one_problem_per_line(tmp_path):
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


def test_a_missing_model_is_a_problem_of_the_settings(tmp_path):
    """As at the start; the files of an existing model are not checked."""
    path = tmp_path / "inference.toml"
    path.write_text(f'[model]\npath = "{tmp_path}/none"\n')
    checked = run("config", "check", "--config", str(path))
    assert checked.returncode == 78
    assert f"model directory {tmp_path}/none does not exist" in checked.stderr


def test_the_shipped_settings_file_has_every_key():
    """It is the reference: it has every key, with accepted values."""
    loaded = load_inference_settings(SHIPPED, {})
    written = SHIPPED.read_text(encoding="utf-8")
    for key in loaded.provenance:
        assert f"{key.split('.')[-1]} = " in written, key


def test_the_shipped_settings_file_has_the_defaults():
    """Except for paths, which are the system's."""
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
        ("scheduler.step_tokens", 15, "write at least 16, or 0 to have it chosen for the device"),
        ("scheduler.mixed_step_tokens", 1, "write at least 16, or 0"),
        ("scheduler.mixed_step_tokens", -1, "greater than or equal to 0"),
        ("scheduler.max_running", -1, "greater than or equal to 0"),
        ("scheduler.answer_tokens", 0, "1"),
        ("scheduler.kv_tokens", 3, "3 leaves no room for a turn"),
        ("scheduler.kv_tokens", 1 << 50, "of this machine: write less"),
        ("server.max_message_bytes", 1 << 31, "less than or equal to"),
        ("scheduler.tenant_weights", "acme=-1", "greater than 0"),
        ("model.chat_template_kwargs", '{"tools": []}', "argument 'tools': leave it out"),
        ("model.chat_template_kwargs", "no", "not JSON"),
        ("model.chat_template_kwargs", 7, "valid dictionary"),
        ("reuse.edits", "heal", '"heal:k" with k from 1 to 4096'),
        ("overflow.sink_tokens", -1, "greater than or equal to 0"),
        ("overflow.sink_tokens", "few", "valid integer"),
    ],
)
def test_invalid_values_are_reported_with_the_accepted_ones(key, value, said):
    """Each key of the executor has its bounds."""
    with pytest.raises(InvalidSettingsError) as refused:
        load_inference_settings(None, {key: value})
    assert key in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "least", "said"),
    [
        ({}, 32, "31 leaves no room for a turn beside the write ring: write at least 32"),
        ({"cache.saving": "off"}, 16, "15 leaves no room for a turn: write at least 16"),
        ({"cache.mode": "recompute"}, 16, "15 leaves no room for a turn: write at least 16"),
    ],
)
def test_the_shortest_window_is_possible(settings, least, said):
    """It fits beside the smallest write ring, or alone if nothing is saved; one less is refused."""
    kept = load_inference_settings(None, {**settings, "scheduler.kv_tokens": least}).settings
    assert kept.scheduler.kv_tokens == least
    with pytest.raises(InvalidSettingsError, match=said):
        load_inference_settings(None, {**settings, "scheduler.kv_tokens": least - 1})


def test_several_sockets_and_ports(tmp_path):
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
    with pytest.raises(UnguardedError, match=r"10\.0\.0\.1"):  # whatever comes before it
        load_inference_settings(path, client)
    for text in ("[]", '["auto", "auto"]', '["auto", ""]'):
        path.write_text(f"[server]\nlisten = {text}\n")
        with pytest.raises(InvalidSettingsError, match=r"server\.listen"):
            load_inference_settings(path, {})


@pytest.mark.parametrize("section", ["openai", "metrics"])
def test_http_may_have_several_addresses_too(tmp_path, section):
    """As gRPC: a list or one address; "" and [] are none, and each needs authentication."""
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
        with pytest.raises(InvalidSettingsError, match=rf"{section}\.listen .* is not an address"):
            listen(text)


def test_auto_uses_the_supervisors_directories(monkeypatch):
    """Each instance of the unit has its own, with the same settings file."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/inference-svc-a")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/inference-svc/a")
    server = load_inference_settings(SHIPPED, {}).settings.server
    assert server.listen == ("unix:/run/inference-svc-a/inference.sock",)
    assert server.state_dir == Path("/var/lib/inference-svc/a")


@pytest.mark.parametrize("listen", ["unix:relative", "unix:/" + "x" * 120, "host:port", "80"])
def test_invalid_addresses(listen):
    """A socket path must be absolute and short, a port needs a host."""
    with pytest.raises(InvalidSettingsError, match=r"server\.listen"):
        load_inference_settings(None, {"server.listen": listen})


def test_an_unprotected_port_is_refused():
    """TCP needs authenticated clients; tokens need TLS or a local address."""
    client = {"clients.a.token_sha256": ("0" * 64,), "clients.a.tenants": ("a",)}
    with pytest.raises(UnguardedError, match="anybody could connect"):
        load_inference_settings(None, {"server.listen": "127.0.0.1:1"})
    with pytest.raises(UnguardedError, match="could be read on the network"):
        load_inference_settings(None, {"server.listen": "10.0.0.1:1", **client})
    load_inference_settings(None, {"server.listen": "127.0.0.1:1", **client})


@pytest.mark.parametrize(("given", "shown", "kept"), [({}, "auto", 16), ("2", "2", 2), (0, "0", 0)])
def test_sinks_come_from_the_model_unless_configured(given, shown, kept):
    """For turns without their own; `config show` shows that the model decides."""
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
def test_a_small_part_is_dropped_at_a_time_where_keeping_is_free(given, keeps, shown, ratio):
    """Unless the settings have a size."""
    flags = {"overflow.ratio": given} if given != {} else {}
    settings = load_inference_settings(None, flags).settings
    assert str(settings.model_dump(mode="json")["overflow"]["ratio"]) == shown
    defaults = turn_defaults(settings, ModelTraits("ragged", keeps_truncated=keeps))
    assert defaults.overflow.ratio == ratio


def test_template_arguments_are_a_table(tmp_path):
    """In the file; elsewhere as JSON. A value that is not JSON, such as a date, is refused."""
    path = tmp_path / "inference.toml"
    path.write_text("[model.chat_template_kwargs]\nenable_thinking = false\nlevels = [1, 2]\n")
    told = {"enable_thinking": False, "levels": [1, 2]}
    assert load_inference_settings(path, {}).settings.model.chat_template_kwargs == told
    flags = {"model.chat_template_kwargs": '{"enable_thinking": false, "levels": [1, 2]}'}
    assert load_inference_settings(None, flags).settings.model.chat_template_kwargs == told
    path.write_text("[model]\nchat_template_kwargs = { on = 2026-01-01 }\n")
    with pytest.raises(InvalidSettingsError, match="the chat template's arguments are not JSON"):
        load_inference_settings(path, {})
