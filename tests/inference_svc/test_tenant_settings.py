"""Tenants' limits in the settings."""

import pytest

from inference_svc.config import LIVE_KEYS, InferenceSettings, load_inference_settings
from inference_svc.core.tenant_limits import TenantBounds
from shared.config.settings import InvalidSettingsError, load_settings

LIMITS = """
[limits]
turns_per_minute = 60
max_turns = 8
[tenants.acme]
max_turns = "none"
tokens_per_minute = 1e5
[tenants.batch]
max_sessions = 3
"""


def bounds(tmp_path, text):
    path = tmp_path / "inference.toml"
    path.write_text(text)
    return load_inference_settings(path, {}).settings.tenant_bounds()


def test_a_tenant_has_the_defaults_except_its_own_limits(tmp_path):
    """ "none" removes a limit; there are none by default."""
    default, named = bounds(tmp_path, LIMITS)
    assert default == TenantBounds(turns_per_minute=60, max_turns=8)
    assert named == {
        "acme": TenantBounds(turns_per_minute=60, tokens_per_minute=1e5),
        "batch": TenantBounds(turns_per_minute=60, max_turns=8, max_sessions=3),
    }
    assert bounds(tmp_path, "") == (TenantBounds(), {})


def test_limits_in_the_environment():
    """Like other settings; names of tenants are in lower case there."""
    environ = {"INFERENCE_TENANTS__ACME__MAX_TURNS": "2", "INFERENCE_LIMITS__MAX_SESSIONS": "none"}
    settings = load_settings(InferenceSettings, None, "INFERENCE", {}, environ).settings
    assert settings.tenant_bounds() == (TenantBounds(), {"acme": TenantBounds(max_turns=2)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("limits.turns_per_minute", 0),
        ("limits.turns_per_minute", 1e-300),
        ("limits.tokens_per_minute", float("inf")),
        ("limits.max_turns", "many"),
        ("limits.max_streams_per_client", "none"),
        ("tenants.acme.max_sessions", -1),
        ("server.socket_tenants", []),
        ("server.socket_tenants", ["no name!"]),
    ],
)
def test_invalid_limits(key, value):
    """Each is reported."""
    with pytest.raises(InvalidSettingsError) as refused:
        load_inference_settings(None, {key: value})
    assert key in str(refused.value)


def test_keys_that_a_reload_changes_exist():
    """Each live key is a key, a section or a table."""
    known = load_inference_settings(None, {"tenants.a.max_turns": 1}).provenance
    tables = set(InferenceSettings.model_fields)
    assert not [key for key in LIVE_KEYS if key not in known and key not in tables]
