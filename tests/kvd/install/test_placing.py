"""Files are placed completely, settings are kept, links replace links only."""

import pytest

from kvd.errors import InstallError
from kvd.install.placing import NEW, place, remove
from kvd.install.units import PlannedFile, PlannedLink


@pytest.fixture
def files(tmp_path):
    """Return a unit, settings and a link to a program, below another owner's directory."""
    root = tmp_path / "root"
    root.mkdir()
    return [
        PlannedFile(root / "lib/units/kvd.service", "unit 1\n", root),
        PlannedFile(root / "etc/kvd.toml", "shipped 1\n", root, is_settings=True),
        PlannedLink(root / "bin/kvd", tmp_path / "venv/bin/kvd", root),
    ]


def deeds(found):
    return [deed for _, deed in found]


def newer(file):
    return PlannedFile(file.path, file.text.replace("1", "2"), file.top, file.is_settings)


def test_new_files_are_written_and_existing_ones_kept(files):
    """A second run has nothing to do."""
    assert deeds(place(files, dry_run=False)) == ["written", "written", "linked"]
    unit, settings, link = files
    assert (unit.path.read_text(), settings.path.read_text()) == (unit.text, settings.text)
    assert link.path.readlink() == link.target
    assert [path.name for path in unit.path.parent.iterdir()] == ["kvd.service"], "nothing beside"
    assert deeds(place(files, dry_run=False)) == ["unchanged"] * 3


def test_a_dry_run_reports_the_same_and_changes_nothing(files):
    """Neither files nor directories are created or removed."""
    root = files[0].top
    assert deeds(place(files, dry_run=True)) == ["written", "written", "linked"]
    assert list(root.iterdir()) == []
    list(place(files, dry_run=False))
    assert deeds(remove(files, dry_run=True)) == ["removed"] * 3
    assert deeds(place(files, dry_run=False)) == ["unchanged"] * 3


def test_settings_are_not_overwritten(files):
    """The new ones are placed beside them; a unit is replaced."""
    list(place(files, dry_run=False))
    unit, settings, _ = files
    settings.path.write_text("mine\n")
    assert deeds(place([newer(unit), newer(settings)], dry_run=False)) == ["replaced", "beside"]
    assert unit.path.read_text() == "unit 2\n"
    assert settings.path.read_text() == "mine\n"
    assert settings.path.with_name(settings.path.name + NEW).read_text() == "shipped 2\n"


def test_only_placed_files_are_removed(files):
    """Changed settings stay, a unit does not; empty directories go, up to a shared one."""
    list(place(files, dry_run=False))
    unit, settings, _ = files
    unit.path.write_text("changed\n")
    settings.path.write_text("mine\n")
    assert deeds(remove(files, dry_run=False)) == ["removed", "kept", "removed"]
    assert [path.name for path in unit.top.iterdir()] == ["etc"]
    assert settings.path.read_text() == "mine\n"
    assert deeds(remove(files, dry_run=False)) == ["kept"], "what is not there is not mentioned"


def test_another_program_is_not_replaced(files):
    """A link replaces a link only, and is removed only if its target is ours."""
    link = files[2]
    link.path.parent.mkdir()
    link.path.write_text("#!/bin/sh\n")
    assert deeds(place([link], dry_run=False)) == ["foreign"]
    assert list(remove([link], dry_run=False)) == []
    assert link.path.read_text() == "#!/bin/sh\n"
    link.path.unlink()
    link.path.symlink_to("/opt/old/kvd")
    assert list(remove([link], dry_run=False)) == []
    assert deeds(place([link], dry_run=False)) == ["replaced"]
    assert link.path.readlink() == link.target


def test_an_unwritable_place_is_one_error_with_its_remedy(files):
    """A file is in the place of a directory."""
    unit = files[0]
    (unit.top / "lib").write_text("in the way")
    with pytest.raises(InstallError, match=r"cannot (read|write)") as caught:
        list(place([unit], dry_run=False))
    assert "run it again" in caught.value.remedy
