"""Names of types with their article, for the sentences of errors: "an int", "a str"."""

from __future__ import annotations

__all__ = ["a_name", "a_type"]


def a_name(name: str) -> str:
    """Return a name with its article: "an action", "a UserMessageEvent"."""
    lowered = name.lower()
    is_vowel = lowered.startswith(("a", "e", "i", "o", "unk"))
    return f"{'an' if is_vowel else 'a'} {name}"


def a_type(value: object) -> str:
    """Return the name of a value's type with its article."""
    return a_name(type(value).__name__)
