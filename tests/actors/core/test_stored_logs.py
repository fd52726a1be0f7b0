"""Logs that were stored once, and what the folds made of them then.

They hold two promises over time: what an old version wrote can be read, and a fold never changes
what it makes of a log without saying so in the version of the snapshots. `python -m
tests.actors.core.test_stored_logs` writes down anew what the folds make of the logs; the logs stay.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnkeeper.actors.core.snapshots import SNAPSHOT_VERSION
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.events import decode_event, encode_event

_FOLDER = Path(__file__).parent / "stored"
_LOGS = sorted(_FOLDER.glob("*.log.jsonl"))


def _folded(log: Path) -> dict[str, object]:
    state = Folded()
    for line in log.read_bytes().splitlines():
        state.fold(decode_event(line))
    snapshot = state.to_snapshot()
    return {"version": snapshot.version, "folds": json.loads(snapshot.payload)}


def _written(log: Path) -> Path:
    return log.with_name(log.name.replace(".log.jsonl", ".folds.json"))


def test_there_are_stored_logs() -> None:
    assert len(_LOGS) == 2


@pytest.mark.parametrize("log", _LOGS, ids=lambda path: path.name)
def test_no_fold_changes_what_it_makes_of_a_log_without_a_new_version(log: Path) -> None:
    written = json.loads(_written(log).read_text())
    folded = _folded(log)
    if written["version"] == SNAPSHOT_VERSION:
        assert folded == written, "raise FOLDS_VERSION, then write the folds anew"
    else:
        pytest.fail(
            "the version is new: write the folds anew with the command in the module's head"
        )


@pytest.mark.parametrize("log", _LOGS, ids=lambda path: path.name)
def test_a_stored_event_is_written_as_it_was_read(log: Path) -> None:
    for line in log.read_bytes().splitlines():
        event = decode_event(line)
        assert decode_event(encode_event(event)) == event


if __name__ == "__main__":
    for path in _LOGS:
        _written(path).write_text(json.dumps(_folded(path), indent=1, sort_keys=False) + "\n")
