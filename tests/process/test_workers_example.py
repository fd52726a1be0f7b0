"""The example with two web workers: two real processes, one PostgreSQL, one of them killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
        "events after 4: 5 turn_started, 6 user_message, 7 agent_message, 8 turn_ended",
    ]
    assert ran.returncode == 0
