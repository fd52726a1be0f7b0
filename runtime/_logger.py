"""The logger of both packages: structlog over the standard library, loaded by the first runtime."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["Logger", "load_structlog", "logger"]


def load_structlog() -> None:
    """Load structlog, which takes longer than loading pydantic: up to 70 ms if rich is installed.

    A runtime does so as it is entered. At the first record, which a server may write after days,
    the event loop would stand still for it. If it fails, the first record tries again.
    """
    with contextlib.suppress(Exception):
        import structlog  # noqa: F401, PLC0415 - a program that only imports this starts faster


class Logger:
    """Logs records with fields, through `logging`, under one name.

    A program that configures nothing gets warnings on standard error, and nothing on standard
    output. structlog is loaded by `load_structlog`, or at the first record if nothing called it.

    To log never raises. A program's own filters and processors may, and so may loading structlog in
    a process that has no file left to open; an actor, or the runtime, must not end by that. Then
    standard error gets a line that has the record's text and the error's type, and no field.
    """

    def __init__(self, name: str) -> None:
        self._standard = logging.getLogger(name)

    @cached_property
    def _logger(self) -> FilteringBoundLogger:
        import structlog  # noqa: PLC0415 - as above

        logger: FilteringBoundLogger = structlog.wrap_logger(self._standard)
        return logger

    def info(self, event: str, **fields: object) -> None:
        self._log("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._log("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._log("error", event, fields)

    def _log(self, level: str, event: str, fields: Mapping[str, object]) -> None:
        try:
            getattr(self._logger, level)(event, **fields)
        except Exception as error:  # noqa: BLE001 - as the class says
            with contextlib.suppress(Exception):  # there may be no standard error
                sys.stderr.write(f"not logged ({type(error).__name__}): {event}\n")

    def is_enabled_for(self, level: int) -> bool:
        """Return whether records of this level are emitted at all."""
        return self._standard.isEnabledFor(level)


logger = Logger("turnkeeper.runtime")
