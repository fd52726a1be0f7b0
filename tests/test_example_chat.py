"""`examples/chat.py` in a terminal: what is typed while it answers, and what a kill leaves.

The program runs in a pseudo-terminal, and a small screen reads what it writes there, so that the
tests look at what a person would see.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.actors.models.servers import Answer, AnthropicApi, Api, Call, ChatApi, serving
from tests.drawn import drawn

pty = pytest.importorskip("pty", reason="pseudo-terminals are a thing of POSIX")

CHAT = Path(__file__).parents[1] / "examples" / "chat.py"
WAIT_S_MAX = 240.0
RUN_WITH_CTRL_C = """
import runpy, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Terminal:
    """What is on the screen, of the few control sequences that the program uses."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unread = b""
        self.lines = [""]
        self._row = 0
        self._column = 0

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str, *, since: int = 0) -> None:
        """Until this is on the screen, below a number of lines."""
        until = time.monotonic() + WAIT_S_MAX
        while not re.search(pattern, self.text(since)):
            assert time.monotonic() < until, f"no {pattern!r} in:\n{self.text()}"
            self._read()

    def text(self, since: int = 0) -> str:
        return "\n".join(self.lines[since:])

    def read_to_end(self) -> None:
        until = time.monotonic() + WAIT_S_MAX
        while self._read():
            assert time.monotonic() < until, f"it goes on after:\n{self.text()}"

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], 1.0)[0]:
            return True
        try:
            written = os.read(self._fd, 65_536)
        except OSError:  # Linux says so when the program has gone
            return False
        self._unread += written
        # A sequence may come in two pieces; a letter too.
        whole = re.match(
            rb"(?:[^\x1b\x80-\xff]|\x1b\[\d*[A-Z]|[\xc0-\xff][\x80-\xbf]+)*", self._unread
        )
        assert whole is not None
        self._unread = self._unread[whole.end() :]
        for part in re.findall(r"\x1b\[\d*[A-Z]|.", whole.group().decode(), flags=re.DOTALL):
            self._write(part)
        return bool(written)

    def _write(self, part: str) -> None:
        match part:
            case "\r":
                self._column = 0
            case "\n":
                self._row += 1
                if self._row == len(self.lines):
                    self.lines.append("")
            case "\x1b[K":
                self.lines[self._row] = self.lines[self._row][: self._column]
            case "\x1b[1A":
                self._row -= 1
            case _:
                assert part.isprintable(), repr(part)
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = line[: self._column] + part + line[self._column + 1 :]
                self._column += 1
                assert self._column <= 80, self.lines[self._row]


@contextmanager
def running(
    folder: Path, *options: str, env: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """The program in a terminal of its own; it is gone when this is left."""
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}
    environment.update(env)
    process = subprocess.Popen(
        # A background job has SIGINT ignored, and its children inherit that.
        [sys.executable, "-c", RUN_WITH_CTRL_C, CHAT, *options],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment,
    )
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        assert process.stderr is not None
        process.stderr.close()
        process.wait()
        os.close(ours)


def undo(terminal: Terminal) -> None:
    """Take the last turn back as soon as it has ended: its last words are shown before its end."""
    while "taken back" not in terminal.text():
        shown = len(terminal.lines) - 1
        terminal.type("/undo\r")
        terminal.wait_for("still answers|taken back", since=shown)


def ended(terminal: Terminal, process: subprocess.Popen[bytes]) -> str:
    """Wait for the program to end as it should; gives what is on its screen then."""
    terminal.read_to_end()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == 0
    return terminal.text()


def test_one_can_type_while_the_agent_answers(tmp_path: Path) -> None:
    with running(tmp_path, "--pause-s", "0.04") as (terminal, process):
        terminal.wait_for("> $")
        terminal.type("tell me a story\r")
        terminal.wait_for("agent: Once upon a time")
        terminal.type("where is order 7?")
        terminal.wait_for("> where is order 7\\?$")  # the line stays whole under the answer
        terminal.type("\r")
        terminal.wait_for("Is there anything else\\?")
        terminal.type("/quit\r")
        text = ended(terminal, process)

    assert re.search(
        "agent: Once upon a time.* …\n       · interrupted\nyou:   where", text, re.DOTALL
    )
    assert "· calls look_up(order=7)\n       · -> order 7: left" in text
    assert text.count("you:   tell me a story") == 1


def test_a_confirmation_waits_over_a_ctrl_c(tmp_path: Path) -> None:
    with running(tmp_path, "--pause-s", "0") as (terminal, process):
        terminal.wait_for("> $")
        terminal.type("a refund of order 7, please\r")
        terminal.wait_for("confirm\\?> $")
        process.send_signal(signal.SIGINT)
        ended(terminal, process)

    with running(tmp_path, "--pause-s", "0") as (terminal, process):
        terminal.wait_for("so far")
        terminal.wait_for("confirm\\?> $")
        terminal.type("/confirm\r")
        terminal.wait_for("order 7 is paid back\\. Is there")
        terminal.type("/confirm\r")
        terminal.wait_for("! nothing to confirm")
        undo(terminal)
        terminal.type("\x04")
        text = ended(terminal, process)

    assert text.count("you:   a refund") == 1


def test_after_a_kill_the_answer_is_begun_again_and_ends(tmp_path: Path) -> None:
    with running(tmp_path, "--pause-s", "0.05") as (terminal, process):
        terminal.wait_for("> $")
        terminal.type("tell me a story\r/queue and another\r")
        terminal.wait_for("waits: and another")
        terminal.wait_for("Once upon a time there")
        process.kill()

    with running(tmp_path, "--pause-s", "0") as (terminal, process):
        terminal.wait_for("dictionary\\.\nyou:   and another\nagent: You said")
        terminal.type("/pause\r")
        terminal.wait_for("paused> $")
        terminal.type("/reject\r/steer now\r/resume\r")
        terminal.wait_for("you:   now\nagent: You said: 'now'")
        terminal.type("/dance\r/quit\r")
        assert "there is no /dance" in ended(terminal, process)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("api", "key", "path"),
    drawn(
        [
            pytest.param(ChatApi, "OPENAI", "/v1", id="openai"),
            pytest.param(AnthropicApi, "ANTHROPIC", "", id="anthropic"),
        ],
        1,
    ),
)
def test_with_a_key_a_real_model_is_asked(
    api: type[Api], key: str, path: str, tmp_path: Path
) -> None:
    """Its server is one of the tests', and as strict about a history as the real one."""
    with serving(api()) as server:
        server.replies += [
            Answer(text=["Let me ", "see."], calls=[Call("refund", ['{"order":', " 7}"])]),
            Answer(text=["Order 7 ", "is done."]),
        ]
        env = {f"{key}_API_KEY": "made up", f"{key}_BASE_URL": f"{server.url}{path}"}
        with running(tmp_path, env=env) as (terminal, process):
            terminal.wait_for("> $")
            terminal.type("a refund of order 7\r")
            terminal.wait_for("agent: Let me see\\.\n.*calls refund\\(order=7\\)")
            terminal.wait_for("confirm\\?> $")
            terminal.type("/confirm\r")
            terminal.wait_for("agent: Order 7 is done\\.")
            terminal.type("/quit\r")
            ended(terminal, process)

        assert server.faults == []
        assert len(server.bodies) == 2
