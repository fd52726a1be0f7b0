"""LangGraph's SQLite saver: a graph of one node that adds one message a step.

Run by `journal.py` in an environment of its own. Usage: python _peer_langgraph.py ITEM_BYTES
SECONDS LENGTH…. Prints one JSON object: steps a second by length, and bytes written a step.
"""

import json
import sqlite3
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

# Ignored: installed in an environment of its own, not in the checker's.
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.sqlite import SqliteSaver  # type: ignore[import-not-found]
from langgraph.graph import START, MessagesState, StateGraph


def main(size: int, seconds: float, lengths: list[int]) -> dict[str, float]:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.db"
        connection = sqlite3.connect(path, check_same_thread=False)
        builder: Any = StateGraph(MessagesState)
        builder.add_node("keep", lambda _: {})
        builder.add_edge(START, "keep")
        graph = builder.compile(checkpointer=SqliteSaver(connection))
        config: dict[str, Any] = {"configurable": {"thread_id": "c"}}
        text = "x" * (size - 100)
        held = 0

        def add(count: int) -> None:
            messages = [HumanMessage(text) for _ in range(count)]
            graph.invoke({"messages": messages}, config, durability="sync")

        for length in lengths:
            if held < length:
                add(length - held)
                held = length
            began = perf_counter()
            count = 0
            while count < 3 or perf_counter() - began < seconds:
                add(1)
                count += 1
            found[f"at_{length}"] = count / (perf_counter() - began)
            held += count
        connection.close()
    return found


if __name__ == "__main__":
    size, seconds, *lengths = sys.argv[1:]
    print(json.dumps(main(int(size), float(seconds), [int(length) for length in lengths])))
