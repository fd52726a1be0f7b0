"""The report of a stress run: the audit of its journal, the latencies, and the page with plots.

The numbers need nothing else; the page's plots need matplotlib (the extra `report`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING

from turnkeeper.runtime.lowlevel import LATE_BOUNDS_S, Lateness

from ..journal import Journal
from ..recordings.audit import Receipts, audit_journal
from ._display import times
from ._report import Report
from ._script import script
from ._stress_run import SAMPLE_S, Outage, Sample, Stress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["StressReport", "can_draw", "make_stress_report", "page_of", "quantiles_ms"]

QUANTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}

# How many prefixes of each log are rebuilt; all of them would take hours for ten thousand logs.
_PREFIXES_MAX = 6


@dataclass(frozen=True, slots=True)
class StressReport:
    """Everything that is reported at the end."""

    account: Report
    options: Mapping[str, object]
    latencies: Sequence[float]
    """Seconds from when each chat message was due until it was durable or refused."""
    samples: Sequence[Sample]
    outages: Sequence[Outage]
    unserved: Mapping[str, int]
    memory_max: int
    lateness: Lateness

    @property
    def is_ok(self) -> bool:
        """True if every promise held, and the run came to its end."""
        return self.account.exit_status == 0

    @property
    def latency_ms(self) -> Mapping[str, float]:
        return quantiles_ms(self.latencies)

    @property
    def late_ms(self) -> Mapping[str, float]:
        """How late the workers' event loops ran their timers."""
        return {name: 1e3 * self.lateness.quantile_s(part) for name, part in QUANTILES.items()}

    @property
    def late_histogram(self) -> Mapping[str, int]:
        """How many measurements of these loops are up to each bound, and above the last."""
        names = [f"≤ {1e3 * bound:g} ms" for bound in LATE_BOUNDS_S]
        return dict(zip([*names, "later"], self.lateness.counts, strict=True))

    @property
    def recovery_s(self) -> Sequence[float]:
        """Seconds from each kill until a worker was ready again."""
        return [o.until - o.at for o in self.outages if o.until is not None]

    def as_json(self) -> dict[str, object]:
        account = self.account.as_json()
        del account["problems"]  # of an input, and there is none
        return {
            "ok": self.is_ok,
            **account,
            "latency_ms": {name: round(ms, 3) for name, ms in self.latency_ms.items()},
            "recovery_s": [round(seconds, 3) for seconds in self.recovery_s],
            "unserved": dict(self.unserved),
            "worker_memory_max": self.memory_max,
            "loop_late_ms": {name: round(ms, 3) for name, ms in self.late_ms.items()},
            "loop_late_histogram": self.late_histogram,
            "options": dict(self.options),
        }


async def make_stress_report(
    stress: Stress,
    journal: Journal,
    *,
    options: Mapping[str, object],
    stopped: str | None,
    checked: Callable[[], None],
) -> StressReport:
    """Audit the journal, conversation by conversation; `checked` is called after each."""
    crowd, seed = stress.crowd, stress.start.seed

    def receipts() -> Iterator[Receipts]:
        for one in crowd.used:
            name = one.conversation_id
            yield replace(one, recorded=script(seed, name, crowd.exchanges(name)))
            checked()

    audit = await audit_journal(journal, receipts(), prefixes_max=_PREFIXES_MAX)
    counts = {
        **audit.counts(),
        "sent": crowd.sent,
        "overlapped": crowd.overlapped,
        "rejected": crowd.rejected,
    }
    account = Report(
        problems=(),
        counts=counts,
        by_policy={},
        broken=[*audit.problems, *crowd.problems],
        seed=seed,
        kills=stress.kills,
        seconds=stress.seconds,
        stopped=stopped,
    )
    return StressReport(
        account=account,
        options=options,
        latencies=crowd.latencies,
        samples=stress.samples,
        outages=stress.outages,
        unserved=crowd.unserved,
        memory_max=stress.memory_max,
        lateness=stress.lateness,
    )


def quantiles_ms(seconds: Sequence[float]) -> Mapping[str, float]:
    """Return the quantiles of the latencies, in milliseconds."""
    ordered = sorted(seconds)
    if not ordered:
        return dict.fromkeys(QUANTILES, 0.0)
    last = len(ordered) - 1
    return {name: 1e3 * ordered[round(part * last)] for name, part in QUANTILES.items()}


# --- the page ------------------------------------------------------------------------------------


def can_draw() -> bool:
    """True if matplotlib is installed."""
    return find_spec("matplotlib") is not None


def page_of(report: StressReport) -> str:
    """Return one self-contained HTML file with the verdict, the numbers and the plots."""
    account = report.account
    verdict = "Everything acknowledged is there, once and in order."
    if account.stopped is not None:
        verdict = f"Stopped before the end: {account.stopped}"
    if account.broken:
        verdict = f"NOT as promised, {times(len(account.broken))}."
    numbers: dict[str, object] = {
        **report.options,
        **account.counts,
        "kills": account.kills,
        "seconds": f"{account.seconds:.1f}",
        "events a second": f"{account.events_per_second:,.1f}",
        **{f"latency {name}": f"{ms:,.1f} ms" for name, ms in report.latency_ms.items()},
        **{f"event loop late, {name}": f"{ms:,.1f} ms" for name, ms in report.late_ms.items()},
        "recovery": ", ".join(f"{seconds:.2f} s" for seconds in report.recovery_s),
        "memory of the worker at most": f"{report.memory_max / 1e6:,.0f} MB",
    }
    rows = "\n".join(
        f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{escape(_said(value))}</td></tr>"
        for name, value in numbers.items()
    )
    broken = "\n".join(f"<li>{escape(line)}</li>" for line in account.broken[:100])
    return _PAGE.format(
        color="#176f3d" if report.is_ok else "#b3261e",
        verdict=escape(verdict),
        broken=f"<ul>{broken}</ul>" if broken else "",
        plots=_plots(report),
        rows=rows,
    )


def _said(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>turnkeeper stress</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
h1 {{ color: {color}; font-size: 1.4rem }}
svg {{ width: 100%; height: auto }}
th {{ text-align: left; font-weight: normal; padding-right: 2rem }}
td {{ text-align: right; font-variant-numeric: tabular-nums }}
</style>
<h1>{verdict}</h1>
{broken}
{plots}
<table>
{rows}
</table>
</html>
"""


def _plots(report: StressReport) -> str:
    """Plot the course of the run, as an SVG element."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(10, 10), layout="constrained")
    latency, throughput, depth = figure.subplots(3, 1, sharex=True)
    samples = report.samples
    times = [sample.at for sample in samples]
    _plot_latency(latency, report)
    per_s = [
        (after.logged + after.acknowledged - before.logged - before.acknowledged)
        / max(SAMPLE_S / 2, after.at - before.at)
        for before, after in pairwise(samples)
    ]
    throughput.plot(times[1:], per_s, color="tab:blue")
    throughput.set_ylabel("acknowledgements a second")
    depth.plot(times, [s.waiting for s in samples], color="tab:blue", label="in all mailboxes")
    depth.plot(times, [s.waiting_max for s in samples], color="tab:orange", label="in the fullest")
    throughput.set_ylim(bottom=0)
    depth.set_ylim(bottom=0)
    depth.set_ylabel("chat messages waiting")
    depth.set_xlabel("seconds")
    depth.legend(loc="upper left")
    for axes in (latency, throughput, depth):
        axes.grid(alpha=0.3)
        for n, outage in enumerate(report.outages):
            until = outage.at if outage.until is None else outage.until
            label = "worker killed, until another is ready" if n == 0 and axes is latency else None
            axes.axvspan(outage.at, until, color="tab:red", alpha=0.3, label=label)
    latency.legend(loc="upper left")
    out = StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def _plot_latency(axes: Axes, report: StressReport) -> None:
    for name, color in (("p50", "tab:green"), ("p99", "tab:orange"), ("max", "tab:gray")):
        points = [
            (after.at, quantiles_ms(report.latencies[before.answered : after.answered]))
            for before, after in pairwise(report.samples)
            if after.answered > before.answered
        ]
        axes.plot([at for at, _ in points], [ms[name] for _, ms in points], color=color, label=name)
    axes.set_yscale("log")
    axes.set_ylabel("ms until answered for")
