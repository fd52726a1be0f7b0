"""Draws the plots of the results: SVG files with light and dark colours of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from ._harness import Measure

WIDTH, ROW, LEFT, RIGHT, TOP = 760, 24, 290, 30, 34
DECADES = (0.01, 0.1, 1.0, 10.0, 100.0)
COLOURS = ("a", "b", "c", "d")

STYLE = """
text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #1f2328 }
.soft { fill: #59636e } .end { text-anchor: end } .mid { text-anchor: middle }
.paper { fill: #ffffff } .line { stroke: #d1d9e0; fill: none } .strong { stroke: #8c959f }
.spread { stroke-width: 3; opacity: .55 } .goal { stroke: #1f2328; stroke-width: 2 }
.met { fill: #1a7f37; stroke: #1a7f37 } .missed { fill: #bc4c00; stroke: #bc4c00 }
.free { fill: #0969da; stroke: #0969da } .curve { fill: none; stroke-width: 2 }
.a { stroke: #0969da; fill: #0969da } .b { stroke: #bc4c00; fill: #bc4c00 }
.c { stroke: #8250df; fill: #8250df } .d { stroke: #1a7f37; fill: #1a7f37 }
path.curve { fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .soft { fill: #9198a1 } .paper { fill: #0d1117 }
  .line { stroke: #3d444d } .strong { stroke: #656c76 } .goal { stroke: #f0f6fc }
  .met { fill: #3fb950; stroke: #3fb950 } .missed { fill: #db6d28; stroke: #db6d28 }
  .free { fill: #4493f8; stroke: #4493f8 } .a { stroke: #4493f8; fill: #4493f8 }
  .b { stroke: #db6d28; fill: #db6d28 } .c { stroke: #ab7df8; fill: #ab7df8 }
  .d { stroke: #3fb950; fill: #3fb950 } path.curve { fill: none }
}
"""


def ratios(title: str, measures: Sequence[Measure]) -> str:
    """Draw a row for each measure that has a ratio: its median, its spread and its goal."""
    shown = [each for each in measures if each.ratio]
    height = TOP + ROW * len(shown) + 40
    bottom = TOP + ROW * len(shown) + 4
    parts = []
    for decade in DECADES:
        at, kind = _along(decade), "line strong" if decade == 1.0 else "line"
        parts.append(f'<path d="M {at:.1f} {TOP - 8} V {bottom}" class="{kind}"/>')
        parts.append(_text(at, bottom + 16, f"{decade:g}", "soft mid"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, bottom + 32, "times the baseline", "soft mid"))
    for row, measure in enumerate(shown):
        assert measure.ratio is not None
        y = TOP + ROW * row + ROW / 2
        kind = "free" if measure.met is None else "met" if measure.met else "missed"
        parts.append(_text(LEFT - 14, y + 4, measure.name, "end"))
        if measure.ratios:
            least, most = _along(min(measure.ratios)), _along(max(measure.ratios))
            parts.append(f'<path d="M {least:.1f} {y} H {most:.1f}" class="spread {kind}"/>')
        if measure.goal:
            at = _along(float(measure.goal.split()[1]))
            parts.append(f'<path d="M {at:.1f} {y - 8} V {y + 8}" class="goal"/>')
        at = _along(measure.ratio)
        parts.append(f'<circle cx="{at:.1f}" cy="{y}" r="4.5" class="{kind}"/>')
    return _svg(title, height, parts)


def _along(ratio: float) -> float:
    """Return the position of a ratio, by its logarithm; one off the scale is put at its end."""
    low, high = math.log10(DECADES[0]), math.log10(DECADES[-1])
    share = (math.log10(max(ratio, DECADES[0])) - low) / (high - low)
    return LEFT + min(share, 1.0) * (WIDTH - LEFT - RIGHT)


def rates(title: str, series: Mapping[str, Mapping[int, float]]) -> str:
    """Draw a curve for each name: its rate at each length, both by their logarithms."""
    left, right, top, bottom = 70, WIDTH - 30, 20, 340
    lengths = sorted({length for points in series.values() for length in points})
    speeds = [speed for points in series.values() for speed in points.values()]
    low, high = math.floor(math.log10(min(speeds))), math.ceil(math.log10(max(speeds)))
    first = math.log10(next(length for length in lengths if length) / 4)
    last = math.log10(lengths[-1])

    def x(length: int) -> float:  # an empty log stands a little before the shortest one
        share = (math.log10(length) - first) / (last - first) if length else 0.0
        return left + share * (right - left)

    def y(speed: float) -> float:
        return bottom - (math.log10(speed) - low) / max(1, high - low) * (bottom - top)

    parts = []
    for power in range(low, high + 1):
        parts.append(f'<path d="M {left} {y(10**power):.1f} H {right}" class="line"/>')
        parts.append(_text(left - 8, y(10**power) + 4, f"{10**power:,}", "soft end"))
    parts += [_text(x(length), bottom + 18, f"{length:,}", "soft mid") for length in lengths]
    parts.append(_text((left + right) / 2, bottom + 36, "events in the conversation before", "mid"))
    for at, (name, points) in enumerate(series.items()):
        kind = COLOURS[at % len(COLOURS)]
        places = [(x(length), y(points[length])) for length in sorted(points)]
        line = " L ".join(f"{across:.1f} {down:.1f}" for across, down in places)
        parts.append(f'<path d="M {line}" class="curve {kind}"/>')
        parts += [
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3.5" class="{kind}"/>'
            for across, down in places
        ]
        legend = bottom + 58 + 20 * at
        parts.append(f'<circle cx="{left + 6}" cy="{legend - 4}" r="4.5" class="{kind}"/>')
        parts.append(_text(left + 20, legend, name))
    return _svg(title, bottom + 66 + 20 * len(series), parts)


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" role="img">\n<title>{escape(title)}</title>\n'
        f'<style>{STYLE}</style>\n<rect width="{WIDTH}" height="{height:g}" class="paper"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
