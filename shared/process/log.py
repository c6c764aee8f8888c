"""Logging of both processes: configuration, redaction of secrets, and limits on lines per caller.

Lines are JSON on stderr under a supervisor, and coloured text on a terminal. Event names are
constant slugs (`log.info("engine_attached", engine_id=3)`). Data goes into keys that are named as
in the glossary, never into the event's text. Values that are bound with structlog's contextvars
(above all a trace id) are in each line of their task.

If stderr is systemd's journal each line begins with its priority, which the journal removes:
`journalctl -p warning` finds warnings. Secrets are written as REDACTED: values under the name of a
secret, and text that looks like a request's credentials, in headers or URLs. The finished line is
redacted, too, because only there the text of objects and bytes is known.

Callers can cause lines at will, and so can libraries that log a traceback for each broken
connection. Each caller and library may write so many lines per second (`LineAllowance`); its next
line says how many were left out.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

EVERY_S = 1.0  # the period of an allowance
LINES_PER_S = 10  # per caller


@dataclass
class _Second:
    """The lines of one caller in the current period."""

    began_s: float
    num_lines: int = 0
    left_out: int = 0


class LineAllowance:
    """Bounds the lines per second that each caller may cause.

    There are few names of callers: the clients in the settings, and one name for all strangers.
    """

    def __init__(
        self, per_s: int = LINES_PER_S, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._clock_s = clock_s
        self._seconds: dict[str, _Second] = {}

    def take(self, caller: str) -> int | None:
        """Count a line; returns how many were left out before it, or None to leave it out, too."""
        now_s = self._clock_s()
        second = self._seconds.setdefault(caller, _Second(now_s))
        if now_s >= second.began_s + EVERY_S:
            second.began_s, second.num_lines = now_s, 0
        if second.num_lines >= self._per_s:
            second.left_out += 1
            return None
        second.num_lines += 1
        left_out, second.left_out = second.left_out, 0
        return left_out


LEVELS = ("debug", "info", "warning", "error")
REDACTED = "[redacted]"
SECRET_NAMES = frozenset(
    {
        *("token", "data_token", "access_token", "api_key", "authorization", "cookie"),
        *("credential", "credentials", "key_bytes", "master_key", "password", "private_key"),
        *("salt", "secret"),
    }
)
_QUERY_NAMES = (  # names of URL parameters that hold secrets
    r"(?:access|refresh|id|auth|session)?[-_]?token|(?:x[-_])?(?:api|access|secret|private)[-_]?key"
    r"|key|secret|client[-_]secret|passw(?:or)?d|pwd|sig|signature|credentials?"
)
_CREDENTIALS = re.compile(
    r"(?i)\b(?:bearer|basic)\s+[\w.~+/=-]{8,}|\bsk-[\w-]{16,}"
    rf"|(?<=[?&])(?:{_QUERY_NAMES})=[^\s&;#\"'\\<>]+"  # in a URL's query
    r"|(?<=://)[^\s/@\"'\\]+:[^\s/@\"'\\]*(?=@)"  # in a URL's authority
    r"|\b(?:proxy-)?authorization\b\W{1,4}[\w.~+/=-]{8,}(?:\s+[\w.~+/=-]{8,})?"  # a header, as text
    r"|\b(?:x-)?api-key\b\W{1,4}[\w.~+/=-]{8,}|\b(?:set-)?cookie\b\s*[:=]\s*[^\s\"'\\]+"
)
# Every match contains one of these. Most lines contain none, and this check is much faster.
_MARKS = ("bearer", "basic", "sk-", "?", "&", "://", "authorization", "api-key", "cookie")
_OWN_LOGGERS = ("inference_svc", "kvd", "shared")
# The numbers of syslog(3); other levels become notices.
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def configure_logging(
    level: str, *, json: bool | None, environ: Mapping[str, str] = os.environ
) -> None:
    """Configure structlog and the standard library's loggers (grpc, asyncio); may be repeated.

    Args:
        level: one of LEVELS.
        json: whether lines are JSON; None: text if stderr is a terminal, else JSON.
        environ: the environment: systemd's JOURNAL_STREAM, and NO_COLOR for no colours.
    """
    as_json = not sys.stderr.isatty() if json is None else json
    stamp: Processor = structlog.processors.TimeStamper(fmt="iso", utc=True)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        stamp if as_json else _stamp_for_people,
    ]
    # Plain tracebacks: structlog's own ones for terminals show the values of local variables.
    renderer: Processor = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty() and not environ.get("NO_COLOR"),
        exception_formatter=structlog.dev.plain_traceback,
    )
    if as_json:
        renderer = structlog.processors.JSONRenderer(sort_keys=False, default=str)
    ending: list[Processor] = [structlog.processors.format_exc_info, redact]
    ending += [renderer] if as_json else [_without_own_logger, renderer]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(formatter, is_journal=_is_journal(environ)))
    handler.addFilter(_LibraryLines())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("grpc").setLevel(logging.INFO)  # its debug messages are of no interest
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # tests configure more than once
    )


def get_logger(name: str) -> FilteringBoundLogger:
    """Return the logger of a module; safe to call at import, before configure_logging."""
    return cast("FilteringBoundLogger", structlog.stdlib.get_logger(name))


def _stamp_for_people(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Stamp an event with the local time and its zone, as `kvd events` does."""
    now = datetime.now().astimezone()
    event["timestamp"] = now.isoformat(sep=" ", timespec="milliseconds")
    return event


def _without_own_logger(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Drop the logger's name if it is one of our modules; people need only those of libraries."""
    if str(event.get("logger", "")).startswith(_OWN_LOGGERS):
        del event["logger"]
    return event


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace secrets, by their names or their form; a processor of structlog."""
    for name, value in event.items():
        event[name] = _redacted(name, value)
    return event


def _redacted(name: str, value: Any) -> Any:
    """Return a value with its secrets replaced, down to nested items."""
    if name.lower() in SECRET_NAMES:
        return REDACTED if value else value
    if isinstance(value, str):
        return _without_credentials(value)
    if isinstance(value, Mapping):
        return {key: _redacted(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted("", item) for item in value]
    if isinstance(value, BaseException):
        return _without_credentials(str(value))
    return value


def _without_credentials(text: str) -> str:
    lower = text.lower()
    if not any(mark in lower for mark in _MARKS):
        return text
    return _CREDENTIALS.sub(REDACTED, text)


class _LineFormatter(logging.Formatter):
    """Redacts the finished line, and prepends its priority for the journal (sd-daemon(3))."""

    def __init__(self, inner: logging.Formatter, *, is_journal: bool) -> None:
        super().__init__()
        self._inner = inner
        self._is_journal = is_journal

    def format(self, record: logging.LogRecord) -> str:
        line = _without_credentials(self._inner.format(record))
        if not self._is_journal:
            return line
        return f"<{_PRIORITIES.get(record.levelname.lower(), 5)}>{line}"


class _LibraryLines(logging.Filter):
    """Limits the lines per second of each library; our own lines, which are events, all pass."""

    def __init__(self) -> None:
        super().__init__()
        self._allowance = LineAllowance()

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, dict):
            return True
        left_out = self._allowance.take(record.name)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more left out)", ()
        return left_out is not None


def _is_journal(environ: Mapping[str, str]) -> bool:
    """Whether stderr is the stream of JOURNAL_STREAM; it may have been redirected."""
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


class RefusalLog:
    """Logs the callers that one address has refused, with an allowance of lines per client.

    Args:
        event: the event name of its lines.
    """

    def __init__(self, event: str = "access_refused") -> None:
        self._event = event
        self._log = get_logger(__name__)
        self._lines = LineAllowance(per_s=1)

    def note(self, reason: str, client: str = "", **facts: str) -> None:
        """Log a refusal, or count it for the next line.

        Args:
            reason: slug of the refusal.
            client: the client's name, of which there are few; "" for strangers.
            facts: more about the refusal; never secrets.
        """
        num_left_out = self._lines.take(client)
        if num_left_out is not None:
            self._log.warning(self._event, reason=reason, client=client, more=num_left_out, **facts)
