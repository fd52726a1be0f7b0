"""Our part of pytest-trio's world: tests as its users write them, in a run of their own.

Here anyio's plugin takes every async test; where pytest-trio is used, it does not.
"""

import subprocess
import sys
from pathlib import Path

USERS = Path(__file__).parent / "pytest_trio_users.py"


def test_what_users_of_pytest_trio_write_passes() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-o", "anyio_mode=strict"]
    done = subprocess.run(
        [*command, str(USERS)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout
