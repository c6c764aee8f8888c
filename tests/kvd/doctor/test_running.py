"""The doctor's checks of a running kvd's answers. Real processes: test_kvd_doctor.py."""

import datetime as dt
from collections.abc import Iterable

from kvd.config import EncryptionSettings, Settings
from kvd.doctor.finding import Finding, Level, worst
from kvd.doctor.guards import check_certificates, check_encryption
from kvd.doctor.running import check_answer, check_tiers
from shared.access.settings import TlsSettings
from shared.encryption.key_file import new_key, write_key
from shared.pb.kvd.v1 import kvd_pb2
from shared.version import __version__

NOW = dt.datetime(2031, 5, 1, tzinfo=dt.UTC)


def _lines(findings: Iterable[Finding]) -> list[tuple[Level, str]]:
    return [(f.level, f"{f.what}: {f.remedy}") for f in findings if f.level is not Level.OK]


def _answer(**fields: object) -> kvd_pb2.GetStatsResponse:
    return kvd_pb2.GetStatsResponse(**({"version": __version__} | fields))


def test_releases_that_differ():
    """The older process has to be restarted; one without a release is not reported."""
    engines = [
        kvd_pb2.EngineInfo(name="old", pid=7, version="0.0.9"),
        kvd_pb2.EngineInfo(name="same", version=__version__),
        kvd_pb2.EngineInfo(name="silent"),
    ]
    ((level, line),) = _lines(check_answer(_answer(engines=engines)))
    assert level is Level.WARNING
    assert all(word in line for word in ("old", "pid 7", "0.0.9", "restart"))
    ((level, line),) = _lines(check_answer(_answer(version="0.0.9")))
    assert "systemctl restart kvd" in line


def test_a_tier_that_refuses_writes():
    """Full, or failing: each has its own remedy, and is a problem."""
    for reason, word in (("full", "df -h"), ("transient", "smartctl")):
        tier = kvd_pb2.TierStats(degraded=True, degraded_reason=reason)
        answer = _answer(layouts=[kvd_pb2.LayoutStats(layout="ab" * 16, tiers=[tier])])
        ((level, line),) = _lines(check_tiers(answer, {}))
        assert level is Level.PROBLEM
        assert word in line


def test_damage_and_hanging_processes():
    """Counters that should be zero, and quarantined slots, name the command to use."""
    counters = {"blocks_corrupt": 2, "read_errors": 1}
    layout = kvd_pb2.LayoutStats(counters=counters, quarantined_slots=3, block_bytes=1024)
    lines = [line for _, line in _lines(check_tiers(_answer(layouts=[layout]), {}))]
    assert any("kvd verify --repair" in line for line in lines)
    assert any("dmesg" in line for line in lines)
    assert any("kvd leases" in line and "3.0 KB" in line for line in lines)


def test_dram_that_no_restart_finds():
    """If nothing keeps the arena it is reported, unless the settings ask for just that."""
    arena = kvd_pb2.ArenaStats(arena_id="x", keep="none")
    answer = _answer(layouts=[kvd_pb2.LayoutStats(arena=arena)])
    auto = {"dram.keep": kvd_pb2.Setting(key="dram.keep", value="auto")}
    none = {"dram.keep": kvd_pb2.Setting(key="dram.keep", value="none")}
    ((_, line),) = _lines(check_tiers(answer, auto))
    assert "its DRAM tier is empty" in line
    assert not _lines(check_tiers(answer, none))


def test_an_unusable_key(tmp_path):
    """Missing, then open to others, then as advised."""
    path = tmp_path / "key"
    settings = Settings(encryption=EncryptionSettings(key_file=str(path)))
    ((level, line),) = _lines(check_encryption(settings))
    assert level is Level.PROBLEM
    assert f"kvd key new {path}" in line
    write_key(path, new_key())
    path.chmod(0o644)
    ((_, line),) = _lines(check_encryption(settings))
    assert f"chmod 600 {path}" in line
    path.chmod(0o600)
    assert worst(check_encryption(settings)) is Level.OK
    assert path.read_text().strip() not in "".join(f.what for f in check_encryption(settings))


def test_credentials_of_systemd(tmp_path, monkeypatch):
    """A bare name is looked up where systemd does, before kvd's start fails because of it."""
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    stores = (tmp_path / "credstore", tmp_path / "encrypted")
    settings = Settings(
        encryption=EncryptionSettings(key_file="kvd-key"),
        tls=TlsSettings(certificate="kvd-tls-certificate", key="kvd-tls-key"),
    )
    ((level, line),) = _lines(check_encryption(settings, stores))
    assert level is Level.PROBLEM
    assert f"kvd key new {stores[0]}/kvd-key" in line
    ((_, line),) = _lines(check_certificates(settings, NOW, stores))
    assert f"{stores[0]}/kvd-tls-certificate" in line
    for store, name in ((stores[0], "kvd-key"), (stores[1], "kvd-tls-certificate")):
        store.mkdir()
        (store / name).touch()
    assert not _lines(check_encryption(settings, stores))
    assert not _lines(check_certificates(settings, NOW, stores))


def test_expiring_certificates(tmp_path):
    """From two weeks before a warning, afterwards a problem.

    So is a file that is no certificate.
    """
    import trustme

    until = NOW + dt.timedelta(days=30)
    made = trustme.CA().issue_cert("kvd.example", not_after=until)
    certificate, key = tmp_path / "kvd.pem", tmp_path / "kvd.key"
    made.cert_chain_pems[0].write_to_path(certificate)
    made.private_key_pem.write_to_path(key)
    settings = Settings(tls=TlsSettings(certificate=certificate, key=key))
    assert worst(check_certificates(settings, NOW)) is Level.OK
    for days, expected in ((20, Level.WARNING), (31, Level.PROBLEM)):
        now = NOW + dt.timedelta(days=days)
        ((level, line),) = _lines(check_certificates(settings, now))
        assert level is expected
        assert "renew the certificate" in line
    key.write_text("no key")
    ((level, line),) = _lines(check_certificates(settings, NOW))
    assert level is Level.PROBLEM
    assert str(certificate) in line
