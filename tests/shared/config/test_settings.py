"""Settings: precedence, sources, and all problems in one error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BeforeValidator, Field

from shared.config.settings import InvalidSettingsError, Overridden, load_settings
from shared.types.setting_types import (
    ByteSize,
    ByteSizeOrAuto,
    Duration,
    DurationOrNever,
    Section,
    TenantName,
    TenantWeights,
    to_list,
)
from tests.kvd_as_user import without_root

IntList = Annotated[tuple[int, ...], BeforeValidator(to_list)]


class Dram(Section):
    bytes: ByteSizeOrAuto = None
    slot: ByteSize = 4096
    num_pools: int = Field(default=2, ge=1)


class Sessions(Section):
    ttl: DurationOrNever = 60.0
    wait: Duration = 5.0
    uids: IntList = ()
    weights: TenantWeights = Field(default_factory=dict)


class Tenant(Section):
    ttl: DurationOrNever = None
    size: ByteSize = 0


class Example(Section):
    name: str = "kvd"
    dram: Dram = Dram()
    sessions: Sessions = Sessions()
    tenants: Mapping[TenantName, Tenant] = Field(default_factory=dict)


def _load(path, text="", flags=None, environ=None):
    file = path / "settings.toml"
    file.write_text(text)
    return load_settings(Example, file, "EX", flags or {}, environ or {})


def _problems(path, text="", flags=None, environ=None):
    with pytest.raises(InvalidSettingsError) as error:
        _load(path, text, flags, environ)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    """Each source overrides the weaker ones, key by key, and the winner is recorded."""
    loaded = _load(
        tmp_path,
        '[dram]\nbytes = "1GB"\nslot = "1KB"\nnum_pools = 3\n',
        {"dram.num_pools": 5, "dram.slot": None},
        {"EX_DRAM__SLOT": "2KB", "EX_DRAM__NUM_POOLS": "4"},
    )
    assert loaded.settings.dram == Dram(bytes=1 << 30, slot=2048, num_pools=5)
    assert loaded.provenance == {
        "name": "default",
        "dram.bytes": "file",
        "dram.slot": "env",
        "dram.num_pools": "flag",
        "sessions.ttl": "default",
        "sessions.wait": "default",
        "sessions.uids": "default",
        "sessions.weights": "default",
    }


def test_units_and_words_are_parsed(tmp_path):
    """Sizes, durations, lists and the words auto and never are understood from text."""
    text = '[dram]\nbytes = "auto"\n[sessions]\nttl = "never"\nwait = "250ms"\n'
    settings = _load(tmp_path, text, environ={"EX_SESSIONS__UIDS": "1, 20"}).settings
    assert settings.dram.bytes is None
    assert settings.sessions == Sessions(ttl=None, wait=0.25, uids=(1, 20))


def test_rows_have_readable_values(tmp_path):
    """Every key with its value in readable units and its source."""
    rows = {key: value for key, value, _ in _load(tmp_path, '[dram]\nslot = "1MB"').rows()}
    assert rows["dram.slot"] == "1.0 MB"
    assert rows["dram.bytes"] == "auto"
    assert rows["sessions.uids"] == "(none)"


def test_values_have_types(tmp_path):
    """Numbers in bytes or seconds, or a word in place of one; lists and maps stay such."""
    text = '[dram]\nslot = "1MB"\n[sessions]\nttl = "2h"\nuids = [1, 20]\nweights = { a = 2 }\n'
    loaded = _load(tmp_path, text)
    values = loaded.values()
    assert values["dram.slot"] == 1 << 20
    assert (values["dram.bytes"], values["sessions.ttl"]) == ("auto", 7200.0)
    assert (values["sessions.uids"], values["sessions.weights"]) == ([1, 20], {"a": 2.0})
    assert list(values) == [key for key, _, _ in loaded.rows()]


def test_every_problem_is_reported_at_once(tmp_path):
    """Unknown keys with the nearest known one, bad values with what is accepted."""
    line = _problems(
        tmp_path,
        'sesions_ = 1\n[dram]\nbyts = 1\nnum_pools = 0\ncolour = 1\n[sesions]\nttl = "1h"\n',
        {"sessions.wait": "soon"},
        {"EX_SESSIONS__UIDS": "me", "EX_DRAM_SLOT": "1", "EX_TENANTS": "acme"},
    )
    for part in (
        "sesions_ (file): there is no such setting, did you mean sessions?",
        "dram.byts (file): there is no such setting, did you mean dram.bytes?",
        "dram.colour (file): there is no such setting, section dram has bytes, slot, ",
        "sesions.ttl (file): there is no such setting, did you mean sessions.ttl?",
        "dram.num_pools = '0' (file): Input should be greater than or equal to 1",
        "sessions.wait = 'soon' (flag): 'soon' is not a duration: write a number with",
        "sessions.uids = 'me' (env)",
        "EX_DRAM_SLOT (env): this variable does not set anything, write EX_DRAM__SLOT",
        "tenants (env): this is a section: set one of its keys, such as tenants.NAME.",
    ):
        assert part in line


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 9999 + "]" * 9999, "a = " + "9" * 5000, "a =", "\0"],
    ids=["nested", "endless-number", "cut", "nul"],
)
def test_what_is_no_toml_is_named(tmp_path, text):
    """Whatever the parser makes of it: a reload must not end the process."""
    assert "settings.toml is not valid TOML" in _problems(tmp_path, text)


def test_a_section_is_not_a_value(tmp_path):
    """A scalar where a section belongs is explained."""
    assert "this is a section" in _problems(tmp_path, "dram = 5\n")


def test_tables_by_name_are_read(tmp_path):
    """Any valid name, dots included; sources are by key as usual."""
    loaded = _load(
        tmp_path,
        '[tenants.acme]\nttl = "1h"\nsize = "1KB"\n[tenants."a.b"]\nsize = 5\n',
        environ={"EX_TENANTS__ACME__SIZE": "2KB", "EX_TENANTS__OTHER__TTL": "never"},
    )
    assert loaded.settings.tenants == {
        "acme": Tenant(ttl=3600.0, size=2048),
        "a.b": Tenant(size=5),
        "other": Tenant(),
    }
    assert ("tenants.a.b.size", "5 B", "file") in loaded.rows()
    assert ("tenants.acme.size", "2.0 KB", "env") in loaded.rows()


def test_a_file_without_permission_has_its_own_remedy(tmp_path):
    """Another path would not help, as with a missing file."""
    file = tmp_path / "settings.toml"
    with pytest.raises(InvalidSettingsError, match="name an existing file with --config"):
        load_settings(Example, file, "EX", {}, {})
    file.touch(mode=0)
    with without_root(tmp_path), pytest.raises(InvalidSettingsError, match="use sudo, or let"):
        load_settings(Example, file, "EX", {}, {})


def test_problems_in_tables_by_name_are_reported(tmp_path):
    """Unknown keys, bad values, bad names and misplaced values are named with their table."""
    text = (
        "[tenants.acme]\nttll = 1\nttl = 'soon'\n"
        "[tenants.x]\ncolour = 1\n[tenants.' no']\nsize = 1\n"
    )
    line = _problems(tmp_path, text)
    for part in (
        "tenants.acme.ttll (file): there is no such setting, did you mean tenants.acme.ttl?",
        "tenants.acme.ttl = 'soon' (file): 'soon' is not a duration",
        "tenants.x.colour (file): there is no such setting, section tenants has x.",
        "tenants. no: the tenant ' no' is not valid: use 1 to 128 letters",
    ):
        assert part in line
    assert "such as tenants.NAME.ttl" in _problems(tmp_path, "tenants = 5\n")
    assert "such as tenants.acme.ttl" in _problems(tmp_path, "[tenants]\nacme = 5\n")


@pytest.mark.parametrize(
    ("text", "environ", "source"),
    [
        ("[sessions]\nweights = { acme = 2, 'a.b' = 0.5 }\n", {}, "file"),
        ("[sessions.weights]\nacme = 2\n'a.b' = 0.5\n", {}, "file"),
        ("[sessions.weights]\nx = 1\n", {"EX_SESSIONS__WEIGHTS": "acme=2, a.b = 0.5"}, "env"),
    ],
)
def test_a_map_of_plain_values_is_one_setting(tmp_path, text, environ, source):
    """In the file a table, in the environment a list of pairs; the stronger source has it all."""
    loaded = _load(tmp_path, text, environ=environ)
    assert loaded.settings.sessions.weights == {"acme": 2.0, "a.b": 0.5}
    assert ("sessions.weights", "acme=2.0, a.b=0.5", source) in loaded.rows()


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ("acme", "write shares as name=2"),
        ("acme=0", "greater than 0"),
        ("acme=nan", "less than or equal to 1000"),
        ("acme=much", "valid number"),
        ("a b=1", "is not valid"),
    ],
)
def test_problems_in_a_map_of_plain_values_are_reported(tmp_path, weights, problem):
    """Each is named with its setting."""
    line = _problems(tmp_path, environ={"EX_SESSIONS__WEIGHTS": weights})
    assert f"sessions.weights = '{weights}' (env)" in line
    assert problem in line


def test_foreign_environment_variables_are_ignored(tmp_path):
    """Those that only share the prefix."""
    assert _load(tmp_path, environ={"EX_SERVICE_HOST": "10.0.0.1"}).settings == Example()


@pytest.mark.parametrize(
    ("variable", "right"),
    [
        ("EX_NAM", "EX_NAME"),
        ("EX_DRAM_SLT", "EX_DRAM__SLOT"),
        ("EX_SESSION_TTL", "EX_SESSIONS__TTL"),
        ("EX_TOKN_FILE", "EX_TOKEN_FILE"),
    ],
)
def test_a_mistyped_variable_is_a_problem(variable, right):
    """It would have no effect; the command's own variables are allowed."""
    others = ("EX_TOKEN_FILE",)
    with pytest.raises(InvalidSettingsError, match=rf"{variable} \(env\): .*{right}\?"):
        load_settings(Example, None, "EX", {}, {variable: "x"}, others)
    loaded = load_settings(Example, None, "EX", {}, {"EX_TOKEN_FILE": "x"}, others)
    assert loaded.settings == Example()


def test_values_overridden_by_the_command_line_are_known(tmp_path):
    """Each key of the file with both values; not equal ones, nor the environment's."""
    loaded = _load(
        tmp_path,
        'name = "a"\n[dram]\nbytes = "1GB"\nslot = "1KB"\n[sessions]\nuids = [1, 2]\n',
        {"name": "b", "dram.slot": "1KB", "sessions.uids": ("1", "2", "3")},
        {"EX_DRAM__BYTES": "2GB"},
    )
    assert loaded.overridden == (
        Overridden("name", "a", "b"),
        Overridden("sessions.uids", "1, 2", "1, 2, 3"),
    )
    assert not _load(tmp_path, 'name = "a"').overridden


def test_problems_are_listed_separately_too(tmp_path):
    """The error has one line for a log, and a list for a command."""
    with pytest.raises(InvalidSettingsError) as refused:
        _load(tmp_path, "[dram]\nbyts = 1\nnum_pools = 0\n")
    assert len(refused.value.problems) == 2
    assert all(problem in str(refused.value) for problem in refused.value.problems)
    with pytest.raises(InvalidSettingsError) as refused:
        _load(tmp_path, "[dram")
    assert refused.value.problems == (str(refused.value),)


def test_top_level_keys_are_set(tmp_path):
    """A key outside any section is set like the others."""
    assert _load(tmp_path, 'name = "a"').settings.name == "a"
    assert _load(tmp_path, environ={"EX_NAME": "b"}).settings.name == "b"


def test_an_unreadable_file_is_named(tmp_path):
    """A missing or malformed file is named."""
    with pytest.raises(InvalidSettingsError, match=r"no\.toml"):
        load_settings(Example, tmp_path / "no.toml", "EX", {}, {})
    assert "not valid TOML" in _problems(tmp_path, "[dram")


def test_settings_are_immutable():
    """Nobody changes a setting after the start."""
    with pytest.raises(ValueError, match="frozen"):
        Example().name = "other"


def test_without_a_file_the_defaults_apply():
    """Without a file the defaults hold."""
    assert load_settings(Example, None, "EX", {}, {}).settings == Example()


def test_typed_flags_are_used_unchanged():
    """A flag may already have its type."""
    assert load_settings(Example, None, "EX", {"name": str(Path("x"))}, {}).settings.name == "x"
