"""The example with two web workers: two real processes, one PostgreSQL, one of them killed."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from uuid import uuid4

import httpx

from .. import postgres

EXAMPLE = Path(__file__).parents[2] / "examples" / "workers" / "workers.py"


def test_a_request_finds_the_owner_and_another_worker_takes_over_when_it_is_dead() -> None:
    ran = subprocess.run(
        [sys.executable, EXAMPLE],
        env={**os.environ, "DATABASE_URL": postgres.conninfo()},
        capture_output=True,
        text=True,
        check=False,
    )

    # An owner elsewhere is nothing to warn of.
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == [
        "'Hello' to the first worker: 'You said: Hello' by the first worker",
        "'My order?' to the second worker: 'You said: My order?' by the first worker",
        "the first worker is killed",
        "'Are you there?' to the second worker: 'You said: Are you there?' by the second worker",
        "events after 8: 9 turn_started, 10 user_message, 11 agent_message, 12 turn_ended",
    ]
    assert ran.returncode == 0


def test_what_the_owner_refuses_is_answered_at_the_other_worker_too() -> None:
    """It asked the owner again and again, and the client never got an answer."""
    started_worker = runpy.run_path(str(EXAMPLE))["started_worker"]
    chat, key = f"chats/{uuid4().hex}", {"idempotency-key": "once"}
    with ExitStack() as stack:
        workers = [stack.enter_context(started_worker(postgres.conninfo()))[0] for _ in range(2)]
        client = stack.enter_context(httpx.Client(timeout=60))
        for worker in workers:
            reply = client.post(f"{worker}/{chat}", content="hello", headers=key)
            assert reply.json()["worker"] == workers[0]
        for worker in workers:
            reply = client.post(f"{worker}/{chat}", content="something else", headers=key)
            assert reply.status_code == 500


def test_a_reader_that_comes_back_to_a_log_begun_anew_is_told_so() -> None:
    """By the seq alone it would go on in the new log, behind what it has of the old one."""
    started_worker = runpy.run_path(str(EXAMPLE))["started_worker"]
    chat = f"chats/{uuid4().hex}"
    with ExitStack() as stack:
        (worker, _) = stack.enter_context(started_worker(postgres.conninfo()))
        client = stack.enter_context(httpx.Client(base_url=worker, timeout=60))
        client.post(f"/{chat}", content="hello")

        def first_lines(**headers: str) -> list[str]:
            with client.stream("GET", f"/{chat}", headers=headers) as stream:
                return list(islice(stream.iter_lines(), 2))

        cursor = first_lines()[0].removeprefix("id: ")
        seq, _, event_id = cursor.partition(".")
        assert first_lines(**{"last-event-id": cursor})[0].startswith("id: 2.")
        another_log = f"{seq}.{event_id[::-1]}"
        assert first_lines(**{"last-event-id": another_log}) == ["id:", "event: gone"]
