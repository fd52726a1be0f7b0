"""The ends of commands: exit statuses, JSON, and the options that several commands share."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

__all__ = [
    "BROKEN",
    "INTERRUPTED",
    "SEEDS",
    "UNUSABLE",
    "AsJson",
    "Seed",
    "fail",
    "for_programs",
    "print_json",
]

BROKEN, UNUSABLE, INTERRUPTED = 1, 2, 130
SEEDS = 1 << 16

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Seed of the random choices: what is sent when, and when processes are killed.",
        show_default="drawn, and printed",
    ),
]


def for_programs() -> None:
    """Write standard output as UTF-8 with plain line ends, whatever the locale says.

    For what a program reads: an export in another encoding could not be imported again.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")


def print_json(value: Mapping[str, object]) -> None:
    for_programs()
    print(json.dumps(value, ensure_ascii=False))


def fail(status: int, what: str) -> NoReturn:
    """Print the reason in one line, and exit."""
    Console(stderr=True, highlight=False).print(Text(f"turnkeeper: {what}"), soft_wrap=True)
    raise typer.Exit(status)
