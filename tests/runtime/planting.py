"""Faults planted in the runtime: a line of the real source, replaced for a while.

The test fails if the line is no longer there, so that a fault stays as real as the code.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def planted(where: type, function: str, line: str, becomes: str) -> Iterator[None]:
    """Replace a line of a method of `where`."""
    original = inspect.getattr_static(where, function)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(line) == 1, f"{original.__qualname__} has no single {line!r}"
    module = sys.modules[original.__module__]
    namespace: dict[str, Any] = dict(vars(module))
    code = "from __future__ import annotations\n" + source.replace(line, becomes)
    exec(compile(code, f"<{original.__qualname__} with a fault>", "exec"), namespace)
    made = namespace[function].__code__
    setattr(where, function, types.FunctionType(made, vars(module), function))
    try:
        yield
    finally:
        setattr(where, function, original)
