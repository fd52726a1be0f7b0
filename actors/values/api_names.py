"""Call ids and tool names as the providers' APIs accept them.

They come from models, callers and old logs, and an API refuses a whole request for one character.
An acceptable name passes unchanged; any other is mapped, always to the same name.
"""

from __future__ import annotations

import hashlib
import re

__all__ = ["api_call_id", "api_tool_name"]

_CALL_ID = re.compile(r"[a-zA-Z0-9_-]{1,40}")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NOT_IN_TOOL_NAME = re.compile(r"[^a-zA-Z0-9_-]")
_TOOL_NAME_KEPT_MAX = 55


def api_call_id(tool_call_id: str) -> str:
    """Return this id, or a digest of it unless it has 1 to 40 letters, digits, `_` and `-`."""
    if _CALL_ID.fullmatch(tool_call_id):
        return tool_call_id
    return "call_" + hashlib.blake2b(tool_call_id.encode(), digest_size=16).hexdigest()


def api_tool_name(tool_name: str) -> str:
    """Return this name, or one like it unless it has 1 to 64 letters, digits, `_` and `-`.

    Different names stay different: a digest follows where the name had to be changed.
    """
    if _TOOL_NAME.fullmatch(tool_name):
        return tool_name
    digest = hashlib.blake2b(tool_name.encode(), digest_size=4).hexdigest()
    return f"{_NOT_IN_TOOL_NAME.sub('_', tool_name)[:_TOOL_NAME_KEPT_MAX]}_{digest}"
