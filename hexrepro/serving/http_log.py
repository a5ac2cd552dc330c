"""aiohttp's log of requests that it cannot read, without what is in them: it would quote them, headers with keys included."""

from __future__ import annotations

import logging


def http_log() -> logging.Logger:
    """The logger for aiohttp's server."""
    http_log = logging.getLogger("hexrepro.serving.http")
    http_log.filters = [_WithoutContent()]
    return http_log


class _WithoutContent(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else "error"
        record.msg, record.args, record.exc_info, record.exc_text = (
            f"a request failed: {kind}",
            (),
            None,
            None,
        )
        return True
