"""Draws the pictures of the documentation. Usage: python tools/draw_pictures.py [FOLDER].

Each is an SVG file with its own light and dark colours; without a folder they go to
`docs/pictures`, where a test compares them with what this program draws.
"""

import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"

STYLE = """
:root { --ink: #1f2430; --soft: #6b7280; --line: #c9ced8; --paper: #ffffff;
        --user: #dbe7ff; --agent: #d9f2e3; --tool: #fdebd0; --hot: #c2410c; --hotfill: #ffe4d6 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ee; --soft: #9aa3b2; --line: #4a5162; --paper: #16181d;
          --user: #24406e; --agent: #1d4a35; --tool: #5a4320; --hot: #fb923c; --hotfill: #55281a } }
text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.soft { fill: var(--soft) } .bold { font-weight: 600 } .mid { text-anchor: middle }
.small { font-size: 11.5px } .mono { font-family: ui-monospace, monospace; font-size: 12px }
.box { stroke: var(--line); fill: var(--paper) } .user { fill: var(--user) }
.agent { fill: var(--agent) } .tool { fill: var(--tool) } .hot { fill: var(--hotfill) }
.line { stroke: var(--soft); fill: none; stroke-width: 1.4 }
.hotline { stroke: var(--hot); fill: none; stroke-width: 1.8 } .hottext { fill: var(--hot) }
.dash { stroke-dasharray: 4 4 } .gone { opacity: .45 }
"""


class Drawing:
    """Collects the parts of a picture."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>')

    def box(
        self, x: float, y: float, w: float, h: float, text: str = "", *, kind: str = "box"
    ) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5" class="box {kind}"/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + 4.5, text, "mid")

    def path(self, points: Sequence[tuple[float, float]], kind: str = "line") -> None:
        line = " L ".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path d="M {line}" class="{kind}"/>')

    def arrow(self, points: Sequence[tuple[float, float]], kind: str = "line") -> None:
        line = " L ".join(f"{x:g} {y:g}" for x, y in points)
        head = "hothead" if "hot" in kind else "head"
        self._parts.append(f'<path d="M {line}" class="{kind}" marker-end="url(#{head})"/>')

    def svg(self) -> str:
        width, height = self._size
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="var(--{colour})"/>'
            "</marker>"
            for name, colour in (("head", "soft"), ("hothead", "hot"))
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">\n<title>{escape(self._title)}</title>\n'
            f"<style>{STYLE}</style>\n<defs>{heads}</defs>\n"
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


# --- the five policies ---------------------------------------------------------------------------

LEFT, WHEN_A, WHEN_B = 86, 90, 205
"""Narrow, so that the texts can be read on a phone."""


def _lanes(title: str) -> Drawing:
    drawing = Drawing(440, 190, title)
    for y, name in ((42, "user"), (92, "agent"), (156, "then the view")):
        drawing.text(2, y + 4, name, "small soft")
    drawing.path([(LEFT, 124), (434, 124)], "line dash")
    drawing.box(WHEN_A, 26, 70, 30, "A", kind="user")
    drawing.arrow([(WHEN_A + 14, 56), (WHEN_A + 14, 75)])
    return drawing


def _view(drawing: Drawing, *events: str) -> None:
    for at, event in enumerate(events):
        kind = "user" if event in ("A", "B") else "agent"
        drawing.box(WHEN_A + at * 62, 138, 56, 28, event, kind=kind)


def queue() -> Drawing:
    drawing = _lanes("queue: B waits until the turn of A has ended")
    drawing.box(WHEN_B, 26, 76, 30, "B waits", kind="user")
    drawing.box(WHEN_A, 76, 165, 32, "answers A", kind="agent")
    drawing.arrow([(WHEN_B + 66, 56), (WHEN_B + 66, 75)])
    drawing.box(WHEN_A + 171, 76, 165, 32, "answers B", kind="agent")
    _view(drawing, "A", "a", "B", "b")
    return drawing


def interrupt() -> Drawing:
    drawing = _lanes("interrupt: the turn of A ends, what was said is kept, and B is answered")
    drawing.box(WHEN_B, 26, 70, 30, "B", kind="user")
    drawing.box(WHEN_A, 76, 114, 32, "answers A …", kind="agent")
    drawing.path([(WHEN_B + 3, 70), (WHEN_B + 3, 114)], "hotline")
    drawing.arrow([(WHEN_B + 24, 56), (WHEN_B + 24, 75)])
    drawing.box(WHEN_B + 8, 76, 128, 32, "answers B", kind="agent")
    drawing.text(WHEN_B + 144, 97, "A: interrupted", "small hottext")
    _view(drawing, "A", "a …", "B", "b")
    return drawing


def steer() -> Drawing:
    drawing = _lanes("steer: B joins the running turn at the agent's next step")
    drawing.box(WHEN_B, 26, 70, 30, "B", kind="user")
    drawing.box(WHEN_A, 76, 150, 32, "a step of A", kind="agent")
    drawing.arrow([(WHEN_B + 56, 56), (WHEN_B + 56, 75)])
    drawing.box(WHEN_A + 154, 76, 186, 32, "the next step, for A and B", kind="agent")
    _view(drawing, "A", "B", "ab")
    return drawing


def rollback() -> Drawing:
    drawing = _lanes("rollback: the turn of A ends and leaves the view, and B is answered")
    drawing.box(WHEN_B, 26, 70, 30, "B", kind="user")
    drawing.box(WHEN_A, 76, 114, 32, "answers A …", kind="agent gone dash")
    drawing.path([(WHEN_B + 3, 70), (WHEN_B + 3, 114)], "hotline")
    drawing.arrow([(WHEN_B + 24, 56), (WHEN_B + 24, 75)])
    drawing.box(WHEN_B + 8, 76, 128, 32, "answers B", kind="agent")
    drawing.text(WHEN_B + 144, 97, "A: rolled back", "small hottext")
    _view(drawing, "B", "b")
    drawing.text(WHEN_A + 130, 157, "the log keeps A and a …", "small soft")
    return drawing


def reject() -> Drawing:
    drawing = _lanes("reject: B is refused while the turn of A runs")
    drawing.box(WHEN_B, 26, 70, 30, "B", kind="user gone dash")
    drawing.text(WHEN_B + 80, 38, "TurnInProgress;", "small hottext")
    drawing.text(WHEN_B + 80, 54, "nothing is written", "small hottext")
    drawing.box(WHEN_A, 76, 230, 32, "answers A", kind="agent")
    _view(drawing, "A", "a")
    return drawing


# --- how it works --------------------------------------------------------------------------------


def five_moves() -> Drawing:
    drawing = Drawing(720, 220, "The five moves: take, decide, commit, publish, effects")
    moves = ("1 take", "2 decide", "3 commit", "4 publish", "5 effects")
    for at, move in enumerate(moves):
        x = 112 + at * 122
        drawing.box(x, 70, 100, 40, move, kind="agent" if at == 2 else "box")
        drawing.arrow([(x - 22, 90), (x - 2, 90)])
    drawing.box(8, 58, 82, 64, "mailbox", kind="user")
    drawing.text(49, 46, "send, cancel …", "small soft mid")
    for x, text in ((284, "pure"), (162, "at most 64"), (528, "readers, replies")):
        drawing.text(x, 62, text, "small soft mid")
    drawing.box(356, 150, 100, 40, "journal", kind="tool")
    drawing.arrow([(406, 110), (406, 148)])
    drawing.text(466, 174, "one durable write", "small soft")
    drawing.text(650, 62, "agents, tools", "small soft mid")
    drawing.path([(650, 110), (650, 204), (49, 204)])
    drawing.arrow([(49, 204), (49, 124)])
    drawing.text(250, 198, "they talk back through the mailbox", "small soft mid")
    return drawing


def turn_states() -> Drawing:
    drawing = Drawing(720, 230, "The states of a turn, from its message to its outcome")
    drawing.box(16, 92, 96, 40, "waits", kind="user")
    drawing.box(196, 92, 96, 40, "runs", kind="agent")
    drawing.box(346, 22, 150, 40, "waits for the user", kind="tool")
    drawing.box(346, 162, 150, 40, "paused", kind="tool")
    drawing.arrow([(112, 112), (194, 112)])
    drawing.text(153, 104, "its turn", "small soft mid")
    drawing.arrow([(232, 92), (232, 42), (344, 42)])
    drawing.text(288, 34, "asks", "small soft mid")
    drawing.arrow([(420, 62), (420, 80), (262, 80), (262, 91)])
    drawing.text(430, 76, "answered", "small soft")
    drawing.arrow([(232, 132), (232, 182), (344, 182)])
    drawing.text(288, 176, "pause", "small soft mid")
    drawing.arrow([(420, 162), (420, 146), (262, 146), (262, 133)])
    drawing.text(430, 156, "resume", "small soft")
    drawing.arrow([(292, 112), (558, 112)])
    outcomes = ("completed", "interrupted", "rolled back", "failed")
    for at, outcome in enumerate(outcomes):
        drawing.box(576, 22 + at * 48, 128, 34, outcome, kind="agent" if at == 0 else "hot")
        drawing.arrow([(558, 112), (558, 39 + at * 48), (574, 39 + at * 48)])
    drawing.box(16, 182, 96, 34, "withdrawn", kind="hot")
    drawing.arrow([(64, 132), (64, 180)])
    return drawing


def condensation() -> Drawing:
    drawing = Drawing(720, 170, "A condensation: the log keeps all events, the view a summary")
    drawing.text(12, 46, "log", "soft")
    drawing.text(12, 126, "view", "soft")
    for seq in range(1, 10):
        kind = "tool" if seq == 9 else "user" if seq % 2 else "agent"
        text = "condense" if seq == 9 else str(seq)
        drawing.box(70 + (seq - 1) * 62, 26, 86 if seq == 9 else 54, 32, text, kind=kind)
    for at, text in enumerate(("1", "summary of 2 to 6", "7", "8")):
        x = (70, 132, 442, 504)[at]
        drawing.box(x, 106, 302 if at == 1 else 54, 32, text, kind="tool" if at == 1 else "user")
    drawing.path([(132, 64), (132, 72), (434, 72), (434, 64)])
    drawing.arrow([(283, 72), (283, 104)])
    told = "The condensation is an event, so the view at any seq can be built again."
    drawing.text(12, 162, told, "small soft")
    return drawing


def fork() -> Drawing:
    drawing = Drawing(720, 160, "A fork shares the log up to its place")
    for seq in range(1, 8):
        drawing.box(110 + (seq - 1) * 70, 26, 58, 32, str(seq), kind="user" if seq % 2 else "agent")
    drawing.text(12, 46, "alice", "mono")
    drawing.text(12, 126, "alice-again", "mono")
    drawing.path([(366, 58), (366, 122), (378, 122)])
    for at in range(3):
        drawing.box(380 + at * 70, 106, 58, 32, str(5 + at), kind="tool")
    drawing.box(110, 106, 246, 32, "1 to 4: read from alice", kind="gone dash")
    drawing.text(600, 46, "goes on", "small soft")
    drawing.text(600, 126, "goes on by itself", "small soft")
    return drawing


def epochs() -> Drawing:
    drawing = Drawing(
        720, 210, "Two owners and an epoch: the late write of the older one is refused"
    )
    for y, name in ((40, "process 1"), (100, "journal"), (160, "process 2")):
        drawing.text(12, y + 4, name, "soft")
        drawing.path([(100, y), (704, y)], "line dash")
    drawing.box(110, 24, 120, 32, "epoch 3", kind="user")
    drawing.arrow([(200, 56), (200, 96)])
    drawing.text(206, 82, "append", "small soft")
    drawing.box(238, 24, 190, 32, "stands still", kind="gone dash")
    drawing.box(300, 144, 404, 32, "takes over: epoch 4", kind="agent")
    drawing.arrow([(330, 144), (330, 104)])
    drawing.text(336, 124, "claim", "small soft")
    drawing.box(436, 24, 90, 32, "wakes", kind="user")
    drawing.arrow([(480, 56), (480, 96)], "hotline")
    drawing.text(490, 82, "refused: OwnershipLost", "small hottext")
    drawing.arrow([(600, 144), (600, 104)])
    drawing.text(606, 124, "append", "small soft")
    for x in (200, 330, 600):
        drawing.box(x - 6, 94, 12, 12, "", kind="agent")
    drawing.text(
        12, 202, "The journal compares the epoch in the transaction that writes.", "small soft"
    )
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {
    "overlap-queue": queue,
    "overlap-interrupt": interrupt,
    "overlap-steer": steer,
    "overlap-rollback": rollback,
    "overlap-reject": reject,
    "five-moves": five_moves,
    "turn-states": turn_states,
    "condensation": condensation,
    "fork": fork,
    "epochs": epochs,
}


def main(folder: Path) -> None:
    """Draw each picture into a file of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
