"""The only logging configuration of both processes.

JSON lines on stderr under a supervisor, coloured text on a terminal. Event names are constant slugs
(`log.info("engine_attached", engine_id=3)`), data goes in keys named as in the glossary, never into
the event's text. What is bound with structlog's contextvars (a trace id, above all) is in each line
of its task.

Where stderr is systemd's journal each line begins with its priority, which the journal takes off:
`journalctl -p warning` finds warnings. Secrets do not get into a line: whatever is logged under the
name of one, and whatever looks like the credentials of a request, is written as REDACTED.
"""

import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

LEVELS = ("debug", "info", "warning", "error")
REDACTED = "[redacted]"
SECRET_NAMES = frozenset(
    {
        *("token", "data_token", "access_token", "api_key", "authorization", "cookie"),
        *("credential", "credentials", "key_bytes", "master_key", "password", "private_key"),
        *("salt", "secret"),
    }
)
_CREDENTIALS = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}|\bsk-[\w-]{16,}")
# As syslog(3) numbers them; what is not here is a notice.
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def configure_logging(
    level: str, *, json: bool | None, environ: Mapping[str, str] = os.environ
) -> None:
    """Set up structlog and the standard library's loggers (grpc, asyncio); again to change it.

    Args:
        level: one of LEVELS.
        json: None chooses: text if stderr is a terminal, else JSON.
        environ: where systemd says that stderr is its journal.
    """
    as_json = not sys.stderr.isatty() if json is None else json
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Not structlog's own tracebacks for terminals: they show the values of local variables.
    renderer: Processor = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    if as_json:
        renderer = structlog.processors.JSONRenderer(sort_keys=False, default=str)
    ending: list[Processor] = [structlog.processors.format_exc_info, redact, renderer]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JournalFormatter(formatter) if _is_journal(environ) else formatter)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("grpc").setLevel(logging.INFO)  # its debug messages tell nothing of ours
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


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace what is secret, by its name or by its looks; a processor of structlog."""
    for name, value in event.items():
        event[name] = _redacted(name, value)
    return event


def _redacted(name: str, value: Any) -> Any:
    if name.lower() in SECRET_NAMES:
        return REDACTED if value else value
    if isinstance(value, str):
        return _CREDENTIALS.sub(REDACTED, value)
    if isinstance(value, Mapping):
        return {key: _redacted(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted("", item) for item in value]
    if isinstance(value, BaseException):
        return _CREDENTIALS.sub(REDACTED, str(value))
    return value


class _JournalFormatter(logging.Formatter):
    """Puts each line's priority before it, as sd-daemon(3) says."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        priority = _PRIORITIES.get(record.levelname.lower(), 5)
        return f"<{priority}>{self._inner.format(record)}"


def _is_journal(environ: Mapping[str, str]) -> bool:
    """Whether stderr is what JOURNAL_STREAM names: it may have been redirected since."""
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))
