"""Log lines: structured, on stderr, for people on a terminal and as JSON elsewhere; libraries' lines look the same."""

import logging
import sys

import structlog
from structlog.typing import Processor

from loraplex.serving.settings import ServingSettings


def configure_logs(settings: ServingSettings) -> None:
    """Set up structlog and the standard library's logging for this process."""
    console = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_rendering(console=console))
    )
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper(), force=True)
    logging.captureWarnings(True)


def _rendering(*, console: bool) -> list[Processor]:
    drop_internals = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if console:
        plain_traceback = structlog.dev.plain_traceback
        colors = sys.stderr.isatty()
        return [
            drop_internals,
            structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0, exception_formatter=plain_traceback),
        ]
    return [drop_internals, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
