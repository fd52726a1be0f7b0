"""`turnkeeper serve` and `token`: the socket that it listens on, the agent, the tokens."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NoReturn

import pytest
import typer
from typer.testing import CliRunner, Result

from turnkeeper.actors import ToolAgent, gateway
from turnkeeper.actors.cli import _serve
from turnkeeper.actors.cli._app import app
from turnkeeper.actors.cli._serve import _add_line, _listen, _load_agent, token
from turnkeeper.actors.gateway import GatewayLimits
from turnkeeper.actors.gateway.guard import PART_BYTES


def option_of_a_connection(option: int) -> int:
    """Return this option of TCP, of a connection that the server has accepted."""
    with _listen("127.0.0.1", 0) as listener:
        client = socket.create_connection(listener.getsockname())
        served, _ = listener.accept()
        with client, served:
            return served.getsockopt(socket.IPPROTO_TCP, option)


def test_small_parts_of_a_response_are_sent_at_once() -> None:
    """Else the first words of an answer wait for the acknowledgement of the response's head."""
    assert option_of_a_connection(socket.TCP_NODELAY)


@pytest.mark.skipif(sys.platform != "linux", reason="an option of Linux")
def test_a_client_that_takes_nothing_is_cut_off_by_the_kernel_too() -> None:
    """The guard cannot: hypercorn shields its writes."""
    bound_ms = option_of_a_connection(socket.TCP_USER_TIMEOUT)
    assert bound_ms == 1_000 * GatewayLimits().write_stall_s


@pytest.mark.skipif(sys.platform != "linux", reason="an option of Linux")
def test_the_kernel_holds_little_for_a_client_that_reads_slowly() -> None:
    """Else it takes nothing for longer than `write_stall_s`, and the client is cut off."""
    held = option_of_a_connection(socket.TCP_NOTSENT_LOWAT)
    assert held == 2 * PART_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="an option of Linux")
def test_a_kernel_without_that_option_serves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "TCP_NOTSENT_LOWAT", 9_999)  # the number of none
    with _listen("127.0.0.1", 0) as listener:
        socket.create_connection(listener.getsockname()).close()


def test_a_port_that_is_in_use_is_told_once_with_the_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(typer.Exit):
        _listen("127.0.0.1", port := other.getsockname()[1])

    said = f"cannot listen on 127.0.0.1:{port}: Address already in use; `--port` takes another port"
    assert capsys.readouterr().err == f"turnkeeper: {said}\n"


def test_a_host_without_an_address_is_told_as_such(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error has a number that is none of the system's."""

    def look_up(*_: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket.socket, "bind", look_up)

    with pytest.raises(typer.Exit):
        _listen("nowhere", 8080)

    said = "cannot listen on nowhere:8080: Name or service not known"
    assert capsys.readouterr().err == f"turnkeeper: {said}\n"


@pytest.mark.parametrize(
    ("missing", "wanted"),
    [
        ("trio", "trio"),
        ("hypercorn", "'turnkeeper[gateway]'"),
        ("fastapi", "'turnkeeper[gateway]'"),
    ],
)
def test_what_is_not_installed_is_told_with_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str, wanted: str
) -> None:
    """For trio it named the extra `gateway`, which has none."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != missing or None)
    with pytest.raises(typer.Exit):
        _serve._check_extra("serve", "trio")

    said = f"`serve` needs the package {missing}, which is not installed; pip install {wanted}"
    assert capsys.readouterr().err == f"turnkeeper: {said}\n"


def test_a_module_without_that_agent_is_told_with_those_that_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "two_agents.py"
    module.write_text(
        "import anyio\n"  # a module, which has a `run` too
        "from turnkeeper import ToolAgent, agent, tool\n"
        "@tool\nasync def look_up(order: int) -> str: ...\n"  # and so has a tool
        "@agent\nasync def support(turn): ...\n"
        "@agent\nasync def sales(turn): ...\n"
    )

    with pytest.raises(typer.Exit):
        _load_agent(f"{module}:helper")

    assert capsys.readouterr().err.endswith("has no agent named helper; it has support, sales\n")


def test_a_file_may_import_the_modules_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `python coder.py` may, and the file of the coding agent's tutorial does."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "the_shops_tools.py").write_text("def look_up(order: int) -> str: ...\n")
    module = tmp_path / "agent_beside_its_tools.py"
    module.write_text(
        "from the_shops_tools import look_up\n"
        "from turnkeeper import ScriptedModel, ToolAgent\n"
        "support = ToolAgent(ScriptedModel([]), [look_up])\n"
    )
    link = tmp_path / "elsewhere" / "link_to_the_agent.py"
    link.symlink_to(module)

    assert isinstance(_load_agent(f"{link}:support"), ToolAgent)
    assert isinstance(_load_agent(f"{module}:support"), ToolAgent)


def test_a_file_with_the_name_of_a_module_of_python_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A `logging.py` took the module's place in the process, and the server did not start."""
    module = tmp_path / "sched.py"
    module.write_text("from turnkeeper import agent\n@agent\nasync def support(turn): ...\n")

    with pytest.raises(typer.Exit):
        _load_agent(f"{module}:support")

    assert "a module of Python has this name; rename the file" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_told_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        _load_agent(f"{tmp_path}/nope.py:support")

    assert capsys.readouterr().err.endswith(f"{tmp_path}/nope.py does not exist\n")


@pytest.mark.parametrize(
    "place", ["text.txt:x", "./text.txt:x", "some/text.txt:x", "turnkeeper.nope:x"]
)
def test_a_place_that_is_neither_a_module_nor_a_python_file_is_told_the_form(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    """It said only that there is no module named 'text', or gave a traceback for `./`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "text.txt").touch()

    with pytest.raises(typer.Exit) as left:
        _load_agent(place)

    assert left.value.exit_code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("; write MODULE:AGENT, as in serve_me.py:support")


def test_a_module_that_lacks_another_is_not_told_the_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("agent_without_its_tools.py").write_text("import the_lost_tools\n")

    with pytest.raises(typer.Exit):
        _load_agent("agent_without_its_tools:x")

    assert capsys.readouterr().err.endswith("No module named 'the_lost_tools'\n")


def test_a_function_without_the_decorator_is_told_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "plain_function.py"
    module.write_text("async def support(turn): ...\n")

    with pytest.raises(typer.Exit):
        _load_agent(f"{module}:support")

    said = capsys.readouterr().err
    assert said.endswith(":support is a plain function; write @agent above its `async def`\n")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def make(): ...", "make is a plain function; if it returns an agent"),
        ("class make: ...", "make is a class; if its objects are agents"),
    ],
)
def test_what_makes_an_agent_is_told_to_be_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, said: str
) -> None:
    module = tmp_path / "factory.py"
    module.write_text(f"{code}\n")

    with pytest.raises(typer.Exit):
        _load_agent(f"{module}:make")

    assert f"{said}, write `served = make()` in the module" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = (\n", "cannot be loaded: '(' was never closed (broken.py, line 1)"),
        ("rate = 1 / 0\n", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("open('/no/rates')\n", "cannot be loaded: /no/rates does not exist"),
        ("raise FileNotFoundError('no rates')\n", "cannot be loaded: no rates"),
        (
            "import sys\nsys.exit()\n",
            "cannot be loaded: it ended the program (None); put what runs it as a program",
        ),
    ],
)
def test_a_module_that_fails_is_told_without_the_frames_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    module = tmp_path / "broken.py"
    module.write_text(text)

    with pytest.raises(typer.Exit) as left:
        _load_agent(f"{module}:support")

    assert left.value.exit_code == 2
    told = capsys.readouterr().err
    assert said in told.splitlines()[-1]
    assert "typer" not in told


def make_token(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["token", *arguments, "--file", str(file)])


@pytest.mark.parametrize("arguments", [("b" * 64,), ("bob", "--scopes", "read,read")])
def test_each_token_that_is_made_leaves_a_file_that_lets_all_in(
    tmp_path: Path, arguments: Sequence[str]
) -> None:
    file = tmp_path / "tokens.txt"
    assert make_token(file, "alice").exit_code == 0
    file.write_text(file.read_text().rstrip("\n"))  # as an editor may leave it

    assert make_token(file, *arguments).exit_code == 0

    assert repr(gateway.BearerTokens.from_file(file)) == "<BearerTokens of 2>"


def test_a_token_that_cannot_be_made_is_told_in_a_line_and_leaves_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tokens.txt"
    assert make_token(file, "alice").exit_code == 0
    before = file.read_text()
    for refused in (make_token(file, "b" * 65), make_token(tmp_path / "no" / "file", "bob")):
        assert refused.exit_code == 2
        assert len(refused.stderr.splitlines()) == 1
        assert not refused.stdout
    assert file.read_text() == before


def test_a_token_that_cannot_be_shown_lets_no_one_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hash was in the file all the same."""
    file = tmp_path / "tokens.txt"
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        with pytest.raises(OSError, match="No space left"):
            token("alice", file=file)
        patched.undo()
        with suppress(OSError):
            full.close()  # it has still to write the token
    assert file.read_text() == ""


def test_no_token_is_made_if_standard_output_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Printing to none raises no error, so the hash of a token that was not shown got in."""
    file = tmp_path / "tokens.txt"
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)  # as Python has it then
        with pytest.raises(typer.Exit, match="2"):
            token("alice", file=file)
    assert not file.exists()


def test_a_token_whose_hash_cannot_be_written_is_said_to_be_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_serve, "_add_line", fail)
    refused = make_token(tmp_path / "tokens.txt", "alice")

    assert refused.exit_code == 2
    assert "No space left on device; the token above will not be accepted" in refused.stderr


def run_token(program: str, file: Path) -> subprocess.CompletedProcess[str]:
    """Make a token for bob by this program, in a process of its own."""
    command = [sys.executable, "-c", program, "token", "bob", "--file", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_line_that_only_half_fits_on_the_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """The half of it was left, and the server that read the file next did not start."""
    file = tmp_path / "tokens.txt"
    assert make_token(file, "alice").exit_code == 0
    before = file.read_text()
    program = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 20},) * 2)\n"
        "from turnkeeper.actors.cli import main\n"
        "main()\n"
    )

    refused = run_token(program, file)

    assert refused.returncode == 2, refused.stderr
    assert "the token above will not be accepted" in refused.stderr
    assert file.read_text() == before


def test_a_line_that_only_half_fits_cuts_off_no_line_of_another_process(tmp_path: Path) -> None:
    """It cut the file to the length that it had before, with all that came meanwhile."""
    file, added = tmp_path / "tokens.txt", "b" * 64 + " bob read\n"
    assert make_token(file, "alice").exit_code == 0
    expected = file.read_text()

    class Full(FileIO):
        def write(self, data: object) -> int:
            nonlocal expected
            assert isinstance(data, bytes)
            super().write(data[:20])
            with file.open("a") as other, suppress(BlockingIOError):  # then it waits
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                other.write(added)
                expected += added
            raise OSError(errno.ENOSPC, "No space left on device")

    with Full(file, "a+") as opened, pytest.raises(OSError, match="No space left"):
        _add_line(opened, "c" * 64 + " carol read\n")

    assert file.read_text() == expected


def test_a_file_that_another_program_keeps_locked_is_waited_for_with_a_bound(
    tmp_path: Path,
) -> None:
    """The command waited for as long as the other one held it."""
    file = tmp_path / "tokens.txt"
    assert make_token(file, "alice").exit_code == 0
    before = file.read_text()
    program = "from turnkeeper.actors.cli import _serve, main\n_serve.LOCK_WAIT_S = 0.0\nmain()\n"

    with file.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused = run_token(program, file)

    assert refused.returncode == 2, refused.stderr
    said = f"{file}: another program keeps it locked; the token above will not be accepted"
    assert refused.stderr.split() == ["turnkeeper:", *said.split()]
    assert file.read_text() == before
    assert make_token(file, "bob").exit_code == 0


def test_a_file_that_is_none_of_tokens_gets_no_token(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("# to do\nbuy milk\n")

    refused = make_token(file, "alice")

    assert refused.exit_code == 2
    assert "line 2 of" in refused.stderr
    assert "no token was made" in refused.stderr
    assert not refused.stdout
    assert file.read_text() == "# to do\nbuy milk\n"


@pytest.mark.parametrize("pid", ["0", "-1"])
def test_the_group_of_processes_is_not_what_torture_kills(pid: str) -> None:
    """The URL is refused too, so that nothing is killed if the number is taken."""
    refused = CliRunner().invoke(app, ["torture", "no address", "--kill", pid])

    assert refused.exit_code == 2
    assert "--kill" in refused.stderr
