"""kvd's settings, and the shipped file that explains them."""

import re
import tomllib
from pathlib import Path

import pytest

from kvd.config import ENV_PREFIX, LayoutSettings, Settings, TenantSettings, load
from kvd.core.records import TTL_NEVER_NS
from shared.config import InvalidSettingsError, load_settings
from shared.units import NS_PER_S
from tests.synthetic_engine import small_layout

SHIPPED = Path(__file__).parents[2] / "systemd" / "kvd.toml"
EXAMPLE_LINE = re.compile(r"^#(\[|[a-z_]+ = )")  # a setting that is commented out


def _load(tmp_path: Path, text: str) -> Settings:
    (tmp_path / "kvd.toml").write_text(text)
    return load(tmp_path / "kvd.toml", {}).settings


def test_the_shipped_file_sets_every_key():
    """systemd/kvd.toml is the reference: it parses, and no key is missing from it."""
    loaded = load_settings(Settings, SHIPPED, ENV_PREFIX, {}, {})
    assert set(loaded.provenance.values()) == {"file"}


def test_the_shipped_file_holds_the_defaults():
    """Each value there is the default, but for the directories of the system service."""
    shipped = load_settings(Settings, SHIPPED, ENV_PREFIX, {}, {}).settings.model_dump()
    defaults = load_settings(Settings, None, ENV_PREFIX, {}, {}).settings.model_dump()
    for directory in ("runtime_dir", "state_dir"):
        shipped.pop(directory)
        defaults.pop(directory)
    assert shipped == defaults


def test_the_shipped_file_explains_every_key():
    """A comment stands before each key, or before the group of lines it belongs to."""
    lines = SHIPPED.read_text().splitlines()
    for number, line in enumerate(lines):
        if "=" in line and (EXAMPLE_LINE.match(line) or not line.startswith("#")):
            before = lines[number - 1]
            assert before.startswith("# ") or "=" in before, line
    assert set(tomllib.loads(_with_examples())) == set(Settings.model_fields)


def test_the_shipped_examples_hold_every_key_of_tables_by_name(tmp_path):
    """Tables by tenant and layout are commented out; in force they load, and no key is missing."""
    settings = _load(tmp_path, _with_examples())
    (tenant,), (layout,) = settings.tenants.values(), settings.layouts.values()
    assert tenant.model_fields_set == set(TenantSettings.model_fields)
    assert layout.model_fields_set == set(LayoutSettings.model_fields)


def test_a_tenants_own_values(tmp_path):
    """What a tenant's table gives holds for it, "never" and "none" too; the rest is the default."""
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


def test_a_layouts_own_budgets(tmp_path):
    """The longest prefix of a layout's model or fingerprint gives its budgets; others have none."""
    layout, other = small_layout(), small_layout(model="ee" * 16)
    text = f'[layouts.{layout.model[:4]}]\ndram = "1MB"\n[layouts.{layout.model}]\nssd = "2MB"\n'
    settings = _load(tmp_path, text)
    assert settings.layout_settings(layout) == LayoutSettings(ssd=2 << 20)
    assert settings.layout_settings(other) == LayoutSettings()
    by_fingerprint = _load(tmp_path, f'[layouts."{layout.fingerprint[:8]}"]\ndram = "1MB"\n')
    assert by_fingerprint.layout_settings(layout).dram == 1 << 20


def test_names_of_tables_are_checked(tmp_path):
    """A tenant that cannot be, and a prefix that is not hexadecimal, refuse the start."""
    text = "[tenants.'no tenant']\nquota = 1\n[layouts.XYZ]\nssd = 0\n[tenants.ok]\ncolour = 1\n"
    with pytest.raises(InvalidSettingsError) as error:
        _load(tmp_path, text)
    for part in ("'no tenant' is not valid", "layouts.XYZ", "pattern", "tenants.ok.colour"):
        assert part in str(error.value)


def _with_examples() -> str:
    """The shipped file with its commented-out settings in force."""
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
        ("dram.watermark", "0.9", "less than or equal to 0.5"),
        ("eviction.policy", "magic", "choose one of fifo, lookahead, lookahead_queue, lru, pred"),
        ("prefetch.in_flight_bytes", "fast", "is not a size"),
        ("prefetch.returning", "perhaps", "boolean"),
        ("access.tcp", "0.0.0.0:80", "pattern"),
        ("access.allowed_uids", "me", "integer"),
        ("log.level", "loud", "'debug', 'info'"),
    ],
)
def test_bad_values_name_what_is_accepted(key, value, accepted):
    """A value that cannot be is refused with its key, itself and what may stand there."""
    with pytest.raises(InvalidSettingsError) as error:
        load(None, {key: value})
    for part in (key, value, accepted):
        assert part in str(error.value)
