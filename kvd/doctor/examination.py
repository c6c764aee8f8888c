"""All checks of `kvd doctor`, in the order in which an operator would fix their findings."""

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

from kvd import config
from kvd.client.connection import open_client
from kvd.config import Settings
from kvd.doctor.finding import Finding, ok, problem, warning
from kvd.doctor.guards import (
    check_certificates,
    check_encryption,
    check_unit,
    limits_of_service,
    unit_properties,
)
from kvd.doctor.machine import Machine, ProcessLimits, may_read
from kvd.doctor.memory import (
    check_cuda,
    check_huge_pages,
    check_kernel,
    check_locked_memory,
    check_memory,
    check_numa,
    check_shared_memory,
    check_swap,
)
from kvd.doctor.running import check_answer, check_settings_in_force, check_sockets, check_tiers
from kvd.doctor.storage import check_descriptors, check_directories, check_state_disk
from kvd.errors import NotRunningError
from shared.config.settings import LoadedSettings
from shared.types.errors import ReportedError


def examine(
    config_file: Path | None,
    flags: dict[str, object],
    machine: Machine,
    limits: ProcessLimits,
) -> Iterator[Finding]:
    """Run all checks; they change nothing.

    Args:
        config_file: kvd's settings file; None: defaults and environment.
        flags: flags of kvd serve: runtime_dir, state_dir.
        machine: where the machine's files are.
        limits: the limits of this process.
    """
    yield from check_kernel()
    yield from check_cuda(machine)
    hidden = config_file if config_file is not None and not may_read(config_file) else None
    if hidden is not None:
        yield warning(
            "settings",
            f"this user may not read {hidden}, so the default settings are examined instead",
            "run this as kvd's user, or as root: sudo kvd doctor",
        )
        config_file = None
    try:
        loaded = config.load(config_file, flags)
    except ReportedError as error:
        yield problem(
            "settings", error.message, "correct the settings: kvd does not start with them"
        )
        return
    if hidden is None:
        yield ok("settings", f"{config_file or 'defaults and environment'}: the settings are valid")
    yield from _examine_machine(loaded.settings, machine, limits)
    yield from _examine_running(loaded, compares=hidden is None)


def _examine_machine(
    settings: Settings, machine: Machine, limits: ProcessLimits
) -> Iterator[Finding]:
    unit = unit_properties() or unit_properties(user=True)
    yield from check_memory(settings, machine)
    yield from check_shared_memory(settings, machine)
    yield from check_huge_pages(settings, machine)
    yield from check_locked_memory(settings, machine, limits)
    yield from check_numa(settings.dram.numa_node)
    yield from check_directories(settings)
    yield from check_state_disk(settings, machine)
    yield from check_descriptors(settings, limits_of_service(unit, limits))
    yield from check_encryption(settings)
    yield from check_certificates(settings, dt.datetime.now(dt.UTC))
    yield from check_swap(machine, unit)
    yield from check_unit(unit, settings)


def _examine_running(loaded: LoadedSettings[Settings], *, compares: bool) -> Iterator[Finding]:
    runtime_dir = loaded.settings.runtime_dir
    yield from check_sockets(loaded.settings)
    try:
        with open_client(runtime_dir) as client:
            stats = client.stats()
            running = {row.key: row for row in client.settings().settings}
    except NotRunningError:
        yield warning(
            "kvd",
            f"kvd is not running in {runtime_dir}",
            "start it with systemctl start kvd, or kvd serve; or give its directory with "
            "--runtime-dir",
        )
        return
    except ReportedError as error:
        yield problem("kvd", error.message, error.remedy)
        return
    yield from check_answer(stats)
    if compares:
        yield from check_settings_in_force(loaded, running)
    yield from check_tiers(stats, running)
