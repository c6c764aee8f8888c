"""Reloading settings: live keys change, others are reported, a problem changes nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BeforeValidator, Field, model_validator

from shared.config.reload import LiveSettings, ReloadRefusedError, compare_settings, fixed_settings
from shared.config.settings import InvalidSettingsError, LoadedSettings, load_settings
from shared.types.errors import ConfigError
from shared.types.setting_types import (
    HIDDEN,
    ByteSize,
    Duration,
    Section,
    TenantName,
    TenantWeights,
    to_list,
)

LIVE = ("limits", "cache.ttl", "tenants", "weights", "clients")

IntList = Annotated[tuple[int, ...], BeforeValidator(to_list)]


class Limits(Section):
    turns: int = Field(default=1, ge=1)
    wait: Duration = 1.0


class Cache(Section):
    bytes: ByteSize = 4096
    ttl: Duration = 60.0


class Tenant(Section):
    ttl: Duration = 0
    quota: ByteSize = 0


class Client(Section):
    token: Annotated[str, HIDDEN] = ""
    uids: Annotated[IntList, HIDDEN] = ()


class Example(Section):
    limits: Limits = Limits()
    cache: Cache = Cache()
    tenants: Mapping[TenantName, Tenant] = Field(default_factory=dict)
    clients: Mapping[str, Client] = Field(default_factory=dict)
    weights: TenantWeights = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> "Example":
        if self.limits.turns * 1024 > self.cache.bytes:
            raise ValueError("more turns than the cache has room for")
        return self


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text("[limits]\nturns = 2\n")
    return path


def _load(file: Path, **flags: object) -> LoadedSettings[Example]:
    return load_settings(Example, file, "EX", flags, {"EX_LIMITS__WAIT": "2s"})


def _live(file: Path) -> LiveSettings[Example]:
    return LiveSettings(_load(file), lambda: _load(file), LIVE)


def test_live_keys_change_and_others_wait(file):
    """Of one file some keys take effect at once, the others are reported until the next start."""
    live = _live(file)
    file.write_text('[limits]\nturns = 3\n[cache]\nbytes = "8KB"\nttl = "2m"\n')
    found = live.reload()
    assert (found.applied, found.needs_restart) == (("limits.turns", "cache.ttl"), ("cache.bytes",))
    assert (live.loaded.settings.limits.turns, live.loaded.settings.cache) == (
        3,
        Cache(bytes=4096, ttl=120),
    )
    assert live.reload().needs_restart == ("cache.bytes",)
    assert live.loaded.provenance["limits.wait"] == "env"
    assert live.loaded.provenance["cache.bytes"] == "default"


def test_an_unchanged_file_changes_nothing(file):
    """Callbacks are called all the same."""
    live = _live(file)
    heard = []
    live.on_change.append(heard.append)
    before = live.loaded
    found = live.reload()
    assert (found.applied, found.needs_restart, live.loaded) == ((), (), before)
    assert heard == [before.settings]


@pytest.mark.parametrize(
    "text",
    [
        "[limits]\nturns = 0\n",
        "[limits]\nturnz = 1\n",
        "[limits\n",
        "[limits]\nturns = 3\n[cache]\nbytes = 1024\n",
        "[limits]\nturns = 9\n[cache]\nbytes = 16384\n",  # fits only after a restart
    ],
)
def test_a_problem_changes_nothing(file, text):
    """Neither in the invalid part nor in the others, and no callback is called."""
    live = _live(file)
    heard = []
    live.on_change.append(heard.append)
    before = live.loaded
    file.write_text(text)
    with pytest.raises(ReloadRefusedError, match="nothing was changed"):
        live.reload()
    file.unlink()
    with pytest.raises(ReloadRefusedError, match="cannot read"):
        live.reload()
    assert (live.loaded, heard) == (before, [])


def test_a_check_refuses_the_whole_file(file):
    """External conditions are checked before anything takes effect."""
    live = _live(file)
    heard = []

    def check(settings: Example) -> None:
        if settings.limits.turns == 3:
            raise ConfigError("three is taken", "take another one")

    live.checks.append(check)
    live.on_change.append(heard.append)
    file.write_text("[limits]\nturns = 3\n")
    with pytest.raises(ReloadRefusedError, match="three is taken"):
        live.reload()
    assert (live.loaded.settings.limits.turns, heard) == (2, [])


def test_tables_by_name_are_added_and_removed(file):
    """An added, changed or removed tenant is reported with its keys."""
    live = _live(file)
    file.write_text('[tenants.acme]\nttl = "1m"\nquota = "1GB"\n[tenants.other]\nttl = "1s"\n')
    found = live.reload()
    assert found.applied == (
        "limits.turns",
        "tenants.acme.quota",
        "tenants.acme.ttl",
        "tenants.other.ttl",
    )
    file.write_text('[tenants.acme]\nttl = "2m"\n[weights]\nacme = 2\n')
    found = live.reload()
    assert found.applied == (
        "tenants.acme.quota",
        "tenants.acme.ttl",
        "tenants.other.ttl",
        "weights",
    )
    assert live.loaded.settings.tenants == {"acme": Tenant(ttl=120)}
    assert live.loaded.settings.tenants["acme"].model_fields_set == {"ttl"}
    assert "tenants.acme.quota" not in live.loaded.provenance
    file.write_text("")
    assert live.reload().applied == ("tenants.acme.ttl", "weights")
    assert live.loaded.settings == Example(limits=Limits(wait=2))


def test_settings_in_force_are_listed(file):
    """In rows, with their sources."""
    live = _live(file)
    file.write_text('[cache]\nbytes = "16KB"\nttl = "5m"\n[tenants.a]\nttl = "1s"\n')
    live.reload()
    rows = {key: (value, source) for key, value, source in live.loaded.rows()}
    assert rows["cache.bytes"] == ("4.0 KB", "default")
    assert rows["cache.ttl"] == ("5m", "file")
    assert rows["tenants.a.ttl"] == ("1 s", "file")


def test_secrets_are_never_shown(file):
    """Neither in rows, nor in errors about a value, nor in reported changes."""
    live = _live(file)
    file.write_text('[clients.app]\ntoken = "hunter2"\nuids = [4711]\n[clients.none]\ntoken = ""\n')
    found = live.reload()
    assert "hunter2" not in f"{found.applied}"
    rows = {key: value for key, value, _ in live.loaded.rows()}
    assert (rows["clients.app.token"], rows["clients.app.uids"]) == ("(hidden)", "(hidden)")
    assert rows["clients.none.token"] == ""
    values = live.loaded.values()
    assert (values["clients.app.token"], values["clients.app.uids"]) == ("(hidden)", "(hidden)")
    file.write_text('[clients.app]\nuids = "hunter2"\ntoken = 12345\n')
    with pytest.raises(ReloadRefusedError) as refused:
        live.reload()
    assert "hunter2" not in str(refused.value)
    assert "12345" not in str(refused.value)
    assert "clients.app.uids = (hidden) (file)" in str(refused.value)


def test_changes_compares_two_settings(file):
    """The pure function below it; keys of another model are ignored."""
    old = _load(file)
    new = load_settings(Example, None, "EX", {"limits.turns": 8, "cache.bytes": 8192}, {})
    with pytest.raises(InvalidSettingsError, match="some changes need a restart"):
        compare_settings(old, new, ("limits",))
    found = compare_settings(old, new, ())
    assert (found.live, found.applied) == (old, ())
    assert found.needs_restart == ("limits.turns", "limits.wait", "cache.bytes")


def test_fixed_settings_cannot_be_reloaded():
    """Who was given settings reloads nothing."""
    live = fixed_settings(Example())
    assert live.reload().applied == ()
    assert live.loaded.settings == Example()
