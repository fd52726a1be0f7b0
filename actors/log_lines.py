"""The log lines of the conversation actors: all through the standard library's `logging`.

A program that configures nothing gets warnings on standard error, and nothing on standard output.
No line holds chat text, arguments or results. If code of the application fails, its line has the
error's type, its text, and a traceback without the values of local variables.
"""

from __future__ import annotations

import logging
from traceback import format_exception

from turnkeeper.runtime.lowlevel import Logger

from .values.text import error_text, storable

__all__ = ["Foreseen", "log_failure", "log_unavailable"]

TRACEBACK_LENGTH_MAX = 16_000

_logger = Logger("turnkeeper.actors")


class Foreseen(Exception):
    """A failure for which the application asked by its settings, such as a budget.

    Its log line has no traceback: the text says all.
    """


def log_failure(event: str, error: BaseException, **fields: object) -> None:
    """Warn that code of the application failed, with the place where it did.

    The traceback goes in as text and not as `exc_info`: a formatter that draws tracebacks shows
    local variables, and so chat text. It is cut in the middle if it is long.
    """
    if not _logger.is_enabled_for(logging.WARNING):
        return
    if isinstance(error, Foreseen):
        log_unavailable(event, error, **fields)
        return
    text = storable("".join(format_exception(error)))
    if len(text) > TRACEBACK_LENGTH_MAX:
        half = TRACEBACK_LENGTH_MAX // 2
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    _logger.warning(event, **fields, error=type(error).__name__, exception=text)


def log_unavailable(event: str, error: BaseException, **fields: object) -> None:
    """Warn in one line that something refused or failed other than code of the application."""
    _logger.warning(event, **fields, error=type(error).__name__, reason=error_text(error))
