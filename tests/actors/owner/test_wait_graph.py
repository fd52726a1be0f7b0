"""Circles in the graph of turns that wait for conversations."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise

import pytest

from turnkeeper.actors.owner.wait_graph import WaitGraph
from turnkeeper.runtime import AskCycle


@pytest.mark.parametrize("path", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_wait_that_would_close_a_circle_is_refused_with_the_circle(path: list[str]) -> None:
    graph = WaitGraph()
    with ExitStack() as waits:
        for waiter, awaited in pairwise(path):
            waits.enter_context(graph.wait(waiter, awaited))

        with pytest.raises(AskCycle) as caught, graph.wait(path[-1], "a"):
            pass

    assert caught.value.cycle == (path[-1], *path)


def test_a_wait_that_has_ended_and_one_that_leads_elsewhere_close_no_circle() -> None:
    graph = WaitGraph()
    with graph.wait("a", "b"):
        pass
    with graph.wait("b", "a"), graph.wait("c", "a"), graph.wait("a", "d"):
        pass
