"""The only logging configuration of both processes.

JSON lines on stderr under a supervisor, coloured text on a terminal. Event names are constant slugs
(`log.info("engine_attached", engine_id=3)`), data goes in keys named as in the glossary, never into
the event's text.
"""

import logging
import sys
from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str, *, json: bool | None) -> None:
    """Set up structlog and the standard library's loggers (grpc, asyncio); main calls it once.

    Args:
        level: one of LEVELS.
        json: None chooses: text if stderr is a terminal, else JSON.
    """
    as_json = not sys.stderr.isatty() if json is None else json
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    ending: list[Processor] = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    if as_json:
        ending = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(sort_keys=False, default=str),
        ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
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
