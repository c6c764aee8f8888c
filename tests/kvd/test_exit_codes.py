"""Exit codes are documented."""

import importlib
import pkgutil

import kvd
import shared
from kvd.cli.main import EXIT_CODES, exit_codes_help
from shared.types.errors import ReportedError


def test_every_error_has_a_documented_exit_code():
    """Whatever kvd raises, its exit code stands in the one table."""
    for package in (kvd, shared):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.name.endswith(("errors", "_client", "settings")):
                importlib.import_module(module.name)
    importlib.import_module("kvd.daemon")
    left, codes = [ReportedError], set()
    while left:
        error = left.pop()
        left += error.__subclasses__()
        codes.add(error.exit_code)
    assert codes <= set(EXIT_CODES)
    assert {0, 70, 130} <= set(EXIT_CODES)


def test_the_help_has_every_code():
    """In lines that fit 80 columns."""
    lines = exit_codes_help().splitlines()
    assert [int(line[:5]) for line in lines[2:] if line[:5].strip()] == list(EXIT_CODES)
    assert max(map(len, lines)) <= 76
