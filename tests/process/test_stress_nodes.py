"""`turnkeeper stress --nodes`: three machines on one PostgreSQL, and what stands between them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import sysconfig
import zipfile
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import psycopg
import pytest
from anyio.abc import SocketStream
from typer.testing import CliRunner

from tests import postgres
from turnkeeper.actors.cli._app import app
from turnkeeper.actors.torture.checker import FAULTS, Finding, Verdict
from turnkeeper.actors.torture.relays import DatabaseRelay, Relay
from turnkeeper.actors.torture.torture import Torture

from .stressing import database

BOUND_S = 120.0
OLDEST = "dd390d1"
"""The first commit whose schema is of this version: one before it refuses a newer schema."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_three_machines_lose_nothing_whatever_fails_around_them(backend: str) -> None:
    with postgres.own_server() as (conninfo, restart):
        arguments = ("--nodes", "3", "--postgres", conninfo, "--json", "--seed", "5")
        failures = ("--kills", "2", "--restart", shlex.join(restart))
        limits = ("--duration", "60", "--backend", backend)
        result = CliRunner().invoke(app, ["stress", *arguments, *failures, *limits])

        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert report["findings"] == []
        assert report["totals"]["disturbances"] == 11
        assert report["totals"]["kills"] == 2
        assert report["totals"]["known"] > 20
        with psycopg.connect(conninfo) as connection:
            left = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname ~ '^stress_'")
            assert left.fetchall() == []


def _environment_of(commit: str, folder: Path) -> Path:
    """Build a wheel of an earlier commit, in an environment of its own; return its Python."""
    source = folder / "source"
    source.mkdir()
    archived = subprocess.run(
        ["git", "archive", commit], cwd=Path(__file__).parents[2], capture_output=True, check=False
    )
    if archived.returncode:
        pytest.skip(f"commit {commit} is not here")
    archive = folder / "source.tar"
    archive.write_bytes(archived.stdout)
    run = partial(subprocess.run, cwd=source, check=True, capture_output=True)
    run(["tar", "-xf", str(archive)])
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    run([sys.executable, "-c", build, str(folder)])
    run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")])
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(packages)
    # What it needs comes from here; the editable install of this version does not, as the file that
    # makes it is looked for in the first folder alone.
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "env" / "bin" / "python"


@pytest.mark.slow
def test_an_older_version_beside_this_one_loses_nothing(tmp_path: Path) -> None:
    beside = _environment_of(OLDEST, tmp_path)
    arguments = ("--nodes", "3", "--postgres", postgres.conninfo(), "--json", "--seed", "7")
    result = CliRunner().invoke(
        app, ["stress", *arguments, "--kills", "1", "--duration", "60", "--beside", str(beside)]
    )

    report = json.loads(result.stdout)
    # The older one has no note: it says nothing before an answer whose pieces were not all shown.
    short = [found for found in report["findings"] if "the pieces say" in found["detail"]]
    assert report["findings"] == short, result.output
    assert result.exit_code == bool(short), result.output
    assert report["totals"]["known"] > 20


def test_what_is_found_is_told_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def nothing(_: Torture) -> None: ...

    lost = Finding(1, "lost", "m1", "acknowledged at seq 3")
    verdict = Verdict((lost,), {"acknowledged": 1}, {})
    monkeypatch.setattr(Torture, "run", nothing)
    monkeypatch.setattr("turnkeeper.actors.torture.checker.check", lambda _: verdict)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    with database() as url:
        result = CliRunner().invoke(app, ["stress", "--nodes", "3", "--postgres", url])

    assert result.exit_code == 1
    assert "lost: conversation 1, m1" in result.stdout
    kept = re.search(r"the history is (\S+), the database's schema stress_\w+", result.stderr)
    assert kept is not None, result.stderr
    assert Path(kept.group(1)).exists()
    assert "lost" in FAULTS


@pytest.mark.parametrize(
    "arguments",
    [
        ("--nodes", "3"),
        ("--postgres", "postgresql://nowhere/db"),
        ("--nodes", "3", "--postgres", "host=nowhere"),
    ],
)
def test_machines_need_a_database_by_its_url(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["stress", *arguments])
    assert result.exit_code == 2
    assert "--postgres" in result.stderr or "URL" in result.stderr


def test_ctrl_c_while_the_database_does_not_answer_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder stayed, with the keys of the machines, and not a word was said."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("psycopg.connect", interrupted)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = CliRunner().invoke(app, ["stress", "--nodes", "2", "--postgres", "postgresql://h/x"])
    assert result.exit_code == 130
    assert "turnkeeper: stopped" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_cannot_be_reached_is_told_before_anything_runs() -> None:
    """All failures were played at machines that had never answered."""
    result = CliRunner().invoke(
        app, ["stress", "--nodes", "2", "--postgres", "postgresql://me:secret@127.0.0.1:1/x"]
    )
    assert result.exit_code == 2
    assert "the database cannot be reached: " in result.stderr
    assert "secret" not in result.stderr


@pytest.mark.parametrize("url", ["postgresql://me:secr%et@h/x", "postgresql://me:p@secret@h/x"])
def test_no_part_of_a_password_is_quoted_from_a_url_that_is_none(url: str) -> None:
    result = CliRunner().invoke(app, ["stress", "--nodes", "2", "--postgres", url])
    assert result.exit_code == 2
    assert "conninfo " in result.stderr
    assert "secr" not in result.stderr


@pytest.mark.parametrize(
    "given",
    [
        *("--db=chats.db", "--report=page.html", "--conversations=5", "--rate=1", "--overlap=0.1"),
        "--senders=3",
    ],
)
def test_what_is_for_one_machine_is_refused_for_several(given: str) -> None:
    several = ("--nodes", "3", "--postgres", "postgresql://nowhere/db")
    result = CliRunner().invoke(app, ["stress", *several, given])
    assert result.exit_code == 2
    assert f"{given.partition('=')[0]} is for one machine" in result.stderr


@pytest.mark.parametrize("given", ["--restart=true", f"--beside={sys.executable}"])
def test_what_is_for_several_machines_is_refused_for_one(given: str) -> None:
    result = CliRunner().invoke(app, ["stress", given])
    assert result.exit_code == 2
    assert "are for several machines; give --nodes too" in result.stderr


@pytest.mark.anyio
async def test_a_relay_refuses_cuts_and_loses_answers() -> None:
    received: list[bytes] = []

    async def echo(stream: SocketStream) -> None:
        async with stream:
            async for data in stream:
                received.append(data)
                await stream.send(data)

    async def ask(relay: Relay) -> bytes:
        async with await anyio.connect_tcp("127.0.0.1", relay.port) as stream:
            await stream.send(b"hello")
            try:
                return await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return b""

    async def is_silent(stream: SocketStream) -> bool:
        with anyio.move_on_after(0.05) as scope:
            await stream.receive()
        return scope.cancelled_caught

    with anyio.fail_after(BOUND_S):
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as group,
        ):
            group.start_soon(listener.serve, echo)
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            relay = Relay(("127.0.0.1", port))
            await group.start(relay.serve)

            assert await ask(relay) == b"hello"
            relay.is_closed = True
            assert await ask(relay) == b""
            assert len(received) == 1
            relay.is_closed = False
            relay.loses_answers = True
            assert await ask(relay) == b""
            assert len(received) == 2
            relay.loses_answers = False
            async with await anyio.connect_tcp("127.0.0.1", relay.port) as stream:
                relay.hold("there")
                await stream.send(b"hello")
                assert await is_silent(stream)
                assert len(received) == 2
                relay.hold("back")
                assert await is_silent(stream)
                relay.hold()
                assert await stream.receive() == b"hello"
            async with await anyio.connect_tcp("127.0.0.1", relay.port) as stream:
                await stream.send(b"hello")
                assert await stream.receive() == b"hello"
                relay.cut()
                with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                    await stream.receive()
            group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_relay_before_a_database_loses_its_notifications_and_lets_it_be_read_only() -> None:
    def told(conninfo: str) -> tuple[str, int]:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            found = connection.execute("SHOW default_transaction_read_only").fetchone()
            assert found is not None
            connection.execute("LISTEN stressed")
            for _ in range(3):
                connection.execute("SELECT pg_notify('stressed', 'x')")
            count = len(list(connection.notifies(timeout=0)))
            return str(found[0]), count

    relay = DatabaseRelay(postgres.conninfo())
    with anyio.fail_after(BOUND_S):
        async with anyio.create_task_group() as group:
            await group.start(relay.serve)

            assert await anyio.to_thread.run_sync(told, relay.conninfo) == ("off", 3)
            relay.is_deaf = True
            assert await anyio.to_thread.run_sync(told, relay.conninfo) == ("off", 0)
            relay.is_deaf, relay.is_read_only = False, True
            assert await anyio.to_thread.run_sync(told, relay.conninfo) == ("on", 3)
            group.cancel_scope.cancel()


def test_a_notification_in_two_parts_is_lost_as_a_whole() -> None:
    relay = DatabaseRelay("postgresql://u:p%40@db:6000/chats")
    relay.is_deaf = True
    bend = relay._back()
    ready, heard = b"Z\0\0\0\x05I", b"A\0\0\0\x08abcd"
    assert bend(ready + heard[:3]) == ready
    assert bend(heard[3:] + ready[:2]) == b""
    assert bend(ready[2:]) == ready
    assert relay.conninfo.startswith("postgresql://u:p%40@127.0.0.1:0/chats?")
