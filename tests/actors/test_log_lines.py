"""Log lines: where they go, and that they hold nothing of what was said."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from turnkeeper.actors.log_lines import TRACEBACK_LENGTH_MAX, log_failure

from .failing_program import WORD

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("failing_program.py")

LOGGING = {"warning", "info", "error", "log_failure", "log_unavailable"}
FIELDS = {
    *("conversation", "turn", "call", "tool", "actor", "region", "ref", "message"),
    *("decision", "reason", "error", "exception", "signal", "doing", "was_handling", "effects"),
    *("count", "failures", "messages", "active", "active_max", "wait_s"),
    # Of a request over HTTP, of its answer, and the line of code where it failed.
    *("method", "status", "place"),
    "server",  # the host or the command of a server of tools
    "span",  # the name of a span: of an operation, a tool or a model
}
"""Names, numbers, and what an error says. A field that may hold chat text is not among them."""


def test_no_line_holds_what_was_said_and_none_goes_to_the_standard_output() -> None:
    """Nothing is configured, and `rich` is there, which draws tracebacks with local variables."""
    assert find_spec("rich") is not None

    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", str(PROGRAM)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert WORD not in done.stderr
    for told in (
        "turn failed",
        "ValueError: of the agent, 21",
        "tool failed",
        "RuntimeError: of the tool",
        "InvalidInput: is_error is a str; it takes True or False",
        "before_call failed",
        "after_call failed",
        "confirm failed",
        "LookupError: of the hook",
        "LookupError: of the confirmation",
        "model call failed",
        "of the model",
    ):
        assert told in done.stderr


def test_an_error_is_told_by_its_type_its_text_and_where_it_was_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        secret = WORD
        raise ValueError(f"{len(secret)} characters")

    with pytest.raises(ValueError, match="characters") as caught:
        fail()
    with caplog.at_level(logging.WARNING, "turnkeeper.actors"):
        log_failure("it failed", caught.value, conversation="c")

    assert "it failed" in caplog.text
    assert "ValueError: 9 characters" in caplog.text
    assert f"{Path(__file__).name}" in caplog.text
    assert WORD not in caplog.text


def test_a_long_error_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "turnkeeper.actors"):
        log_failure("it failed", ValueError("x" * 10 * TRACEBACK_LENGTH_MAX))

    assert TRACEBACK_LENGTH_MAX < len(caplog.text) < TRACEBACK_LENGTH_MAX + 1_000


def lines() -> Iterator[tuple[str, ast.Call]]:
    """Each call in the two packages that writes a log line, with its place."""
    for folder in ("runtime", "actors"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                match node:
                    case (
                        ast.Call(
                            func=ast.Attribute(value=ast.Name(id="logger" | "_logger"), attr=name)
                        )
                        | ast.Call(func=ast.Name(id=name))
                    ) if name in LOGGING:
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", node
                    case _:
                        pass


def test_a_line_is_a_constant_with_fields_that_hold_no_chat_text() -> None:
    found = list(lines())

    assert len(found) > 10
    for place, call in found:
        fields = {keyword.arg for keyword in call.keywords} - {None}
        assert fields <= FIELDS, f"{place}: is {fields - FIELDS} never chat text?"
        is_helper = place.startswith(("actors/log_lines.py", "actors/agents/tools.py"))
        assert is_helper or isinstance(call.args[0], ast.Constant), place


def test_all_lines_go_through_the_logging_of_the_standard_library() -> None:
    """A logger of structlog's own prints to the standard output."""
    for folder in ("runtime", "actors"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            assert "structlog.get_logger" not in source, path
            # The simulator's event loop logs as asyncio does, without structlog.
            assert "exc_info=" not in source or "runtime/testing" in path.as_posix(), path
