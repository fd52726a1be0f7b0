"""The report of `torture`."""

from __future__ import annotations

import pytest
import typer

from turnkeeper.actors.cli._torture import report_verdict
from turnkeeper.actors.torture.checker import FAULTS, Finding, Verdict


def test_it_fits_a_terminal_and_no_line_ends_with_blanks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    findings = tuple(Finding(1, fault, "message 1", "its place") for fault in FAULTS)
    verdict = Verdict(findings, {"sent": 1_234_567, "acknowledged": 1}, {})

    with pytest.raises(typer.Exit):
        report_verdict(verdict, as_json=False, history=None)

    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line != line.rstrip() or len(line) > 80] == []
    assert "… attempts to send them          1,234,567" in lines
    (at,) = (n for n, line in enumerate(lines) if "the model saw too little" in line)
    assert lines[at].startswith("… blind")
    assert lines[at + 1].strip() == "something taken back"
