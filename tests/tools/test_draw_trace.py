"""The picture of a trace: drawn from a program that runs, and not of an older one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[2]
PAGE = """
```python
import time
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
tracer = provider.get_tracer("it")
with tracer.start_as_current_span("outer"):
    with tracer.start_as_current_span("chat <&>"):
        pass
    with tracer.start_as_current_span("later"):
        pass
```
"""


def labels(picture: Path) -> list[tuple[str, float]]:
    """The names in a picture, from the top, with how far each is set in."""
    tree = ET.parse(picture)
    found = tree.iterfind("{*}text")
    return [
        (text.text or "", float(text.attrib["x"])) for text in found if "class" not in text.attrib
    ]


def test_each_span_is_a_row_below_its_parent_and_set_in(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "trace.svg"
    page.write_text(PAGE)
    tool = ROOT / "tools" / "draw_trace.py"
    subprocess.run([sys.executable, tool, page, picture], check=True)
    assert [name for name, _ in labels(picture)] == ["outer", "chat <&>", "later"]
    outer, chat, later = (x for _, x in labels(picture))
    assert outer < chat == later
    assert "prefers-color-scheme: dark" in picture.read_text()


def test_the_picture_of_the_docs_has_the_spans_that_the_page_prints() -> None:
    page = (ROOT / "docs" / "watching.md").read_text()
    printed = page.partition("```text\n")[2].partition("```")[0].splitlines()
    names = [line.partition(",")[0].strip() for line in printed]
    drawn = [name for name, _ in labels(ROOT / "docs" / "trace.svg") if name != "commit"]
    assert drawn == names
