"""Text that can be written down: what JSON and UTF-8 can hold.

Half an emoji in a streamed piece, or a file name that is not UTF-8, is a lone surrogate in Python.
What people send is refused for it at the boundary; what models and tools say is mended.
"""

from __future__ import annotations

from .errors import InvalidInput

__all__ = ["check_id", "check_text", "error_text", "storable"]

ID_LENGTH_MAX = 256
ERROR_LENGTH_MAX = 2_000


def storable(text: str) -> str:
    """This text with halves joined, and what is still no character replaced by U+FFFD.

    Raises `InvalidInput` where it is no text at all.
    """
    if not isinstance(text, str):
        raise InvalidInput(f"a text is a str, and {type(text).__name__} is not")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def error_text(error: BaseException) -> str:
    """What an error says of itself, storable and of bounded length."""
    try:
        said = str(error)
    except Exception as unprintable:  # noqa: BLE001 - it is only asked for a text
        said = f"its text cannot be had ({type(unprintable).__name__})"
    return storable(said)[:ERROR_LENGTH_MAX]


def check_text(what: str, text: object) -> None:
    """Raise `InvalidInput` where this is no text that can be written down."""
    if not isinstance(text, str):
        raise InvalidInput(f"{what} is a {type(text).__name__}; it takes a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{what} has a lone surrogate at position {error.start}; it takes valid Unicode"
        raise InvalidInput(found) from error


def check_id(what: str, text: object) -> None:
    """As `check_text`, and 1 to 256 characters."""
    check_text(what, text)
    if isinstance(text, str) and not 0 < len(text) <= ID_LENGTH_MAX:
        raise InvalidInput(f"{what} has {len(text)} characters; it takes 1 to {ID_LENGTH_MAX}")
