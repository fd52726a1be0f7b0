"""Text that can be stored: text that JSON and UTF-8 can hold.

Half an emoji in a streamed piece, or a file name that is not UTF-8, is a lone surrogate in Python.
A user's text with one is refused at the boundary; the text of models and tools is mended.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import InvalidConversationId, InvalidInput
from .type_names import a_name, a_type

__all__ = [
    "ID_LENGTH_MAX",
    "are_plain_ids",
    "check_bool",
    "check_conversation_id",
    "check_id",
    "check_label",
    "check_length",
    "check_new_conversation_id",
    "check_new_id",
    "check_number",
    "check_short",
    "check_shown",
    "check_sought",
    "check_text",
    "check_whole",
    "error_text",
    "hold_back_half",
    "storable",
]

ID_LENGTH_MAX = 256
ERROR_LENGTH_MAX = 2_000
# The event loop stands still while an event is encoded, about a second for twenty million.
TEXT_LENGTH_MAX = 8 << 20
EVENT_LENGTH_MAX = 32 << 20


def storable(text: str) -> str:
    """Join surrogate pairs, and replace each lone surrogate by U+FFFD.

    Raises `InvalidInput` if the argument is not a str.
    """
    if not isinstance(text, str):
        raise InvalidInput(f"a text is a str, and {type(text).__name__} is not")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def hold_back_half(text: str) -> tuple[str, str]:
    """Return a text as it can be stored, without a high surrogate at its end, and that surrogate.

    The text that follows may begin with the other half of the pair.
    """
    last = text[-1:]
    if "\ud800" <= last <= "\udbff":
        return storable(text[:-1]), last
    return storable(text), ""


def error_text(error: BaseException) -> str:
    """Return an error's text, storable and of bounded length."""
    try:
        said = str(error)
    except Exception as unprintable:  # noqa: BLE001 - its __str__ may raise anything
        said = f"its text cannot be read ({type(unprintable).__name__})"
    return storable(said)[:ERROR_LENGTH_MAX]


def check_text(what: str, text: object) -> None:
    """Raise `InvalidInput` if this is not a text that can be stored. `what` names it."""
    if not isinstance(text, str):
        raise InvalidInput(
            f"{what} is {a_type(text)}; it takes a str",
            argument=what,
            rule=f"{what} must be a text",
        )
    if len(text) > TEXT_LENGTH_MAX:
        check_length(what, len(text), TEXT_LENGTH_MAX)
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{what} has a lone surrogate at position {error.start}; it takes valid Unicode"
        rule = f"{what} must be valid Unicode, without lone surrogates"
        raise InvalidInput(found, argument=what, rule=rule) from error


def check_length(
    what: str, length: int, length_max: int = EVENT_LENGTH_MAX, *, unit: str = "characters"
) -> None:
    """Raise `InvalidInput` if one text, or all that one event has, is too long in this unit."""
    if length > length_max:
        raise InvalidInput(
            f"{what} has {length:,} {unit}; it takes at most {length_max:,}; nothing was "
            "written; keep large content elsewhere, and send its address",
            argument=what,
            rule=f"{what} must have at most {length_max} {unit}",
        )


def check_bool(what: str, found: object) -> None:
    """Raise `InvalidInput` if this is not a bool. `what` names it.

    A text such as "no", from an environment variable, would count as true. The error does not quote
    it: in `ToolResult("done", text)` it is the result of a call, which no log line may have.
    """
    if not isinstance(found, bool):
        kind = type(found)
        is_builtin = kind.__module__ == "builtins"  # NumPy has a `bool`, too
        name = kind.__name__ if is_builtin else f"{kind.__module__}.{kind.__name__}"
        raise InvalidInput(
            f"{what} is {a_name(name)}; it takes True or False",
            argument=what,
            rule=f"{what} must be true or false",
        )


def check_whole(what: str, number: object) -> None:
    """Raise `InvalidInput` if this is not a whole number. `what` names it."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise InvalidInput(
            f"{what} is {number!r}, {a_type(number)}; it takes a whole number",
            argument=what,
            rule=f"{what} must be a whole number",
        )


def check_number(
    what: str,
    found: object,
    allowed: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    is_whole: bool = False,
) -> None:
    """Raise `InvalidInput` unless this is a number in a range; NaN is in none.

    `what` names it, and `allowed` says what it may be: "1 or more". With `is_whole`, a fraction is
    refused, and infinity too.
    """
    is_number = isinstance(found, int if is_whole else int | float) and not isinstance(found, bool)
    # The type is compared first: a text cannot be compared with a number.
    if not (is_number and least <= found <= most and found > above):  # type: ignore[operator]
        raise InvalidInput(f"{what} is {found!r}; it takes {allowed}")


def refuse_class(what: str, found: object) -> None:
    """Raise `InvalidInput` if this is a class; it was given in place of an object of it."""
    if isinstance(found, type):
        raise InvalidInput(f"{what} is the class {found.__name__}; it takes an object of it")


def check_label(label: object) -> None:
    """Raise `InvalidInput` if this is not a pair of texts."""
    if not isinstance(label, tuple | list) or len(label) != len(("name", "value")):
        raise InvalidInput(
            f"label is {label!r}; it takes a pair of a name and a value",
            argument="label",
            rule="label must be a name and a value",
        )
    for text in label:
        check_sought("label", text)


def check_sought(what: str, text: object) -> None:
    """As `check_text`; also raise if it has a NUL, which no journal stores and PostgreSQL refuses.

    For the texts that a list is filtered by.
    """
    check_text(what, text)
    if isinstance(text, str):
        _check_no_nul(what, text)


def check_short(what: str, text: object, length_max: int) -> None:
    """As `check_shown`; also raise if it is longer than this."""
    check_text(what, text)
    if isinstance(text, str) and len(text) > length_max:
        raise InvalidInput(
            f"{what} has {len(text)} characters; it takes {length_max} at most",
            argument=what,
            rule=f"{what} must have at most {length_max} characters",
        )
    check_shown(what, text)


def check_shown(what: str, text: object) -> None:
    """As `check_text`; also raise if it has a control character."""
    check_text(what, text)
    if isinstance(text, str):
        _check_letters(what, text)


def check_id(what: str, text: object) -> None:
    """As `check_text`; also raise unless it has 1 to 256 characters, none of them NUL.

    SQLite could store a NUL in an id; PostgreSQL cannot, and an id is valid in every journal.
    """
    check_text(what, text)
    if isinstance(text, str) and not 0 < len(text) <= ID_LENGTH_MAX:
        raise InvalidInput(
            f"{what} has {len(text)} characters; it takes 1 to {ID_LENGTH_MAX}",
            argument=what,
            rule=f"{what} must have 1 to {ID_LENGTH_MAX} characters",
        )
    if isinstance(text, str):
        _check_no_nul(what, text)


def _check_no_nul(what: str, text: str) -> None:
    if "\0" in text:
        raise InvalidInput(
            f"{what} has a NUL at position {text.index(chr(0))}; it takes none",
            argument=what,
            rule=f"{what} must not have a NUL",
        )


def check_new_id(what: str, text: object) -> None:
    """As `check_id`; also raise if it has a control character.

    Older ids may have one, so this is not for ids that are only looked up.
    """
    # The usual id is not checked letter by letter; a NUL is not printable.
    if isinstance(text, str) and text.isascii() and text.isprintable():
        if not 0 < len(text) <= ID_LENGTH_MAX:
            check_id(what, text)
        return
    check_id(what, text)
    if isinstance(text, str):
        _check_letters(what, text)


def are_plain_ids(first: str, second: str, third: str | None) -> bool:
    """True only if `check_new_id` takes all of these; the third may be None.

    Cheap, and may be False for ids that it takes, too: long ones, and those beyond ASCII.
    """
    if type(first) is not str or type(second) is not str or not first or not second:
        return False
    text = first + second
    if third is not None:
        if type(third) is not str or not third:
            return False
        text += third
    return len(text) <= ID_LENGTH_MAX and text.isascii() and text.isprintable()


def check_conversation_id(conversation_id: object) -> None:
    """As `check_id`; raise `InvalidConversationId` for a str that cannot be a conversation's id."""
    _check_as_conversation_id(check_id, conversation_id)


def check_new_conversation_id(conversation_id: object) -> None:
    """As `check_new_id`; raise `InvalidConversationId`, also for an id with a meaning in a path.

    Ids become parts of addresses, of file names, and of the ids of a gateway.
    """
    _check_as_conversation_id(check_new_id, conversation_id)
    if isinstance(conversation_id, str):
        if "/" in conversation_id:
            found = f"conversation id has a slash at position {conversation_id.index('/')}"
            raise InvalidConversationId(conversation_id, found)
        if conversation_id in (".", ".."):
            found = f"conversation id {conversation_id!r} means a folder in a path or a URL"
            raise InvalidConversationId(conversation_id, found)


def _check_as_conversation_id(
    check: Callable[[str, object], None], conversation_id: object
) -> None:
    try:
        check("conversation id", conversation_id)
    except InvalidInput as error:
        if not isinstance(conversation_id, str):
            raise
        raise InvalidConversationId(conversation_id, str(error)) from error


def _check_letters(what: str, text: str) -> None:
    for at, letter in enumerate(text):
        if letter < " " or "\x7f" <= letter < "\xa0":
            raise InvalidInput(
                f"{what} has the control character {letter!r} at position {at}; use printable "
                "characters",
                argument=what,
                rule=f"{what} must not have control characters",
            )
