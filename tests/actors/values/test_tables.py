"""Proves that the table which all share stays empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from turnkeeper.actors.values.tables import NO_TABLE


@pytest.mark.parametrize(
    "fill",
    [
        lambda table: table.__setitem__("key", "value"),
        lambda table: table.setdefault("key", "value"),
        lambda table: table.update(key="value"),
    ],
    ids=["an item", "a default", "an update"],
)
def test_nothing_can_be_put_into_the_table_that_all_share(fill: Callable[[Any], object]) -> None:
    with pytest.raises(AssertionError, match="would be put into the shared empty table"):
        fill(NO_TABLE)

    assert NO_TABLE == {}
