"""Checks of kvd's unit, encryption key and certificates.

They run systemctl to read the unit's properties, and change nothing.
"""

import datetime as dt
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cryptography import x509

from kvd.config import Settings
from kvd.doctor.finding import Finding, ok, problem, warning
from kvd.doctor.machine import ProcessLimits
from kvd.tiers.arena import dram_bytes
from shared.access.credentials import CREDENTIALS, TlsFiles, file_of
from shared.encryption.key_file import read_key
from shared.types.errors import ReportedError
from shared.types.units import GIB, format_bytes

UNIT = "kvd.service"
BOOTED = Path("/run/systemd/system")
SPARE_BYTES = GIB  # memory of kvd itself, beside the arenas
FDS_OF_LAYOUT = 2  # in systemd's fd store: slots and journal
_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "Result",
    "NeedDaemonReload",
    "FileDescriptorStoreMax",
    "MemoryHigh",
    "MemoryMax",
    "MemorySwapMax",
    "LimitNOFILESoft",
)
_ASK_S = 10.0


def unit_properties(*, user: bool = False) -> Mapping[str, str]:
    """Return systemd's properties of kvd's unit; empty: no systemd, or no such unit."""
    systemctl = shutil.which("systemctl")
    if systemctl is None or not BOOTED.exists():
        return {}
    command = [systemctl, *(["--user"] if user else []), "show", UNIT, "-p", ",".join(_PROPERTIES)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = (line.partition("=") for line in answer.stdout.splitlines())
    found = {name: value for name, _, value in lines}
    return found if found.get("LoadState") == "loaded" else {}


def limits_of_service(unit: Mapping[str, str], own: ProcessLimits) -> ProcessLimits:
    """Return the limits of kvd's process: the unit's limit of open files, or else the shell's.

    Args:
        unit: the result of `unit_properties`.
        own: the limits of this process.
    """
    limit = unit.get("LimitNOFILESoft", "")
    if not limit:
        return own
    return replace(own, open_files=int(limit) if limit.isdigit() else None)


def check_unit(unit: Mapping[str, str], settings: Settings) -> Iterator[Finding]:
    """Check that the unit runs, and that its limits suit the settings."""
    if not unit:
        yield ok("unit", f"{UNIT} is not installed (see: kvd install-units)")
        return
    wanted = settings.dram.total_bytes or dram_bytes(settings.dram.bytes)
    findings = [
        *_state(unit),
        *_descriptor_store(unit, settings),
        *_memory_limit(unit, "MemoryMax", wanted, "is killed"),
        *_memory_limit(unit, "MemoryHigh", wanted, "is slowed down"),
    ]
    yield from findings or [ok("unit", f"{UNIT} is {unit.get('ActiveState')}")]


def _state(unit: Mapping[str, str]) -> Iterator[Finding]:
    if unit.get("ActiveState") == "failed":
        yield problem(
            "unit",
            f"{UNIT} has failed ({unit.get('Result')})",
            f"read journalctl -u {UNIT} -n 50, correct what it reports, then run: systemctl "
            f"restart {UNIT}",
        )
    if unit.get("NeedDaemonReload") == "yes":
        yield warning(
            "unit",
            f"{UNIT} has changed on disk, but systemd has not read it again",
            f"run: systemctl daemon-reload && systemctl restart {UNIT}",
        )


def _descriptor_store(unit: Mapping[str, str], settings: Settings) -> Iterator[Finding]:
    if settings.dram.keep not in ("auto", "fdstore"):
        return
    size = int(unit.get("FileDescriptorStoreMax", "0") or 0)
    wanted = FDS_OF_LAYOUT * settings.limits.max_layouts
    if size < wanted:
        yield problem(
            "unit",
            f"systemd keeps {size} file descriptors for kvd, but "
            f"{settings.limits.max_layouts} layouts need {wanted}: a restart would lose the "
            "KV in DRAM",
            f"run systemctl edit {UNIT} and add [Service] FileDescriptorStoreMax={wanted}, or "
            "lower limits.max_layouts",
        )


def _memory_limit(unit: Mapping[str, str], name: str, wanted: int, what: str) -> Iterator[Finding]:
    text = unit.get(name, "infinity")
    if text.isdigit() and int(text) < wanted + SPARE_BYTES:
        yield problem(
            "unit",
            f"{name} is {format_bytes(int(text))}, but the DRAM tier may grow to "
            f"{format_bytes(wanted)}: beyond the limit kvd {what}",
            f"run systemctl edit {UNIT} and add [Service] {name}={(wanted >> 20) + 2048}M, or "
            "lower dram.bytes",
        )


# Directories in which LoadCredential= looks for a credential that is given by name.
CREDENTIAL_STORES = (
    Path("/etc/credstore"),
    Path("/etc/credstore.encrypted"),
    Path("/run/credstore"),
    Path("/run/credstore.encrypted"),
)
SOON = dt.timedelta(days=14)


def check_encryption(
    settings: Settings, stores: Sequence[Path] = CREDENTIAL_STORES
) -> Iterator[Finding]:
    """Check that the key of the SSD tier can be read, and only by its owner."""
    key_file = settings.encryption.key_file
    if not key_file:
        yield ok("encryption", "the SSD tier is not encrypted (encryption.key_file is not set)")
        return
    if _is_credential("/" not in key_file):
        yield _credential(
            "encryption", key_file, f"run: kvd key new {stores[0] / key_file}", stores
        )
        return
    if _is_hidden(Path(key_file)):
        yield _unreadable("encryption", key_file)
        return
    try:
        key = read_key(key_file)
    except ReportedError as error:
        yield problem("encryption", f"{error.message}, so kvd does not start", error.remedy)
        return
    yield ok("encryption", f"the SSD tier's key is {key.fingerprint[:12]}, from {key_file}")


def check_certificates(
    settings: Settings, now: dt.datetime, stores: Sequence[Path] = CREDENTIAL_STORES
) -> Iterator[Finding]:
    """Check that certificate and key match, and when the certificate expires."""
    tls = settings.tls
    if tls.certificate is None:
        if settings.access.tcp:
            ports = ", ".join(settings.access.tcp)
            yield ok("certificates", f"access.tcp {ports} has no TLS (loopback only)")
        return
    if _is_credential(len(tls.certificate.parts) == 1):
        place = f"put the PEM file at {stores[0] / tls.certificate}"
        yield _credential("certificates", str(tls.certificate), place, stores)
        return
    if tls.key is not None and _is_hidden(file_of(tls.key)):
        yield _unreadable("certificates", str(tls.key))
        return
    try:
        TlsFiles(tls).context()
        text = file_of(tls.certificate).read_bytes()
        certificate = x509.load_pem_x509_certificate(text)
    except ReportedError as error:
        yield problem("certificates", f"{error.message}, so kvd does not start", error.remedy)
        return
    except (OSError, ValueError) as error:
        yield problem(
            "certificates", f"{tls.certificate} cannot be used: {error}", "renew the certificate"
        )
        return
    until = certificate.not_valid_after_utc
    what = f"{tls.certificate} is valid until {until:%Y-%m-%d}"
    renew = "renew the certificate; kvd uses the new file without a restart"
    if until < now:
        yield problem("certificates", f"{tls.certificate} expired on {until:%Y-%m-%d}", renew)
    elif until < now + SOON:
        yield warning("certificates", what, renew)
    else:
        yield ok("certificates", what)


def _is_hidden(path: Path) -> bool:
    """Return whether a file may exist but is not readable for this user."""
    if os.access(path, os.R_OK, effective_ids=True):
        return False
    is_there = os.access(path, os.F_OK, effective_ids=True)
    may_look = os.access(path.parent, os.X_OK, effective_ids=True)
    return is_there or (not may_look and os.access(path.parent, os.F_OK, effective_ids=True))


def _unreadable(check: str, name: str) -> Finding:
    return warning(
        check,
        f"this user may not read {name}",
        "run this as kvd's user, or as root: sudo kvd doctor",
    )


def _is_credential(is_name: bool) -> bool:
    """Return whether systemd passes this credential to kvd but not to this process."""
    return is_name and CREDENTIALS not in os.environ


def _credential(check: str, name: str, remedy: str, stores: Sequence[Path]) -> Finding:
    if any(os.access(store / name, os.F_OK, effective_ids=True) for store in stores):
        return ok(check, f"systemd passes the credential {name} to kvd")
    if all(os.access(store, os.X_OK) or not os.access(store, os.F_OK) for store in stores):
        return problem(
            check, f"systemd does not find the credential {name}, so kvd does not start", remedy
        )
    return ok(
        check, f"kvd gets the credential {name} from systemd; only root can see whether it exists"
    )
