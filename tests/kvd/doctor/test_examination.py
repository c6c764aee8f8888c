"""The doctor's examination: all that can be checked is, and each obstacle is reported once."""

import os

import pytest

from kvd.doctor.examination import examine
from kvd.doctor.finding import Level
from kvd.doctor.machine import Machine, ProcessLimits

LIMITS = ProcessLimits(locked_bytes=None, open_files=1 << 20, is_root=False)


@pytest.fixture
def flags(short_dir, tmp_path):
    return {"runtime_dir": short_dir, "state_dir": tmp_path / "state"}


def find_all(config_file, flags):
    return list(examine(config_file, flags, Machine(), LIMITS))


def about(findings, check):
    return [finding for finding in findings if finding.check == check]


def test_unusable_settings_end_the_examination(flags, tmp_path):
    """kvd does not start with them: everything else would be a guess."""
    file = tmp_path / "kvd.toml"
    file.write_text("[dram]\nbytes = -1\n")
    findings = find_all(file, flags)
    assert findings[-1].check == "settings"
    assert findings[-1].level is Level.PROBLEM
    assert "dram.bytes" in findings[-1].what
    assert not about(findings, "kvd")


def test_without_a_kvd_the_machine_is_checked(flags, tmp_path):
    """That it does not run is a warning: perhaps it is not meant to."""
    file = tmp_path / "kvd.toml"
    file.write_text('[dram]\nbytes = "64MB"\n[ssd]\nbytes = "64MB"\n')
    findings = find_all(file, flags)
    (settings,) = about(findings, "settings")
    assert (settings.level, str(file) in settings.what) == (Level.OK, True)
    (running,) = about(findings, "kvd")
    assert running.level is Level.WARNING
    assert str(flags["runtime_dir"]) in running.what
    assert findings.index(settings) < findings.index(running)
    assert len(findings) > 8
    assert all(finding.remedy for finding in findings if finding.level is not Level.OK)


def test_nothing_is_changed(flags, tmp_path):
    """Not even a directory is made."""
    find_all(None, flags)
    assert not flags["state_dir"].exists()
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_settings_are_reported(flags, tmp_path):
    """The defaults are checked instead."""
    file = tmp_path / "kvd.toml"
    file.write_text("[dram]\nbytes = -1\n")
    file.chmod(0)
    (finding,) = about(find_all(file, flags), "settings")
    assert finding.level is Level.WARNING
