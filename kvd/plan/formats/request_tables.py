"""Traces that are tables of requests: Azure's and BurstGPT's. Pure, except that it reads the file.

azure      TIMESTAMP (a date and time), ContextTokens, GeneratedTokens: no sessions, so requests are
           grouped at random (`filling.py`)
burstgpt   Timestamp (seconds), Model, Request tokens, Response tokens, Log Type; the later files
           also have Session ID and Elapsed time (seconds that the answer took). A conversation's
           requests are a session. Calls of an API have no session; each is a session of its own, as
           it is unknown what they share. In the earlier files conversations have no ids, and are
           grouped at random. A request without an answer has failed, and is left out.

Other columns are ignored; the first line names the columns.

*Source:* github.com/Azure/AzurePublicDataset (Splitwise, ISCA'24; DynamoLLM),
github.com/HPMLL/BurstGPT.
"""

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from kvd.plan.formats.filling import Filling, Request, drawn_sessions, session_of
from kvd.plan.trace import (
    MAX_SECONDS,
    MAX_TOKENS,
    BadTraceError,
    Session,
    check_sorted,
    numbered_lines,
)

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
SESSION, ELAPSED, LOG_TYPE = "Session ID", "Elapsed time", "Log Type"
API_LOG = "API log"
DRAWN = "sessions drawn, seed {seed}: the trace has none"

Row = dict[str, str]


def header_of(line: str) -> list[str]:
    """Return the names of the columns in a table's first line."""
    return next(csv.reader([line.lstrip("\ufeff")]), [])


def read_azure(path: Path, filling: Filling) -> tuple[list[Session], str]:
    """Return the sessions of one of Azure's tables, and how they were grouped.

    Raises:
        BadTraceError: the file cannot be read, or a line is no request.
    """
    requests: list[Request] = []
    for where, row in _rows(path, AZURE):
        at_s = _date_s(where, row[AZURE[0]])
        check_sorted(where, AZURE[0], row[AZURE[0]], at_s, requests[-1].at_s if requests else at_s)
        input_tokens, output_tokens = (_tokens(where, row, name) for name in AZURE[1:])
        if not input_tokens:
            raise BadTraceError(f"{where}: {AZURE[1]} is 0", "leave out requests without a prompt")
        requests.append(Request(at_s, input_tokens, output_tokens))
    if not requests:
        raise _empty(path)
    return drawn_sessions(requests, filling.seed), DRAWN.format(seed=filling.seed)


def read_burstgpt(path: Path, filling: Filling) -> tuple[list[Session], str]:
    """Return the sessions of one of BurstGPT's tables, and how they were grouped.

    Raises:
        BadTraceError: the file cannot be read, or a line is no request.
    """
    by_id: dict[str, list[Request]] = {}
    without_id: list[Request] = []
    api_calls: list[Session] = []
    before_s, has_ids = 0.0, False
    for where, row in _rows(path, BURSTGPT):
        at_s = _seconds(where, row, BURSTGPT[0])
        check_sorted(where, BURSTGPT[0], row[BURSTGPT[0]], at_s, before_s)
        before_s, has_ids = at_s, SESSION in row
        input_tokens, output_tokens = (_tokens(where, row, name) for name in BURSTGPT[1:])
        if not input_tokens or not output_tokens:
            continue
        service_s = _seconds(where, row, ELAPSED) if row.get(ELAPSED) else None
        request = Request(at_s, input_tokens, output_tokens, service_s)
        if row.get(SESSION):
            by_id.setdefault(row[SESSION], []).append(request)
        elif has_ids or row.get(LOG_TYPE) == API_LOG:
            api_calls.append(session_of([request]))
        else:
            without_id.append(request)
    found = [
        *map(session_of, by_id.values()),
        *drawn_sessions(without_id, filling.seed),
        *api_calls,
    ]
    if not found:
        raise _empty(path)
    how = "sessions by their id" if has_ids else DRAWN.format(seed=filling.seed)
    return sorted(found, key=lambda session: session.start_s), how


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, Row]]:
    """Yield each line after the first as a dict by column, with "file:line" before it."""
    names: list[str] = []
    for where, line in numbered_lines(path):
        if not names:
            names = header_of(line)
            if missing := [name for name in columns if name not in names]:
                raise BadTraceError(
                    f"{where}: there is no column {', '.join(missing)}",
                    "give the table with its first line, which names the columns",
                )
            continue
        cells = next(csv.reader([line]), [])
        if len(cells) != len(names):
            raise BadTraceError(
                f"{where}: the line has {len(cells)} cells, but there are {len(names)} columns",
                "give the table as it was published",
            )
        yield where, dict(zip(names, cells, strict=True))


def _tokens(where: str, row: Row, name: str) -> int:
    try:
        value = int(row[name])
    except ValueError:
        value = -1
    if not 0 <= value <= MAX_TOKENS:
        raise _bad_value(where, name, row[name], f"a whole number between 0 and {MAX_TOKENS}")
    return value


def _seconds(where: str, row: Row, name: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_SECONDS:
        raise _bad_value(where, name, row[name], f"seconds between 0 and {MAX_SECONDS:.0f}")
    return value


def _date_s(where: str, text: str) -> float:
    """Return the Unix time of a date; without a zone it is UTC."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise _bad_value(
            where, AZURE[0], text, "a date and time: 2023-11-16 18:15:46.68"
        ) from error
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _bad_value(where: str, name: str, text: str, expected: str) -> BadTraceError:
    return BadTraceError(f"{where}: {name} is {text[:40]!r}", f"give {expected}")


def _empty(path: Path) -> BadTraceError:
    return BadTraceError(f"{path}: the trace contains no request", "give a trace that is not empty")
