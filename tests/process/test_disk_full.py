"""The disk fills up, or breaks, under load."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from turnkeeper.actors import SQLiteJournal
from turnkeeper.actors.cli._stress_run import Stress

from .stressing import check, small_stress

pytestmark = [pytest.mark.parametrize("anyio_backend", ["asyncio"]), pytest.mark.in_parts(2)]

DISK_BYTES = 8 << 20
REFUSED_MEANWHILE = 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes, in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small file system")
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("room", [0, 200_000])
async def test_conversations_go_on_when_a_full_disk_has_room_again(
    small_disk: Path, room: int
) -> None:
    """Full to the last byte, or so that a commit still fits in here and there."""
    db = small_disk / "chats.db"
    ballast = small_disk / "ballast"
    is_busy, is_noticed = anyio.Event(), anyio.Event()

    def changed(stress: Stress) -> None:
        if stress.crowd.acknowledged >= REFUSED_MEANWHILE:
            is_busy.set()
        if stress.crowd.unserved.total() >= REFUSED_MEANWHILE:
            is_noticed.set()

    def fill() -> None:
        with ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                file.truncate(max(0, file.tell() - room))

    stress = small_stress(str(db), duration_s=math.inf, rate=150.0, changed=changed)
    async with anyio.create_task_group() as group:
        group.start_soon(stress.run)
        await is_busy.wait()
        fill()
        await is_noticed.wait()
        async with SQLiteJournal(db, read_only=True) as journal:
            assert await journal.list()
        ballast.unlink()
        stress.crowd.stop()

    report = await check(stress)
    assert report.unserved["JournalUnavailable"] > 0


async def test_on_a_disk_that_fails_nothing_more_is_promised_until_the_process_is_started_again(
    tmp_path: Path,
) -> None:
    """A write that fails is no full disk: what it left behind cannot be known."""
    stress = small_stress(
        str(tmp_path / "chats.db"),
        points=[("before a commit", 20)],
        how="break",
        kills=[0.0],
        duration_s=0.8,
    )

    await stress.run()

    report = await check(stress)
    assert report.unserved["JournalUnavailable"] > 0
    assert report.account.kills == 1
