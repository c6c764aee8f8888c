"""kvd's settings, and the shipped file that explains them."""

import re
import tomllib
from pathlib import Path

import pytest

from kvd.cli.main import main
from kvd.config import (
    ENV_PREFIX,
    EngineUserSettings,
    KvdClientSettings,
    LayoutSettings,
    Settings,
    TenantSettings,
    is_live,
    load,
)
from kvd.core.records.entries import TTL_NEVER_NS
from shared.access.settings import UnguardedError
from shared.config.settings import InvalidSettingsError, load_settings
from shared.types.units import NS_PER_S
from tests.synthetic_engine import small_layout

SHIPPED = Path(__file__).parents[2] / "systemd" / "kvd.toml"
EXAMPLE_LINE = re.compile(r"^#(\[|[a-z0-9_]+ = )")  # a setting that is commented out


def _load(tmp_path: Path, text: str) -> Settings:
    (tmp_path / "kvd.toml").write_text(text)
    return load(tmp_path / "kvd.toml", {}).settings


def test_the_shipped_file_sets_every_key():
    """systemd/kvd.toml is the reference: it parses, and has every key."""
    loaded = load_settings(Settings, SHIPPED, ENV_PREFIX, {}, {})
    assert set(loaded.provenance.values()) == {"file"}


def test_the_shipped_file_holds_the_defaults():
    """Each value is the default, except the directories of the system service."""
    shipped = load_settings(Settings, SHIPPED, ENV_PREFIX, {}, {}).settings.model_dump()
    defaults = load_settings(Settings, None, ENV_PREFIX, {}, {}).settings.model_dump()
    for directory in ("runtime_dir", "state_dir"):
        shipped.pop(directory)
        defaults.pop(directory)
    assert shipped == defaults


def test_the_shipped_file_explains_every_key():
    """Before each key, or the group of lines it belongs to, there is a comment."""
    lines = SHIPPED.read_text().splitlines()
    for number, line in enumerate(lines):
        if "=" in line and (EXAMPLE_LINE.match(line) or not line.startswith("#")):
            before = lines[number - 1]
            assert before.startswith("# ") or "=" in before, line
    assert set(tomllib.loads(_with_examples())) == set(Settings.model_fields)


def test_the_shipped_examples_have_every_key_of_named_tables(tmp_path):
    """They are commented out; in force they load, and have every key."""
    settings = _load(tmp_path, _with_examples())
    (tenant,), (layout,) = settings.tenants.values(), settings.layouts.values()
    assert tenant.model_fields_set == set(TenantSettings.model_fields)
    assert layout.model_fields_set == set(LayoutSettings.model_fields)
    (user,), (client,) = settings.engine_users.values(), settings.clients.values()
    assert user.model_fields_set == set(EngineUserSettings.model_fields)
    assert client.model_fields_set == set(KvdClientSettings.model_fields)


def test_a_tenants_own_values(tmp_path):
    """A tenant's table applies to it, "never" and "none" too; the rest is the default."""
    settings = _load(
        tmp_path,
        '[sessions]\ndefault_quota = "1GB"\n[tenants.a]\nttl = "1h"\n'
        '[tenants."b.c"]\nttl = "never"\nquota = "none"\n[tenants.d]\nquota = 0\n',
    )
    tenants = ("a", "b.c", "d", "else")
    ttls = [settings.tenant_ttl_ns(tenant) for tenant in tenants]
    quotas = [settings.tenant_quota_bytes(tenant) for tenant in tenants]
    assert ttls == [3600 * NS_PER_S, TTL_NEVER_NS, None, None]
    assert quotas == [1 << 30, None, 0, 1 << 30]


def test_a_tenants_own_bound_on_retention(tmp_path):
    """Longer than the general one, or none; otherwise the general one applies."""
    text = '[tenants.a]\nmax_retention = "24h"\n[tenants.b]\nmax_retention = 0\n[tenants.c]\n'
    settings = _load(tmp_path, text)
    bounds_ns = [settings.tenant_retention_ns(tenant) for tenant in ("a", "b", "c", "else")]
    assert bounds_ns == [86_400 * NS_PER_S, 0, None, None]
    assert settings.sessions.max_retention == 3600


def test_a_layouts_own_budgets(tmp_path):
    """The longest prefix of a layout's model or fingerprint gives its budgets."""
    layout, other = small_layout(), small_layout(model="ee" * 16)
    text = f'[layouts.{layout.model[:4]}]\ndram = "1MB"\n[layouts.{layout.model}]\nssd = "2MB"\n'
    settings = _load(tmp_path, text)
    assert settings.layout_settings(layout) == LayoutSettings(ssd=2 << 20)
    assert settings.layout_settings(other) == LayoutSettings()
    by_fingerprint = _load(tmp_path, f'[layouts."{layout.fingerprint[:8]}"]\ndram = "1MB"\n')
    assert by_fingerprint.layout_settings(layout).dram == 1 << 20


def test_names_of_tables_are_checked(tmp_path):
    """An invalid tenant, and a prefix that is not hexadecimal, refuse the start."""
    text = "[tenants.'no tenant']\nquota = 1\n[layouts.XYZ]\nssd = 0\n[tenants.ok]\ncolour = 1\n"
    with pytest.raises(InvalidSettingsError) as error:
        _load(tmp_path, text)
    for part in ("'no tenant' is not valid", "layouts.XYZ", "pattern", "tenants.ok.colour"):
        assert part in str(error.value)


def _with_examples() -> str:
    """Return the shipped file with its commented-out settings in force."""
    lines = SHIPPED.read_text().splitlines()
    return "\n".join(line[1:] if EXAMPLE_LINE.match(line) else line for line in lines)


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("dram.bytes", "12", "greater than or equal to"),
        ("dram.bytes", "lots", "is not a size"),
        ("ssd.segment_bytes", "auto", "is not a size"),
        ("dram.keep", "disk", "'auto', 'fdstore', 'file' or 'none'"),
        ("dram.numa_node", "-1", "greater than or equal to 0"),
        ("ssd.direct", "maybe", "'auto', 'on' or 'off'"),
        ("ssd.admission", "never", "'write_through', 'write_back' or 'on_evict'"),
        ("integrity.scrub_rate", "1KB", "greater than or equal to"),
        ("sessions.default_quota", "much", "is not a size"),
        ("sessions.default_ttl", "0", "greater than 0"),
        ("sessions.default_ttl", "soon", "is not a duration"),
        ("sessions.max_retention", "never", "is not a duration"),
        ("dram.watermark", "0.9", "less than or equal to 0.5"),
        ("eviction.policy", "magic", "give one of fifo, lookahead, lookahead_queue, lru, pred"),
        ("prefetch.in_flight_bytes", "fast", "is not a size"),
        ("prefetch.returning", "perhaps", "boolean"),
        ("access.tcp", "no address", "host:port"),
        ("access.tcp", "unix:/run/x.sock", "host:port"),
        ("metrics.listen", "unix:x.sock", "unix:/path"),
        ("access.allowed_uids", "nobody-here", "user 'nobody-here' does not exist"),
        ("clients.a.tenants", "", "list the tenants"),
        ("clients.a.roles", "boss", "'reader' or 'operator'"),
        ("log.level", "loud", "'debug', 'info'"),
        ("limits.max_leases", "1000000000", "1000000"),
        ("limits.max_rpcs", "10000000000", "1000000"),
        ("limits.max_queue_jobs", "10000000000", "1000000"),
    ],
)
def test_bad_values_are_reported_with_the_accepted_ones(key, value, accepted):
    """With the key and the value."""
    with pytest.raises(InvalidSettingsError) as error:
        load(None, {key: value})
    for part in (key, value, accepted):
        assert part in str(error.value)


def test_several_ports(tmp_path):
    """A list or one address; each needs authentication, whatever its scheme."""
    path = tmp_path / "kvd.toml"
    client = {"clients.a.token_sha256": ("0" * 64,), "clients.a.tenants": ("a",)}

    def ports(text):
        path.write_text(f"[access]\ntcp = {text}\n")
        return load(path, client).settings.access.tcp

    assert ports('["127.0.0.1:1", "[::1]:1"]') == ("127.0.0.1:1", "[::1]:1")
    assert ports('"127.0.0.1:1"') == ("127.0.0.1:1",)
    assert ports('""') == ports("[]") == ()
    with pytest.raises(UnguardedError, match=r"10\.0\.0\.1"):
        ports('["127.0.0.1:1", "10.0.0.1:1"]')


def test_more_than_the_machine_has_is_refused(tmp_path, capsys):
    """`config check` has a line for each impossible size, layouts' own included."""
    path = tmp_path / "kvd.toml"
    path.write_text(
        f'state_dir = "{tmp_path}"\n[dram]\nbytes = "999TB"\n[ssd]\nbytes = "999TB"\n'
        '[layouts.ab]\ndram = "999TB"\n'
    )
    with pytest.raises(SystemExit) as ended:
        main(["config", "check", "--config", str(path)])
    assert ended.value.code == 78
    lines = capsys.readouterr().err.splitlines()
    keys = ("dram.bytes", "ssd.bytes", "layouts.ab.dram")
    for line, key in zip(lines, keys, strict=True):
        assert line.startswith(f"kvd: {key} = 999.0 TB is more than the ")
        assert "write less" in line


def test_a_mistyped_variable_is_refused(monkeypatch):
    """With one wrong letter or underscore it would be ignored; those of options are allowed."""
    monkeypatch.setenv("KVD_TLS_KEY_FILE", "key.pem")
    load(None, {})
    monkeypatch.setenv("KVD_RUNTIME_DRI", "/run/other")
    with pytest.raises(InvalidSettingsError, match=r"KVD_RUNTIME_DRI .*KVD_RUNTIME_DIR\?"):
        load(None, {})


def test_invalid_clients_and_users(tmp_path):
    """A wrong digest is not printed; an unknown user and half of TLS are named."""
    text = (
        '[clients.a]\ntenants = ["*"]\ntoken_sha256 = ["kvt_oops"]\n[clients.b]\ntenants = ["x"]\n'
        '[engine_users.nobody-here]\ntenants = ["a"]\n[tls]\nkey = "key.pem"\n'
    )
    with pytest.raises(InvalidSettingsError) as error:
        _load(tmp_path, text)
    for part in (
        "64 hex digits",
        "clients.b",
        "kvd token",
        "user 'nobody-here' does not exist",
        "tls.key",
    ):
        assert part in str(error.value)
    assert "oops" not in str(error.value)


def test_users_are_given_by_name_or_number(tmp_path):
    """Both forms say whose engines may attach, and for which tenants."""
    text = (
        '[access]\nallowed_uids = [1001, "root"]\n'
        '[engine_users.root]\ntenants = ["a"]\n[engine_users.1002]\ntenants = ["b", "c"]\n'
    )
    settings = _load(tmp_path, text)
    assert set(settings.engine_uids()) == {0, 1001, 1002}
    assert settings.engine_tenants() == {0: ("a",), 1002: ("b", "c")}


def test_the_shipped_file_marks_keys_that_a_reload_changes():
    """In the comment of each live key, and of no other."""
    section, comment = "", ""
    documented: dict[str, bool] = {}
    before = ""
    for line in SHIPPED.read_text().splitlines():
        if heading := re.match(r"#?\[([\w.]+)\]$", line):
            section = heading[1]
        elif key := re.match(r"#?([a-z0-9_]+) = ", line):
            documented[f"{section}.{key[1]}" if section else key[1]] = "(live)" in comment
        elif line.startswith("# "):
            comment = comment + line if before.startswith("# ") else line
        before = line
    assert len(documented) > 60
    assert documented == {key: is_live(key) for key in documented}
