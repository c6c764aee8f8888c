"""systemd: does kvd's unit give it what the settings need? Asks systemctl; changes nothing."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvd.config import Settings
from kvd.doctor.finding import Finding, ok, problem, warning
from kvd.tiers.arena import dram_bytes
from shared.types.units import GIB, format_bytes

UNIT = "kvd.service"
BOOTED = Path("/run/systemd/system")
SPARE_BYTES = GIB  # of kvd itself, beside the arenas
FDS_OF_LAYOUT = 2  # slots and journal
_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "Result",
    "NeedDaemonReload",
    "FileDescriptorStoreMax",
    "MemoryHigh",
    "MemoryMax",
    "MemorySwapMax",
)
_ASK_S = 10.0


def unit_properties(*, user: bool = False) -> Mapping[str, str]:
    """What systemd knows of kvd's unit; empty if there is no systemd, or no such unit."""
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


def check_unit(unit: Mapping[str, str], settings: Settings) -> Iterator[Finding]:
    """Compare the unit with the settings."""
    if not unit:
        yield ok("unit", f"{UNIT} is not installed (see: kvd install-units)")
        return
    wanted = settings.dram.total_bytes or dram_bytes(settings.dram.bytes)
    findings = [
        *_state(unit),
        *_descriptor_store(unit, settings),
        *_bound(unit, "MemoryMax", wanted, "is killed"),
        *_bound(unit, "MemoryHigh", wanted, "is slowed down"),
    ]
    yield from findings or [ok("unit", f"{UNIT} is {unit.get('ActiveState')}")]


def _state(unit: Mapping[str, str]) -> Iterator[Finding]:
    if unit.get("ActiveState") == "failed":
        yield problem(
            "unit",
            f"{UNIT} has failed ({unit.get('Result')})",
            f"journalctl -u {UNIT} -n 50, mend what it says, then: systemctl restart {UNIT}",
        )
    if unit.get("NeedDaemonReload") == "yes":
        yield warning(
            "unit",
            f"{UNIT} has changed on disk, systemd has not read it again",
            f"systemctl daemon-reload && systemctl restart {UNIT}",
        )


def _descriptor_store(unit: Mapping[str, str], settings: Settings) -> Iterator[Finding]:
    if settings.dram.keep not in ("auto", "fdstore"):
        return
    size = int(unit.get("FileDescriptorStoreMax", "0") or 0)
    wanted = FDS_OF_LAYOUT * settings.limits.max_layouts
    if size < wanted:
        yield problem(
            "unit",
            f"systemd keeps {size} descriptors, {settings.limits.max_layouts} layouts have "
            f"{wanted}: a restart loses DRAM",
            f"systemctl edit {UNIT}: [Service] FileDescriptorStoreMax={wanted}, or lower "
            "limits.max_layouts",
        )


def _bound(unit: Mapping[str, str], name: str, wanted: int, what: str) -> Iterator[Finding]:
    text = unit.get(name, "infinity")
    if text.isdigit() and int(text) < wanted + SPARE_BYTES:
        yield problem(
            "unit",
            f"{name} is {format_bytes(int(text))}, the DRAM tier is to have "
            f"{format_bytes(wanted)}: beyond it kvd {what}",
            f"systemctl edit {UNIT}: [Service] {name}={(wanted >> 20) + 2048}M, or lower "
            "dram.bytes",
        )
