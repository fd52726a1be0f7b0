"""`turnkeeper inspect`: a journal is shown beside the process that writes it, and never written."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from turnkeeper.actors.cli._app import app

from .. import postgres
from .test_serve import BOUND_S, EXAMPLE, send, started

pytestmark = pytest.mark.in_parts(2)

KINDS = ("sqlite", "postgres")


@pytest.fixture(params=KINDS)
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Sequence[str]]]:
    """Return a journal that does not exist yet: its name, and its schema as arguments."""
    if request.param == "sqlite":
        yield str(tmp_path / "chats.db"), ()
    else:
        with postgres.schema() as schema:
            yield postgres.conninfo(), ("--schema", schema)


def test_a_journal_is_shown_live_beside_the_process_that_writes_it(
    tmp_path: Path, journal: tuple[str, Sequence[str]]
) -> None:
    db, schema = journal
    where = ("--postgres" if db.startswith("postgres") else "--db", db, *schema)
    with started(tmp_path, "serve", f"{EXAMPLE}:support", *where) as (writer, _):
        assert send(writer).json()["end"]["outcome"] == "completed"
        with started(tmp_path, "inspect", db, *schema) as (address, process):
            chats = f"{address}/v1/conversations"
            (row,) = httpx.get(chats, timeout=BOUND_S).json()["conversations"]
            assert (row["id"], row["owned"]) == ("alice", "elsewhere")
            url = f"{chats}/alice/events"
            after = {"after": row["head"]}
            with httpx.stream("GET", url, params=after, timeout=BOUND_S) as stream:
                assert send(writer, {"content": "and again"}).status_code == 200
                data = (line for line in stream.iter_lines() if line.startswith("data:"))
                ended = next(line for line in data if '"turn_ended"' in line)
            assert json.loads(ended.removeprefix("data:"))["seq"] == row["head"] * 2

            refused = httpx.post(f"{chats}/alice/messages", json={"content": "no"}, timeout=BOUND_S)
            assert refused.status_code == 405
            verified = httpx.post(f"{chats}/alice/verify", json={}, timeout=BOUND_S)
            assert verified.json() == {"events": row["head"] * 2, "is_sound": True}
            assert httpx.get(f"{address}/v1/self", timeout=BOUND_S).json()["is_read_only"]
            assert "<tk-inspector>" in httpx.get(f"{address}/inspector/", timeout=BOUND_S).text
            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND_S) == 0
            assert process.stderr is not None
            assert process.stderr.read() == "turnkeeper: stopped\n"
        # It has taken no ownership: the writer goes on with its epoch.
        assert send(writer, {"content": "still mine"}).json()["end"]["outcome"] == "completed"


def test_words_are_found_beside_the_process_that_keeps_an_index_of_them(
    tmp_path: Path, journal: tuple[str, Sequence[str]]
) -> None:
    db, schema = journal
    where = ("--postgres" if db.startswith("postgres") else "--db", db, *schema)
    with (
        started(tmp_path, "serve", f"{EXAMPLE}:support", "--search", *where) as (writer, _),
        started(tmp_path, "inspect", db, *schema) as (reader, _),
    ):
        send(writer, {"content": "about penguins"})
        for address in (writer, reader):
            found: httpx.Response | None = None
            while found is None or (found.status_code == 200 and not found.json()["hits"]):
                # It is indexed a moment later.
                found = httpx.get(f"{address}/v1/search?words=penguins", timeout=BOUND_S)
            assert found.status_code == 200, found.text
            assert found.json()["hits"][0]["conversation_id"] == "alice"


def test_a_journal_that_is_not_there_is_not_made(
    tmp_path: Path, journal: tuple[str, Sequence[str]]
) -> None:
    db, schema = journal

    refused = CliRunner().invoke(app, ["inspect", db, *schema])

    assert refused.exit_code == 2
    assert len(refused.stderr.splitlines()) == 1
    assert "nothing was created" in refused.stderr or not (tmp_path / "chats.db").exists()


@pytest.mark.parametrize("db", ["dbname=chats password=secret", "mysql://ann:secret@db/chats"])
def test_a_database_that_is_no_url_to_inspect_is_refused_without_its_password(db: str) -> None:
    """It was the path of a file that was not there, and told as one."""
    refused = CliRunner().invoke(app, ["inspect", db])

    assert refused.exit_code == 2
    assert "postgresql://USER@HOST/DATABASE" in refused.stderr
    assert "secret" not in refused.stderr
