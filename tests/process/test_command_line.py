"""The command line on a terminal of 80 columns: its help, its version, what a shell completes."""

from __future__ import annotations

import fcntl
import os
import pty
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import anyio
import pytest
from rich.cells import cell_len
from typer.main import get_command
from typer.testing import CliRunner

import turnkeeper
from turnkeeper.actors import Conversations, SQLiteJournal, TurnContext, agent
from turnkeeper.actors.cli._app import _SECTIONS, app
from turnkeeper.actors.cli._exits import temporary_folder

from .command import COMMAND, WarmCommand

BOUND_S = 120.0
COMMANDS = [name for section in _SECTIONS.values() for name in section]


def on_a_terminal(*arguments: str | Path) -> list[str]:
    """Run a command on a pseudo-terminal of 80 columns; return its lines, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**env, "TERM": "xterm", "NO_COLOR": "1"},
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while some := os.read(ours, 4096):
                shown += some
        except OSError:  # what Linux says when the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0, shown
    text = shown.decode().replace("\x1b[1m", "").replace("\x1b[2m", "").replace("\x1b[0m", "")
    return text.split("\r\n")[:-1]


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("journal") / "chats.db"

    @agent
    async def answer(turn: TurnContext) -> str:
        return f"You said: {turn.message.content}"

    async def fill() -> None:
        async with Conversations(answer, journal=SQLiteJournal(path)) as conversations:
            for name in ("alice", "albert", "bob"):
                await (await conversations[name].send("日本語 and words " * 20)).end()

    anyio.run(fill)
    return path


def check_fits(lines: list[str]) -> None:
    assert [line for line in lines if cell_len(line) > 80] == []
    assert [line for line in lines if line != line.rstrip()] == []


def test_the_help_fits_a_terminal_and_lists_each_command_in_a_line() -> None:
    lines = on_a_terminal("--help")
    check_fits(lines)
    assert len(lines) < 40
    for section in _SECTIONS.values():
        for name, purpose in section.items():
            assert f"  {name:<8}  {purpose}" in lines


def test_a_chat_fits_a_terminal_with_its_times(db: Path) -> None:
    lines = on_a_terminal("show", db, "alice")
    check_fits(lines)
    assert lines[0].endswith(", times in UTC")
    assert lines[2].startswith("  2  ")
    assert max(map(cell_len, lines)) > 70


def test_every_command_is_in_a_section_and_its_help_fits() -> None:
    registered = {
        one.name or one.callback.__name__ for one in app.registered_commands if one.callback
    }
    assert sorted(registered) == sorted(COMMANDS)
    for name in COMMANDS:
        result = CliRunner(env={"COLUMNS": "80"}).invoke(app, [name, "--help"])
        assert result.exit_code == 0
        check_fits(result.stdout.splitlines())
        assert "--no-" not in result.stdout


@pytest.mark.parametrize("name", ["replay", "stress"])
def test_a_run_into_a_journal_says_that_it_leaves_what_is_there(name: str) -> None:
    """`demo` refuses a journal with conversations; these two may have one."""
    told = " ".join(" ".join(on_a_terminal(name, "--help")).split())

    assert "what it holds already stays as it is" in told


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.stdout == f"turnkeeper {turnkeeper.__version__}\n"
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("line", "word", "found"),
    [
        ("turnkeeper ver", 1, ["verify"]),
        ("turnkeeper show {db} al", 3, ["albert", "alice"]),
        ("turnkeeper show {db}.none al", 3, []),
        ("turnkeeper show {db} --st", 3, ["--step"]),
    ],
)
def test_a_shell_completes_commands_options_and_names(
    db: Path, line: str, word: int, found: list[str]
) -> None:
    ran = subprocess.run(
        COMMAND,
        env={
            **os.environ,
            "_TURNKEEPER_COMPLETE": "complete_bash",
            "COMP_WORDS": line.format(db=db),
            "COMP_CWORD": str(word),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == found
    assert ran.stderr == ""
    assert not Path(f"{db}.none").exists()


@pytest.fixture(scope="module", params=["", "1"], ids=["buffered", "unbuffered"])
def warm(request: pytest.FixtureRequest) -> Iterator[WarmCommand]:
    """Commands whose output Python buffers, and those whose output it does not."""
    with WarmCommand({"PYTHONUNBUFFERED": request.param}) as warm:
        yield warm


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", ""),
        ("show", "", "--json"),
        ("export", "", "--to", "openai"),
        ("--help",),
        ("show", "--help"),
        ("--version",),
    ],
    ids=" ".join,
)
def test_output_that_nobody_takes_has_an_exit_status_of_its_own(
    db: Path, arguments: tuple[str, ...], warm: WarmCommand
) -> None:
    """1 would say that the log is damaged, and Python's own traceback says nothing to a user."""
    command = [word or str(db) for word in arguments]

    left = warm.run_into(None, *command)
    filled = warm.run_into(Path("/dev/full"), *command)

    assert (left.returncode, left.stderr) == (141, "")
    assert filled.stderr == (
        "turnkeeper: output: No space left on device; the rest was not written\n"
    )
    assert filled.returncode == 2


@contextmanager
def unwritable(lost: str) -> Iterator[IO[bytes]]:
    """Give an output whose reader has left, whose disk is full, or a full pipe that never waits.

    Or a connection that was reset, or a file that is open only for reading.
    """
    if lost == "mode":
        with Path(os.devnull).open("rb", buffering=0) as read_only:
            yield read_only
        return
    if lost == "connection":
        with socket.create_server(("127.0.0.1", 0)) as server:
            errors = socket.create_connection(server.getsockname())
            there, _ = server.accept()
            # Closed so, it is reset.
            there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            there.close()
        with os.fdopen(errors.detach(), "wb", 0) as stream:
            yield stream
        return
    if lost == "disk":
        with Path("/dev/full").open("wb", buffering=0) as full:
            yield full
        return
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as reader, os.fdopen(writing, "wb", 0) as pipe:
        if lost == "reader":
            reader.close()
        else:
            os.set_blocking(writing, False)
            while pipe.write(bytes(4096)):
                pass
        yield pipe


@pytest.mark.parametrize("lost", ["reader", "disk", "room", "connection", "mode"])
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("simulate", "--seeds", "1", "--seed", "1", "--json"), 0),
        (("verify", "missing.db"), 2),
        (("show",), 2),
    ],
    ids=lambda found: found[0] if isinstance(found, tuple) else "",
)
def test_messages_that_nobody_takes_change_no_exit_status(
    tmp_path: Path, arguments: tuple[str, ...], status: int, lost: str
) -> None:
    """The first message ended the command with 141, or said that its output was lost, with 2."""
    with unwritable(lost) as errors:
        ran = subprocess.run(
            [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=tmp_path,
            check=False,
        )

    assert ran.returncode == status
    assert bool(ran.stdout) is (status == 0)


def test_an_export_to_a_closed_standard_output_is_refused(db: Path) -> None:
    with subprocess.Popen(
        ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "export", db], stderr=subprocess.PIPE
    ) as process:
        _, errors = process.communicate()

    assert process.returncode == 2
    assert errors == b"turnkeeper: standard output is closed; name a file with --output\n"


NUMBERS = [
    (name, option.opts[0])
    for name, command in vars(get_command(app))["commands"].items()
    for option in command.params
    if isinstance(getattr(option, "min", None), float)
]


@pytest.mark.parametrize(("name", "option"), NUMBERS)
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_an_option_that_is_a_number_is_a_finite_one(name: str, option: str, value: str) -> None:
    result = CliRunner().invoke(app, [name, "1", option, value])

    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "a.db", "--at", "x"], "Invalid value for '--at': must be a whole number"),
        (["show", "a.db", "--at", "0"], "'--at': must be greater than or equal to 1"),
        (["replay", "a", "--overlap", "x"], "Invalid value for '--overlap': must be a number"),
        (["replay", "a", "--policy", "x"], "Invalid value for '--policy': 'x' is not one of"),
        (["show", "--db", "a.db"], "takes the journal as its argument: show DB"),
        (["import", "--db", "a.db", "x"], "takes the journal as its argument: import DB"),
        (["inspect", "--db", "a.db"], "takes the journal as its argument: inspect DB"),
        (["token", "--db", "a.db"], "No such option: --db\n"),
        (["demo", "a.db"], "Got unexpected extra argument(s) (a.db); name the journal with --db"),
        (["stress", "a.db"], "name the journal with --db"),
        (["serve", "m:agent", "a.db"], "name the journal with --db"),
    ],
)
def test_arguments_that_cannot_be_read_are_told_in_the_words_of_the_command_line(
    arguments: list[str], said: str
) -> None:
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 2
    assert said in result.stderr
    assert "Input should be" not in result.stderr


_INTERRUPTED = """
import sys

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "turnkeeper.actors.cli._app":
            raise KeyboardInterrupt

def interrupt(*_, **__):
    raise KeyboardInterrupt

if sys.argv[1] == "modules":
    sys.meta_path.insert(0, Interrupted())
else:
    import typer.main
    typer.main.get_command = interrupt
from turnkeeper.actors.cli import main
main()
"""


@pytest.mark.parametrize("what", ["modules", "commands"])
def test_ctrl_c_while_modules_are_loaded_or_commands_made_is_told_in_a_line(what: str) -> None:
    stopped = subprocess.run(
        [sys.executable, "-P", "-c", _INTERRUPTED, what],
        capture_output=True,
        text=True,
        check=False,
    )

    assert stopped.stderr == "turnkeeper: stopped by Ctrl-C\n"
    assert stopped.returncode == 130


_PRINTING = """
import os, sys
from turnkeeper.actors.cli import _app, main

def print_and_open(**_):
    print("for people", file=sys.stderr)
    print(os.open(os.devnull, os.O_WRONLY) > 2)

_app.app = print_and_open
main()
"""


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_standard_stream_that_was_closed_is_no_other_file(closed: int) -> None:
    """What a server told people came among its output, or into the next file that it opened."""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", _PRINTING],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=partial(os.close, closed),
    )

    assert ended.stdout == ("" if closed == 1 else "True\n")
    assert ended.stderr == ("" if closed == 2 else "for people\n")


def test_the_status_is_right_if_the_reason_cannot_be_printed(tmp_path: Path) -> None:
    """A status of 1 says that a promise was broken."""
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [*COMMAND, "show", tmp_path / "none.db"], stderr=full, stdout=full, check=False
        )
    assert ended.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo"], "no temporary folder can be made: No usable temporary directory found"),
        (["stress"], "or name another place in TMPDIR"),
        (
            ["stress", "--nodes", "2", "--postgres", "postgresql://nowhere/db"],
            "no temporary folder can be made: No usable temporary directory found",
        ),
        (["import", "new.db", "chats.json"], "nothing was changed; check the disk and the memory"),
    ],
)
def test_a_disk_that_takes_nothing_is_told_in_a_line(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "chats.json").write_text('[[{"role": "user", "content": "hello"}]]')
    ended = subprocess.run(
        [*COMMAND, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, 0)),
    )

    assert said in ended.stderr.splitlines()[-1]
    assert ended.returncode == 2


def test_a_temporary_folder_goes_if_ctrl_c_comes_as_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that ends the command once it has its output left the folder behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    unlink = os.unlink

    def interrupt(*_: object, **__: object) -> None:
        monkeypatch.setattr(os, "unlink", unlink)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "unlink", interrupt)
    with pytest.raises(KeyboardInterrupt), temporary_folder() as folder:
        (folder / "demo.db").touch()

    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_no_file_while_a_place_for_temporary_files_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python writes one there, to see if it can."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    unlink = os.unlink

    def interrupted(path: str) -> None:
        monkeypatch.setattr(os, "unlink", unlink)
        signal.raise_signal(signal.SIGINT)
        unlink(path)

    monkeypatch.setattr(os, "unlink", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background: ignored
    try:
        with pytest.raises(KeyboardInterrupt), temporary_folder():
            raise AssertionError("entered")
    finally:
        signal.signal(signal.SIGINT, before)

    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_goes_if_ctrl_c_comes_as_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mkdir = os.mkdir

    def interrupted(path: str, mode: int) -> None:
        mkdir(path, mode)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), temporary_folder():
        pass

    assert list(tmp_path.iterdir()) == []


_WRITING = """
import signal, sys
from pathlib import Path
from turnkeeper.actors.cli._journal_jobs import _opened_whole

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
with _opened_whole(Path(sys.argv[1])) as file:
    file.write("half of it")
    print("begun", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_a_signal_ends_leaves_no_draft(tmp_path: Path, number: int) -> None:
    """Each export that a timeout ended left one more, as large as what it had written."""
    output = tmp_path / "chats.jsonl"
    output.write_text("of yesterday")
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _WRITING, output],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(list(tmp_path.iterdir())) == 2
        process.send_signal(number)
        assert process.wait(BOUND_S) == -number

    assert [path.read_text() for path in tmp_path.iterdir()] == ["of yesterday"]
