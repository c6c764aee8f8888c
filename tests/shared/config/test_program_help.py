"""Exit codes are documented, in both programs."""

import importlib
import pkgutil

import pytest

import inference_svc.core
import kvd
import shared
from inference_svc.cli.main import EXIT_CODES as SERVICE_EXIT_CODES
from kvd.cli.main import EXIT_CODES as KVD_EXIT_CODES
from shared.config.lazy_commands import exit_codes_help
from shared.types.errors import ReportedError

TABLES = {"kvd": KVD_EXIT_CODES, "inference_svc": SERVICE_EXIT_CODES}


@pytest.mark.parametrize("program", TABLES)
def test_every_error_has_a_documented_exit_code(program):
    """Each exit code that a program may return is in its table."""
    for package in (kvd, shared, inference_svc.core):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.name.endswith(("errors", "_client", "settings")):
                importlib.import_module(module.name)
    importlib.import_module("kvd.daemon")
    left, codes = [ReportedError], set()
    while left:
        error = left.pop()
        left += error.__subclasses__()
        if error.__module__.startswith((f"{program}.", "shared.")):
            codes.add(error.exit_code)
    assert codes <= set(TABLES[program])
    assert {0, 70, 130} <= set(TABLES[program])


@pytest.mark.parametrize("codes", TABLES.values(), ids=TABLES)
def test_the_help_has_every_code(codes):
    """In lines that fit 80 columns."""
    lines = exit_codes_help(codes).splitlines()
    assert [int(line[:5]) for line in lines[2:] if line[:5].strip()] == list(codes)
    assert max(map(len, lines)) <= 76
