"""Draws the trace of a page's program, as a picture that is read in light and in dark.

    .venv/bin/python tools/draw_trace.py [PAGE [PICTURE]]

Runs the Python blocks of the page (`docs/watching.md`), takes the spans that its `exporter` was
given, and writes `docs/trace.svg`: a bar for each span, at its place in time, below its parent.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan

DOCS = Path(__file__).parents[1] / "docs"
WIDTH, ROW, LEFT, RIGHT, TOP = 900, 30, 250, 90, 34
KINDS = ("send", "invoke_agent", "chat", "execute_tool", "commit")

STYLE = """
text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #1f2328 }
.quiet { fill: #59636e }
.line { stroke: #d1d9e0 }
.back { fill: #ffffff }
.bar { fill: #8c959f }
.send { fill: #1a7f64 } .invoke_agent { fill: #0969da } .chat { fill: #8250df }
.execute_tool { fill: #bc4c00 } .commit { fill: #9a6700 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .quiet { fill: #9198a1 } .line { stroke: #3d444d } .back { fill: #0d1117 }
  .send { fill: #3fb68b } .invoke_agent { fill: #4493f8 } .chat { fill: #ab7df8 }
  .execute_tool { fill: #db6d28 } .commit { fill: #d29922 }
}
"""


def run(page: Path) -> Sequence[ReadableSpan]:
    """Run the program of a page; return the spans that it exported."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "page"}
    exec(compile("\n".join(blocks), str(page), "exec"), names)  # noqa: S102 - our own page
    spans: Sequence[ReadableSpan] = names["exporter"].get_finished_spans()  # type: ignore[attr-defined]
    return spans


def rows(
    spans: Sequence[ReadableSpan], parent: int | None = None, depth: int = 0
) -> Iterator[tuple[ReadableSpan, int]]:
    """Yield each span with its depth, parents first, siblings by their beginning."""
    for span in sorted(spans, key=lambda span: span.start_time or 0):
        if (span.parent.span_id if span.parent else None) == parent:
            yield span, depth
            assert span.context is not None, "an exported span has one"
            yield from rows(spans, span.context.span_id, depth + 1)


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None, "an exported span has begun"
    assert span.end_time is not None, "an exported span has ended"
    return span.start_time, span.end_time


def draw(spans: Sequence[ReadableSpan]) -> str:
    """Return the picture."""
    found = list(rows(spans))
    begin = min(times(span)[0] for span in spans)
    length = max(times(span)[1] for span in spans) - begin
    height = TOP + ROW * len(found) + 12
    scale = (WIDTH - LEFT - RIGHT) / length
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>A trace: each span as a bar, below its parent</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
    ]
    for tick in range(0, length // 1_000_000 + 1, 50):
        x = LEFT + tick * 1_000_000 * scale
        parts.append(
            f'<path class="line" d="M{x:.1f} {TOP - 8}V{height - 8}"/>'
            f'<text class="quiet" x="{x:.1f}" y="{TOP - 14}" text-anchor="middle">{tick} ms</text>'
        )
    for row, (span, depth) in enumerate(found):
        start, end = times(span)
        y, x = TOP + ROW * row, LEFT + (start - begin) * scale
        wide = max(2.0, (end - start) * scale)
        kind = span.name.split()[0]
        style = f"bar {kind}" if kind in KINDS else "bar"
        parts.append(
            f'<text x="{12 + 14 * depth}" y="{y + 18}">{escape(span.name)}</text>'
            f'<rect class="{style}" x="{x:.1f}" y="{y + 5}" width="{wide:.1f}" height="18" rx="3"/>'
            f'<text class="quiet" x="{x + wide + 6:.1f}" y="{y + 18}">'
            f"{(end - start) / 1e6:.1f} ms</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def main(page: Path = DOCS / "watching.md", picture: Path = DOCS / "trace.svg") -> None:
    picture.write_text(draw(run(page)), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
