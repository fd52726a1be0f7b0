"""Immutable JSON values: tool arguments and model messages are made of them.

A `FrozenObject` is read as any mapping. To a type checker it has no method that writes; at run time
it is a `dict` whose writing methods raise, so `json.dumps`, pydantic and the providers' packages
take it as it is. Inside it, arrays are tuples and objects are `FrozenObject`s.

A value can be frozen only if it survives a round trip through JSON exactly: no NaN or infinity, no
lone surrogate, no integer and no nesting beyond the limits of common JSON readers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, cast

from pydantic import GetCoreSchemaHandler, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, core_schema

from ..errors import JsonNumberTooLong, JsonTooDeep
from .type_names import a_type

__all__ = [
    "JSON_DEPTH_MAX",
    "JSON_DIGITS_MAX",
    "FrozenJson",
    "FrozenObject",
    "check_json",
    "frozen",
]

JSON_DEPTH_MAX = 100
JSON_DIGITS_MAX = 2_466
_INTEGER_BITS_MAX = 8192
"""An integer of more bits than this has more than `JSON_DIGITS_MAX` digits."""

FrozenJson: TypeAlias = "str | int | float | bool | tuple[FrozenJson, ...] | FrozenObject | None"

if TYPE_CHECKING:
    # Statically a mapping and not a dict: writing into it is then a type error.
    _Base = Mapping[str, FrozenJson]
else:
    _Base = dict


class FrozenObject(_Base):
    """An immutable JSON object; everything in it is immutable too."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __init__(self, items: Mapping[str, object] | None = None, /) -> None:
            """Freeze a JSON object. Raise `ValueError` if JSON would not give it back exactly."""

        def __getitem__(self, key: str) -> FrozenJson: ...
        def __iter__(self) -> Iterator[str]: ...
        def __len__(self) -> int: ...
        def __hash__(self) -> int: ...
    else:

        def __init__(self, items: Mapping[str, object] = {}, /, *, _depth: int = 1) -> None:
            if items:
                # Plain texts are kept without a call: arguments are frozen each time a log is read.
                super().__init__(
                    {
                        key if type(key) is str and key.isascii() else _freeze_text(key): (
                            value
                            if type(value) is str and value.isascii()
                            else _freeze(value, _depth)
                        )
                        for key, value in items.items()
                    }
                )

        def __hash__(self) -> int:
            return hash(frozenset(self.items()))

        def __repr__(self) -> str:
            return f"FrozenObject({super().__repr__()})"

        def __reduce__(self) -> tuple[object, ...]:
            return (type(self), (dict(self),))

        def __copy__(self) -> FrozenObject:
            return self

        def __deepcopy__(self, memo: object) -> FrozenObject:
            return self

        def copy(self) -> FrozenObject:
            return self

        def _refuse(self, *_: object, **__: object) -> NoReturn:
            raise TypeError("a FrozenObject cannot be changed; make a new one")

        __setitem__ = __delitem__ = __ior__ = _refuse
        clear = pop = popitem = setdefault = update = _refuse

    @classmethod
    def __get_pydantic_core_schema__(
        cls,
        source: Any,  # noqa: ANN401 - pydantic's own signature
        handler: GetCoreSchemaHandler,
    ) -> CoreSchema:
        json_object = core_schema.dict_schema(core_schema.str_schema())
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_after_validator_function(cls._read, json_object),
            python_schema=core_schema.no_info_wrap_validator_function(cls._validate, json_object),
        )

    @classmethod
    def _validate(cls, value: object, handler: ValidatorFunctionWrapHandler) -> FrozenObject:
        return (value if isinstance(value, cls) else cls(handler(value))) or _EMPTY

    @classmethod
    def _read(cls, items: Mapping[str, object]) -> FrozenObject:
        return cls(items) if items else _EMPTY


_EMPTY: Final = FrozenObject()
"""Shared by all events that have, for example, no metadata: most chat messages have none."""


def check_json(value: FrozenJson, *, depth_max: int, digits_max: int) -> None:
    """Raise `JsonTooDeep` or `JsonNumberTooLong` if a value is beyond these bounds."""
    if isinstance(value, int):
        if len(str(abs(value))) > digits_max:
            raise JsonNumberTooLong(digits_max)
    elif isinstance(value, Mapping | tuple):
        if depth_max < 1:
            raise JsonTooDeep
        for item in value.values() if isinstance(value, Mapping) else value:
            check_json(item, depth_max=depth_max - 1, digits_max=digits_max)


def frozen(**parts: FrozenJson) -> FrozenObject:
    """Make an object of parts that are frozen already; the type checker ensures that they are."""
    whole = FrozenObject()
    dict.update(cast("dict[str, FrozenJson]", whole), parts)
    return whole


# Tuples, since a union is made anew at each call; a `dict` first, since it takes ten times as long
# to find that it is a `Mapping`.
_ARRAYS = (list, tuple)
_OBJECTS = (dict, Mapping)


def _freeze(value: object, depth: int) -> FrozenJson:
    if isinstance(value, str):
        return _freeze_text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > _INTEGER_BITS_MAX:
            raise JsonNumberTooLong(JSON_DIGITS_MAX)
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("a number that is not finite")
        return float(value)
    if isinstance(value, _ARRAYS):
        if depth >= JSON_DEPTH_MAX:
            raise JsonTooDeep
        return tuple([_freeze(item, depth + 1) for item in value])
    if isinstance(value, _OBJECTS):
        if depth >= JSON_DEPTH_MAX:
            raise JsonTooDeep
        return FrozenObject(value, _depth=depth + 1)  # type: ignore[call-arg]  # run time only
    raise ValueError(f"{a_type(value)} is not a JSON value")


def _freeze_text(text: object) -> str:
    if not isinstance(text, str):
        raise ValueError(f"a key is {a_type(text)}, not a str")  # noqa: TRY004 - as for values
    if not text.isascii():
        text.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
    return text if type(text) is str else "".join(text)
