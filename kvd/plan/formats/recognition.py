"""Which kind of trace a file is, by its first line, and its sessions. Pure but for reading it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from kvd.plan.formats.filling import Filling
from kvd.plan.formats.request_tables import AZURE, BURSTGPT, header_of, read_azure, read_burstgpt
from kvd.plan.formats.sharegpt import read_sharegpt
from kvd.plan.mooncake import read_mooncake
from kvd.plan.trace import Session, first_line, read_trace

RECOGNISED = "auto"
TURNS = "turns"  # a plan's own

Reader = Callable[[Path, Filling], tuple[list[Session], str]]

READERS: Mapping[str, Reader] = {
    TURNS: lambda path, _: (read_trace(path), ""),
    "mooncake": lambda path, _: read_mooncake(path),
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "sharegpt": read_sharegpt,
}
FORMATS = (RECOGNISED, *READERS)


def recognised(path: Path) -> str:
    """The kind of trace that a file seems to be; TURNS if its first line says nothing else.

    Raises:
        BadTraceError: it cannot be read.
    """
    line = first_line(path).lstrip("\ufeff \t")
    if line.startswith("["):
        return "sharegpt"
    if not line.startswith("{"):
        names = set(header_of(line))
        for name, columns in (("azure", AZURE), ("burstgpt", BURSTGPT)):
            if names.intersection(columns[1:]):
                return name
        return TURNS
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):  # whoever reads it says so
        return TURNS
    if {"input_length", "hash_ids"} <= fields.keys():
        return "mooncake"
    return "sharegpt" if "conversations" in fields else TURNS


def read_sessions(path: Path, format_name: str, filling: Filling) -> tuple[list[Session], str]:
    """Read the sessions of a file, and say how what it lacks was filled; "" if it lacks nothing.

    Raises:
        BadTraceError: it is no trace of that kind.
        KeyError: there is no such kind.
    """
    name = recognised(path) if format_name == RECOGNISED else format_name
    return READERS[name](path, filling)
