"""Names of types in the sentences of errors."""

from __future__ import annotations

import pytest

from turnkeeper.actors.events import ActionEvent, UnknownEvent, UserMessageEvent
from turnkeeper.actors.values.type_names import a_name, a_type


@pytest.mark.parametrize(
    ("value", "said"), [(3, "an int"), ("x", "a str"), (object(), "an object"), ([], "a list")]
)
def test_a_type_has_the_article_that_is_spoken(value: object, said: str) -> None:
    assert a_type(value) == said


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (ActionEvent, "an ActionEvent"),
        (UnknownEvent, "an UnknownEvent"),
        (UserMessageEvent, "a UserMessageEvent"),
    ],
)
def test_an_event_has_the_article_that_is_spoken(kind: type, said: str) -> None:
    assert a_name(kind.__name__) == said
