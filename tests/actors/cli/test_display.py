"""Progress is a line that is kept up to date on a terminal, and plain lines elsewhere."""

import re
from datetime import UTC, datetime
from io import StringIO

import pytest
from rich.console import Console

from turnkeeper.actors.cli._display import Display, many, print_list, print_report, printable
from turnkeeper.actors.cli._protocol import Start
from turnkeeper.actors.cli._replay import Replay
from turnkeeper.actors.cli._report import Report, empty_report
from turnkeeper.actors.cli._users import Kill
from turnkeeper.runtime import Ports


def console(*, is_terminal: bool) -> tuple[Console, StringIO]:
    out = StringIO()
    return Console(file=out, force_terminal=is_terminal, width=80, legacy_windows=False), out


def replay(display: Display) -> Replay:
    start = Start(
        db="x.db",
        is_own_journal=True,
        started_at=datetime(2025, 1, 1, tzinfo=UTC),
        pace_s=0.0,
        view_events_max=40,
        parts=(),
    )
    return Replay(
        start=start, users=(), planned_kills=[Kill(1, 0)], ports=Ports(), changed=display.changed
    )


def play(display: Display) -> None:
    playing = replay(display)
    with display:
        for playing.acknowledged in range(0, 4_001, 500):
            playing.logged = 3 * playing.acknowledged
            playing.seconds = playing.acknowledged / 1_000
            if playing.acknowledged == 2_000:
                playing.kills = 1
            if playing.acknowledged == 2_500:
                playing.restarts = 1
            display.changed(playing)


def test_elsewhere_than_on_a_terminal_what_happens_is_told_in_plain_lines() -> None:
    errors, out = console(is_terminal=False)

    play(Display(errors, 4_000))

    assert out.getvalue().splitlines() == [
        "1,000 of 4,000 chat messages acknowledged",
        "worker killed (SIGKILL, 1 of 1) after 2,000 of 4,000 chat messages",
        "2,000 of 4,000 chat messages acknowledged",
        "worker started again, and has recovered the unfinished turns",
        "3,000 of 4,000 chat messages acknowledged",
        "4,000 of 4,000 chat messages acknowledged",
    ]


def test_on_a_terminal_a_line_of_at_most_eighty_columns_is_kept_up_to_date() -> None:
    errors, out = console(is_terminal=True)

    play(Display(errors, 4_000))

    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    lines = [line for line in re.split(r"[\r\n]", plain) if line]
    last = lines[-1]
    assert last.startswith("4,000 of 4,000 chat messages")
    assert "3,000 events/s, restarts: 1" in last
    assert len(last) <= 80
    assert any("worker killed (SIGKILL, 1 of 1)" in line for line in lines)
    assert not any("acknowledged" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Größe 7 — 日本\n\tok", "Größe 7 — 日本\n\tok"),
        ("\x1b[2J\x07\r", "\\x1b[2J\\x07\\r"),
        ("\u202eevil", "\\u202eevil"),
        ("\udcff", "\\udcff"),
    ],
)
def test_what_could_drive_a_terminal_is_shown_and_not_sent(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_long_list_is_cut_and_says_by_how_much() -> None:
    errors, out = console(is_terminal=False)

    print_list(errors, "these:", [f"line {n}" for n in range(1_030)])

    lines = out.getvalue().splitlines()
    assert lines[:2] == ["these:", "  line 0"]
    assert lines[-2:] == ["  line 19", "  … and 1,010 more"]


def test_what_is_not_as_promised_is_told_in_place_of_the_good_news() -> None:
    errors, out = console(is_terminal=False)
    clean = empty_report([])
    broken = Report(
        problems=(),
        counts={**clean.counts, "lost": 2},
        by_policy={"queue": {**clean.counts, "lost": 2}},
        kills=1,
        broken=["message 1 is lost", "message 2 is lost"],
    )

    print_report(errors, broken)

    lines = out.getvalue().splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("… lost")] == ["2"]
    assert "worker killed once;" in lines[-4]
    assert lines[-3:] == [
        "NOT as promised, 2 times:",
        "  message 1 is lost",
        "  message 2 is lost",
    ]


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 turns"), (1, "1 turn"), (2, "2 turns"), (1_000, "1,000 turns")]
)
def test_a_number_of_things_has_its_plural(count: int, said: str) -> None:
    assert many(count, "turn") == said
