"""`kvd install-units`: which files it places where, and which it does not touch."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from inference_svc.config import load_inference_settings
from kvd import config
from kvd.cli.main import main
from kvd.install.units import (
    SHIPPED,
    SYSTEM_VALUES,
    UserDirectories,
    man_pages,
    read_shipped,
    system_files,
    user_files,
    with_values,
)
from shared.config.completion import Shell, completion_script
from shared.types.units import parse_duration_s

PROGRAMS = Path(sys.executable).parent
SERVICES = ("kvd.service", "kvd-remote.service", "inference-svc@.service")
SYSTEMD_ANALYZE = shutil.which("systemd-analyze")


@pytest.fixture(autouse=True)
def _outside_of_homes(monkeypatch):
    """Wherever these tests run, treat the program as one that system services can see."""
    monkeypatch.setattr("kvd.cli.install.HOMES", (Path("/home-of-nobody"),))


def install(*arguments: str) -> int:
    """Run the command; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["install-units", *arguments])
    return ended.value.code


def files_in(root: Path) -> dict[str, str]:
    """Return path below root → text."""
    return {
        str(path.relative_to(root)): path.read_text()
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def links_in(root: Path) -> dict[str, Path]:
    """Return path below root → link target."""
    return {
        str(path.relative_to(root)): path.readlink()
        for path in root.rglob("*")
        if path.is_symlink()
    }


def test_everything_is_where_systemd_looks(tmp_path):
    """Units, users, directories, preset and settings are placed below --root."""
    assert install("--root", str(tmp_path)) == 0
    local = "usr/local/lib"
    assert set(files_in(tmp_path)) == {
        f"{local}/systemd/system/kvd.service",
        f"{local}/systemd/system/kvd-remote.service",
        f"{local}/systemd/system/inference-svc@.service",
        f"{local}/systemd/system/cachedattention.slice",
        f"{local}/sysusers.d/cachedattention.conf",
        f"{local}/tmpfiles.d/cachedattention.conf",  # noqa: S108
        f"{local}/systemd/system-preset/80-cachedattention.preset",
        "etc/kvd/kvd.toml",
        "etc/kvd/inference-svc.toml",
        *(
            f"usr/local/share/{place}"
            for program in ("kvd", "inference-svc")
            for place in (
                f"bash-completion/completions/{program}",
                f"zsh/site-functions/_{program}",
                f"fish/vendor_completions.d/{program}.fish",
            )
        ),
    }
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.*") if path.is_file()} == {
        0o644
    }


def test_commands_man_pages_and_completion_are_found_by_name(tmp_path):
    """Links lead to this installation's programs and pages; shells get their own scripts."""
    install("--root", str(tmp_path))
    links = links_in(tmp_path)
    programs = {name: links.pop(f"usr/local/bin/{name}") for name in ("kvd", "inference-svc")}
    assert programs == {name: PROGRAMS / name for name in programs}
    assert links == {f"usr/local/share/man/man1/{page.name}": page for page in man_pages()}
    for page in ("kvd-ls.1", "inference-svc-chat.1"):
        assert f"usr/local/share/man/man1/{page}" in links
    assert all(page.is_file() for page in links.values())
    files = files_in(tmp_path)
    for program in ("kvd", "inference-svc"):
        for shell in Shell:
            script = completion_script(program, shell)
            (place,) = [path for path, text in files.items() if text == script]
            assert shell in place
            assert program in Path(place).name


def test_a_link_does_not_replace_another_program(tmp_path, capsys):
    """A plain file is kept, also by --remove; a link with another target is redirected."""
    programs = tmp_path / "usr/local/bin"
    programs.mkdir(parents=True)
    (programs / "kvd").write_text("#!/bin/sh\n")
    (programs / "inference-svc").symlink_to("/opt/before/bin/inference-svc")
    install("--root", str(tmp_path))
    assert "bin/kvd: kept: it is not a link of ours" in capsys.readouterr().out
    assert (programs / "kvd").read_text() == "#!/bin/sh\n"
    assert (programs / "inference-svc").readlink() == PROGRAMS / "inference-svc"
    install("--root", str(tmp_path), "--remove")
    assert [path.name for path in programs.iterdir()] == ["kvd"]


def test_a_link_to_another_installation_is_not_removed(tmp_path):
    """Only what this installation has placed is removed."""
    install("--root", str(tmp_path))
    link = tmp_path / "usr/local/bin/kvd"
    link.unlink()
    link.symlink_to("/opt/another/bin/kvd")
    install("--root", str(tmp_path), "--remove")
    assert links_in(tmp_path) == {"usr/local/bin/kvd": Path("/opt/another/bin/kvd")}


def test_units_run_the_installed_program(tmp_path):
    """Every Exec line of the units names a program of this installation, or of the system."""
    install("--root", str(tmp_path))
    for name in SERVICES:
        unit = (tmp_path / "usr/local/lib/systemd/system" / name).read_text()
        programs = {
            Path(line.partition("=")[2].split()[0])
            for line in unit.splitlines()
            if line.startswith("Exec")
        }
        assert all(program.exists() for program in programs), programs
        assert programs - {Path("/bin/kill")} <= {PROGRAMS / "kvd", PROGRAMS / "inference-svc"}


def test_installed_settings_are_the_reference_with_the_systems_users(tmp_path):
    """They load, and differ from the shipped ones in groups and users only."""
    install("--root", str(tmp_path))
    shipped = read_shipped()
    for name, values in SYSTEM_VALUES.items():
        installed = tomllib.loads((tmp_path / "etc/kvd" / name).read_text())
        expected = tomllib.loads(shipped[name])
        for key, value in values.items():
            section, _, leaf = key.partition(".")
            assert expected[section][leaf] != json.loads(value)
            expected[section][leaf] = json.loads(value)
        assert installed == expected
    # This machine need not have its users.
    config.load(tmp_path / "etc/kvd/kvd.toml", {"access.allowed_uids": ["root"]})
    load_inference_settings(tmp_path / "etc/kvd/inference-svc.toml", {})


TOOLS = [shutil.which(name) for name in ("systemd-sysusers", "systemd-tmpfiles")]


@pytest.mark.skipif(None in TOOLS or os.geteuid() != 0, reason="needs root and systemd's tools")
def test_only_the_services_can_read_settings(tmp_path):
    """Tokens' digests and TLS keys may lie in /etc/kvd: only root and both services may enter."""
    install("--root", str(tmp_path))
    for tool in TOOLS:
        more = ("--create",) if tool.endswith("tmpfiles") else ()
        done = subprocess.run(
            [tool, f"--root={tmp_path}", *more, "cachedattention.conf"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    status = (tmp_path / "etc/kvd").stat()
    assert (status.st_uid, status.st_mode & 0o777) == (0, 0o750)
    groups = [line.split(":") for line in (tmp_path / "etc/group").read_text().splitlines()]
    (config,) = [group for group in groups if int(group[2]) == status.st_gid]
    assert config[0] == "kvd-config"
    assert set(config[3].split(",")) == {"kvd", "inference"}
    for unit in ("kvd.service", "inference-svc@.service"):
        said = dict(_directives(read_shipped()[unit]))
        assert said["ConfigurationDirectoryMode"] == "0750"  # otherwise systemd would warn about it
        assert "kvd-config" in said["SupplementaryGroups"].split()


def test_every_named_user_and_group_is_created():
    """Units and settings name only users and groups of the shipped sysusers file."""
    shipped = read_shipped()
    lines = [line.split() for line in shipped["cachedattention-sysusers.conf"].splitlines()]
    made = {line[1] for line in lines if line and line[0] in ("u", "g")}
    named = {
        name
        for unit in SERVICES
        for line in shipped[unit].splitlines()
        if line.startswith(("User=", "Group=", "SupplementaryGroups="))
        for name in line.partition("=")[2].split()
    }
    for values in SYSTEM_VALUES.values():
        for value in values.values():
            named.update([json.loads(value)] if value.startswith('"') else json.loads(value))
    assert named <= made


def test_a_second_run_changes_nothing(tmp_path, capsys):
    """Existing files are kept, and reported as such."""
    install("--root", str(tmp_path))
    capsys.readouterr()
    before = files_in(tmp_path)
    install("--root", str(tmp_path), "--json")
    answer = json.loads(capsys.readouterr().out)
    assert {file["done"] for file in answer["files"]} == {"unchanged"}
    assert files_in(tmp_path) == before


def test_settings_of_the_operator_are_kept(tmp_path):
    """Changed settings stay, the shipped ones are placed beside them; units are replaced."""
    install("--root", str(tmp_path))
    settings = tmp_path / "etc/kvd/kvd.toml"
    shipped = settings.read_text()
    settings.write_text("[dram]\nbytes = '8GB'\n")
    unit = tmp_path / "usr/local/lib/systemd/system/kvd.service"
    unit.write_text("[Service]\n")
    install("--root", str(tmp_path))
    assert settings.read_text() == "[dram]\nbytes = '8GB'\n"
    assert settings.with_name("kvd.toml.new").read_text() == shipped
    assert "ExecStart=" in unit.read_text()


def test_remove_deletes_everything_but_changed_settings(tmp_path, capsys):
    """No file and no empty directory is left, except what the operator has written."""
    (tmp_path / "etc").mkdir()
    there = ("usr/local/bin", "usr/local/lib", "usr/local/share/man")
    for path in there:
        (tmp_path / path).mkdir(parents=True)
    install("--root", str(tmp_path))
    install("--root", str(tmp_path), "--remove")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        *("etc", "usr", "usr/local", *there[:2], "usr/local/share", there[2])
    ]
    install("--root", str(tmp_path))
    (tmp_path / "etc/kvd/kvd.toml").write_text("# mine\n")
    capsys.readouterr()
    install("--root", str(tmp_path), "--remove")
    assert files_in(tmp_path) == {"etc/kvd/kvd.toml": "# mine\n"}
    assert "kvd.toml: kept" in capsys.readouterr().out


@pytest.mark.parametrize("more", [(), ("--remove",)])
def test_dry_run_changes_nothing(tmp_path, capsys, more):
    """It reports what it would do."""
    install("--root", str(tmp_path))
    (tmp_path / "etc/kvd/kvd.toml").unlink()
    before = files_in(tmp_path)
    capsys.readouterr()
    install("--root", str(tmp_path), "--dry-run", *more)
    assert files_in(tmp_path) == before
    said = capsys.readouterr().out
    would = ("inference-svc.toml: would be removed", "kvd.toml: would be written")
    assert would[0 if more else 1] in said
    if not more:
        assert {line.partition(": ")[2] for line in said.splitlines()} == {
            *("would be written", "unchanged")
        }


def test_a_dry_run_lists_the_commands_that_it_would_run(tmp_path, monkeypatch, capsys):
    """One per line, with its purpose; so is each file, but pages and scripts are counted."""
    monkeypatch.setattr("kvd.cli.install._run", lambda _: pytest.fail("it was run"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CONFIG", "DATA", "STATE"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    install("--user", "--dry-run")
    *files, command = capsys.readouterr().out.splitlines()
    assert command.startswith("would be run: systemctl --user daemon-reload (")
    assert f"{tmp_path}/.local/bin/kvd: would be linked" in files
    pages = f"{tmp_path}/.local/share/man/man1 ({len(man_pages())} man pages)"
    assert [file for file in files if "/man1" in file] == [f"{pages}: would be linked"]
    assert not list(tmp_path.iterdir())
    install("--user", "--dry-run", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["commands"] == ["systemctl --user daemon-reload"]
    assert document["dry_run"]


def test_units_of_a_user_need_no_system_directories(tmp_path):
    """They name no system user either, and stop at the system's part."""
    own = UserDirectories(
        *(tmp_path / name for name in ("bin", "config", "data", "state")), Path("/run/user/1000")
    )
    files = {file.path: file.text for file in user_files(read_shipped(), PROGRAMS, own)}
    assert len(files) == 6
    for name in SERVICES:
        unit = files[own.data / "systemd/user" / name]
        said = [line for line in unit.splitlines() if line and not line.startswith("#")]
        assert not [line for line in said if "/etc/" in line or "/var/" in line]
        assert not [line for line in said if line.startswith(("User=", "ProtectSystem="))]
        assert said[-2:] == ["[Install]", "WantedBy=default.target"]
    settings = tomllib.loads(files[own.config / "kvd/kvd.toml"])
    assert settings["runtime_dir"] == "/run/user/1000/kvd"
    assert settings["state_dir"] == str(own.state / "kvd")
    assert settings["access"]["engine_group"] == ""
    assert f"--config {own.config}/kvd/kvd.toml" in files[own.data / "systemd/user/kvd.service"]
    mine = {path for path in files if path.is_relative_to(own.config)}
    # units there are the user's own edits, or masks
    assert {path.suffix for path in mine} == {".toml"}


def test_a_program_in_a_home_is_refused(tmp_path, monkeypatch, capsys):
    """System services do not see homes: the error says where to install instead."""
    monkeypatch.setattr("kvd.cli.install.HOMES", (PROGRAMS.parent,))
    assert install("--root", str(tmp_path)) == 78
    assert "/opt/cachedattention" in capsys.readouterr().err
    assert not files_in(tmp_path)


def test_user_and_root_exclude_each_other(tmp_path):
    """A user's manager reads that user's directories only."""
    assert install("--user", "--root", str(tmp_path)) == 2


def test_an_unwritable_place_is_one_line_with_its_remedy(tmp_path, capsys):
    """It names the file in the place of a directory, and nothing else was touched."""
    (tmp_path / "usr").write_text("")
    assert install("--root", str(tmp_path)) == 78
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "usr/local/lib/systemd/system/kvd.service" in said
    assert sorted(tmp_path.iterdir()) == [tmp_path / "usr"]


def test_set_values_touch_their_own_section_only():
    """A key of the same name elsewhere, and comments about it, stay."""
    text = '# level = 1\n[log]\nlevel = "info"\n\n[other]\nlevel = 2\n'
    assert with_values(text, {"other.level": "3"}) == text.replace("level = 2", "level = 3")
    assert with_values(text, {}) == text


def test_the_wheel_has_all_shipped_files():
    """pyproject.toml puts the whole of systemd/ where an installed kvd looks for it."""
    repository = Path(__file__).parents[3]
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included["systemd"] == "kvd/units"
    assert {path.name for path in (repository / "systemd").iterdir()} == set(SHIPPED)


def test_units_leave_time_and_room_for_the_default_settings():
    """No process is killed while draining, and the fd store holds two descriptors per layout."""
    shipped = read_shipped()
    kvd = config.Settings().limits
    service = load_inference_settings(None, {}).settings.server
    units = {name: dict(_directives(shipped[name])) for name in shipped if "service" in name}
    assert parse_duration_s(units["kvd.service"]["TimeoutStopSec"]) > kvd.drain
    remote_s = parse_duration_s(units["kvd-remote.service"]["TimeoutStopSec"])
    assert remote_s > config.Settings().remote.drain
    stop_s = parse_duration_s(units["inference-svc@.service"]["TimeoutStopSec"])
    assert stop_s > service.drain_s
    assert int(units["kvd.service"]["FileDescriptorStoreMax"]) >= 2 * kvd.max_layouts


def _directives(unit: str):
    for line in unit.splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            yield name, value


@pytest.mark.skipif(SYSTEMD_ANALYZE is None, reason="needs systemd-analyze")
def test_systemd_finds_no_fault_in_the_units(tmp_path):
    """`systemd-analyze verify` reports nothing, for the system's units and for a user's."""
    own = UserDirectories(
        *(tmp_path / name for name in ("bin", "config", "data", "state")), Path("/run/user/1000")
    )
    for files, mode in (
        (system_files(read_shipped(), PROGRAMS, tmp_path), "--system"),
        (user_files(read_shipped(), PROGRAMS, own), "--user"),
    ):
        units = []
        for file in files:
            file.path.parent.mkdir(parents=True, exist_ok=True)
            file.path.write_text(file.text)
            if file.path.suffix in (".service", ".slice"):
                units.append(file.path)
        # In the order of their names, systemd finds the slice before what is in it.
        done = subprocess.run(
            [SYSTEMD_ANALYZE, "verify", mode, "--man=no", *sorted(map(str, units))],
            capture_output=True,
            text=True,
            env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin"},
            check=False,
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
