"""The logger of both packages: structlog over the standard library, made at its first record."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["Logger", "logger"]


class Logger:
    """Logs records with fields, through `logging`, under one name.

    A program that configures nothing gets warnings on standard error, and nothing on standard
    output. structlog is loaded at the first record: loading it takes longer than loading pydantic.
    """

    def __init__(self, name: str) -> None:
        self._standard = logging.getLogger(name)

    @cached_property
    def _logger(self) -> FilteringBoundLogger:
        import structlog  # noqa: PLC0415 - most programs start faster without it

        logger: FilteringBoundLogger = structlog.wrap_logger(self._standard)
        return logger

    def info(self, event: str, **fields: object) -> None:
        self._logger.info(event, **fields)

    def warning(self, event: str, **fields: object) -> None:
        self._logger.warning(event, **fields)

    def error(self, event: str, **fields: object) -> None:
        self._logger.error(event, **fields)

    def is_enabled_for(self, level: int) -> bool:
        """Return whether records of this level are emitted at all."""
        return self._standard.isEnabledFor(level)


logger = Logger("turnkeeper.runtime")
