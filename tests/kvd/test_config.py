"""kvd's settings, and the shipped file that explains them."""

import tomllib
from pathlib import Path

import pytest

from kvd.config import ENV_PREFIX, Settings, load
from shared.config import InvalidSettingsError, load_settings

SHIPPED = Path(__file__).parents[2] / "systemd" / "kvd.toml"


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
        if "=" in line and not line.startswith("#"):
            before = lines[number - 1]
            assert before.startswith("#") or "=" in before, line
    assert set(tomllib.loads(SHIPPED.read_text())) == set(Settings.model_fields)


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("dram.bytes", "12", "greater than or equal to"),
        ("dram.bytes", "lots", "is not a size"),
        ("ssd.segment_bytes", "auto", "is not a size"),
        ("sessions.default_ttl", "0", "greater than 0"),
        ("sessions.default_ttl", "soon", "is not a duration"),
        ("eviction.policy", "magic", "choose one of lru"),
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
