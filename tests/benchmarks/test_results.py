"""`make bench` writes a page that says what was measured, on what, and how it could be unfair."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks import _command, _harness, _machine
from benchmarks._baselines import FIGURES, describe
from benchmarks._harness import Measure, costlier, faster, skipped
from benchmarks._machine import Machine
from benchmarks._plot import rates, ratios
from benchmarks._raw_sqlite import connect
from benchmarks._results import Run, section, with_sections
from benchmarks.cores import allowed
from benchmarks.journal import by_length
from turnkeeper.actors.journals.sqlite.schema import open_for_writing

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("runtime", "lists")
MACHINE = Machine("Processor 1", 2, 24, "Linux 6.1", "CPython 3.11", 180.4, {"anyio": "4.0"})
TELL = faster(
    "tell_asyncio",
    [(2.0, 3.0), (2.0, 5.0), (4.0, 4.0)],
    baseline="asyncio.Queue(1024)",
    goal="≥ 1.0",
)


def run_of(group: str, *measures: Measure) -> Run:
    return Run(
        group,
        measures,
        MACHINE,
        is_quick=False,
        day="2024-01-02",
        version="0.1.0",
        commit="abc1234567",
        load_before=0.1,
        load_after=1.2,
        minutes=3.2,
    )


def row(page: str, name: str) -> list[str]:
    (line,) = (line for line in page.splitlines() if line.startswith(f"| `{name}`"))
    return [cell.strip() for cell in line.strip("| ").split(" | ")]


def test_a_row_has_both_figures_and_the_median_ratio_with_its_spread_and_rounds() -> None:
    found = row(section(run_of("runtime", TELL)), "tell_asyncio")

    assert found == [
        "`tell_asyncio`<br>a `tell` to an actor on asyncio",
        "2.00 µs",
        "asyncio.Queue(1024): 4.00 µs",
        "1.5 times as fast (1 to 2.5, 3 rounds)",
        "≥ 1.0",
        "met",
    ]


def test_a_goal_that_is_missed_is_said_and_one_that_is_not_set_is_not() -> None:
    pairs = [(3.0, 2.0)]
    missed = costlier("page_among_20000", pairs, baseline="raw", goal="≤ 1.2")
    free = costlier("turns_1_listed", pairs, baseline="raw", goal="")
    page = section(run_of("lists", missed, free))

    assert row(page, "page_among_20000")[3:] == [
        "1.5 times as much, one round",
        "≤ 1.2",
        "**not met**",
    ]
    assert "met" not in row(page, "turns_1_listed")[-1]


def test_a_skipped_peer_is_told_with_its_reason_and_never_as_met() -> None:
    missing = skipped("ask_vs_autogen", "AutoGen core, ask", "≥ 20", "not installable: gone")
    line = row(section(run_of("runtime", missing)), "ask_vs_autogen")

    assert "skipped: not installable: gone" in line
    assert "met" not in line


def test_a_section_says_when_of_which_commit_on_what_and_under_which_load() -> None:
    run = replace(run_of("runtime", TELL), peers={"pykka": "4.5"})
    said = section(run)

    for fact in (
        "python benchmarks runtime`",
        "2024-01-02",
        "0.1.0, commit abc1234567",
        "Processor 1, 2 cores, 24 GiB",
        "180 µs",
        "Linux 6.1, CPython 3.11, anyio 4.0, pykka 4.5",
        "Load 0.1 before, 1.2 after; the run took 3 min.",
    ):
        assert fact in said


def test_a_quick_run_and_one_beside_other_work_say_so() -> None:
    run = run_of("runtime", TELL)
    quiet, quick, busy = (
        section(each) for each in (run, replace(run, is_quick=True), replace(run, load_before=1.4))
    )

    assert ("quick run" in quiet, "other work" in quiet) == (False, False)
    assert ("quick run" in quick, "other work" in quick) == (True, False)
    assert "benchmarks runtime --quick`" in quick
    assert ("quick run" in busy, "other work" in busy) == (False, True)


def test_a_run_to_the_largest_sizes_names_its_option() -> None:
    run = replace(run_of("runtime", TELL), is_full=True)

    assert "`python benchmarks runtime --full`" in section(run)


def test_each_baseline_is_described_once_with_how_it_could_be_unfair() -> None:
    again = replace(TELL, name="tell_trio")
    said = section(run_of("runtime", TELL, again))

    assert said.count("- **The loop's limit**") == 1
    assert " Unfair to us: " in said
    assert " Unfair to it: " in said


def test_a_run_replaces_its_section_and_no_other() -> None:
    lists = run_of("lists", costlier("turns_1_listed", [(1.0, 1.0)], baseline="none", goal=""))
    first = with_sections("", GROUPS, [lists, run_of("runtime", TELL)])
    newer = replace(run_of("runtime", replace(TELL, value=7.0)), day="2024-02-03")
    second = with_sections(first, GROUPS, [newer])

    assert [second.index(f"## {group}") for group in GROUPS] == sorted(
        second.index(f"## {group}") for group in GROUPS
    )
    assert section(lists) in first
    assert section(lists) in second
    assert section(newer) in second
    assert section(run_of("runtime", TELL)) not in second
    assert with_sections(second, GROUPS, []) == second


def test_the_page_and_its_plot_are_written_when_a_group_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_command, "FOLDER", tmp_path)
    monkeypatch.setattr(_command, "PAGE", tmp_path / "RESULTS.md")
    run = replace(run_of("runtime", TELL), plots=[("Ratios", "results/runtime.svg")])

    _command.write(run)

    assert section(run) in (tmp_path / "RESULTS.md").read_text()
    assert "![Ratios](results/runtime.svg)" in section(run)
    assert "tell_asyncio" in (tmp_path / "results" / "runtime.svg").read_text()


def test_a_group_that_fails_is_told_and_the_others_are_measured_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_group(group: str, **_: bool) -> dict[str, Measure]:
        if group == "core":
            raise OSError("the disk is gone")
        return {"tell": replace(TELL, goal="")}

    monkeypatch.setattr(_command, "measure_group", measure_group)
    monkeypatch.setattr("sys.argv", ["benchmarks", "core", "runtime"])

    assert _command.main() == 1
    told = capsys.readouterr()
    assert "runtime.tell" in told.out
    assert "the disk is gone" in told.err
    assert "runtime: group 2 of 2" in told.err
    assert "these groups failed, and their sections stay as they were: core" in told.err


def test_a_peer_that_never_ends_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_harness, "PEER_S_MAX", 0.01)
    monkeypatch.setattr(_harness, "CACHE", tmp_path)
    monkeypatch.setattr(_harness, "FOLDER", tmp_path)
    (tmp_path / "peer" / "bin").mkdir(parents=True)
    (tmp_path / "peer" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "peer" / "ready").touch()
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(60)\n")

    with pytest.raises(_harness.PeerMissing, match="not done within"):
        _harness.run_peer("peer", [], "waits.py")


def test_a_plot_has_a_row_for_each_ratio_with_its_goal_in_light_and_dark() -> None:
    missing = skipped("ask_vs_autogen", "AutoGen core, ask", "≥ 20", "gone")
    drawn = ET.fromstring(ratios("Ratios <&>", [TELL, missing]))
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    kinds = [shape.get("class") for shape in drawn.iter()]

    assert "tell_asyncio" in texts
    assert "ask_vs_autogen" not in texts
    assert [kind for kind in kinds if kind in {"met", "goal", "spread met"}] == [
        "spread met",
        "goal",
        "met",
    ]
    assert "prefers-color-scheme: dark" in ratios("", [TELL])


def test_rates_are_drawn_as_a_curve_for_each_name_with_an_empty_log_at_the_left() -> None:
    drawn = ET.fromstring(rates("t", {"ours": {0: 900.0, 1_000: 1_000.0}, "peer": {1_000: 10.0}}))
    curves = [
        each.get("d")
        for each in drawn.iter("{http://www.w3.org/2000/svg}path")
        if "curve" in each.get("class", "")
    ]

    assert len(curves) == 2
    across = [float(x) for x in re.findall(r"(?:M|L) ([\d.]+)", curves[0] or "")]
    assert across == sorted(across)
    assert {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")} >= {
        "ours",
        "peer",
        "1,000",
    }


def test_the_raw_baseline_has_each_setting_of_a_journals_file(tmp_path: Path) -> None:
    """Otherwise the ratio would say something about the settings, and not about the journal."""
    settings = (
        "page_size",
        "journal_mode",
        "synchronous",
        "fullfsync",
        "checkpoint_fullfsync",
        "secure_delete",
        "cache_size",
    )
    with (
        closing(connect(tmp_path / "raw.db", writers=1)) as raw,
        closing(
            open_for_writing(tmp_path / "ours.db", synchronous="FULL", busy_wait_s=1.0)
        ) as ours,
    ):
        for setting in settings:
            pragma = f"PRAGMA {setting}"
            assert raw.execute(pragma).fetchone() == ours.execute(pragma).fetchone(), setting


def test_nothing_that_names_the_machine_is_told() -> None:
    assert _machine.kernel("6.1.0-somebody-built-it") == "6.1.0"
    assert _machine.cpu_model("processor : 0\nmodel name\t: Processor 1 @ 3 GHz\n") == (
        "Processor 1 @ 3 GHz"
    )
    assert _machine.cpu_model("Features : half") == ""
    assert _machine.memory_gib("MemTotal:       24600000 kB\nMemFree: 1 kB") == 23


def test_the_committed_page_is_one_that_the_program_writes() -> None:
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text()

    assert with_sections(page, _command.GROUPS, []) == page
    groups = re.findall(r"<!-- group (\w+) -->", page)
    assert groups == [group for group in _command.GROUPS if group in groups]
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page):
        assert (ROOT / "benchmarks" / path).is_file(), path


def test_each_figure_of_the_committed_page_is_described() -> None:
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    for group in re.findall(r"<!-- group (\w+) -->", page):
        (text,) = re.findall(f"<!-- group {group} -->(.*?)<!-- end of {group} -->", page, re.DOTALL)
        names = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)

        assert names, group
        assert [name for name in names if describe(group, name) == ("", None)] == [], group


def test_a_group_that_was_not_measured_is_named() -> None:
    page = with_sections("", GROUPS, [run_of("runtime", TELL)])

    assert "Not measured yet: `lists`." in page
    assert "Not measured yet" not in with_sections(page, ("runtime",), [])


def test_each_group_has_its_figures_described() -> None:
    assert set(FIGURES) == set(_command.GROUPS)
    for group in _command.GROUPS:
        assert (ROOT / "benchmarks" / f"{group}.py").is_file()


@pytest.mark.parametrize(
    ("used", "machine", "most"), [(1.0, 2, 2.0), (1.25, 2, 1.6), (0.4, 2, 2.0), (1.25, 8, 2.0)]
)
def test_two_processes_may_do_as_much_as_the_cores_that_one_leaves_allow(
    used: float, machine: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: machine)

    assert allowed(used) == most


def test_the_plot_of_lengths_has_the_rates_and_nothing_else_that_a_peer_has_told() -> None:
    """A peer also tells what a row took of the processor, and what many at once took."""
    assert by_length({"at_100": 2.0, "at_100_cpu": 1.0, "many": 5.0}) == {100: 2.0}
