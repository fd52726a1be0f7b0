"""Circles in the graph of turns that wait for conversations."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise

import pytest

from turnkeeper.actors.owner.wait_graph import Inside, WaitGraph
from turnkeeper.runtime import AskCycle


@pytest.mark.parametrize("path", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_wait_that_would_close_a_circle_is_refused_with_the_circle(path: list[str]) -> None:
    graph = WaitGraph()
    with ExitStack() as waits:
        for waiter, awaited in pairwise(path):
            waits.enter_context(graph.wait(Inside(graph, waiter), awaited))

        last = Inside(graph, path[-1])
        with pytest.raises(AskCycle) as caught, graph.wait(last, "a"):
            pass

    assert caught.value.cycle == (path[-1], *path)


def test_a_wait_that_has_ended_and_one_that_leads_elsewhere_close_no_circle() -> None:
    graph = WaitGraph()
    a, b, c = (Inside(graph, name) for name in "abc")
    with graph.wait(a, "b"):
        pass
    with graph.wait(b, "a"), graph.wait(c, "a"), graph.wait(a, "d"):
        pass


def test_a_wait_that_outlives_its_turn_closes_no_circle() -> None:
    graph = WaitGraph()
    a, later, b = Inside(graph, "a"), Inside(graph, "a"), Inside(graph, "b")
    with graph.wait(a, "b"):
        a.is_over = True
        with graph.wait(b, "a"), pytest.raises(AskCycle), graph.wait(later, "b"):
            pass
