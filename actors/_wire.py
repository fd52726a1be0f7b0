"""Names as the providers' APIs accept them.

Call ids and tool names come from models, callers and old logs, and the APIs refuse a whole request
for one character. What is acceptable passes unchanged; the rest is mapped, always to the same.
"""

from __future__ import annotations

import hashlib
import re

__all__ = ["wire_call_id", "wire_tool_name"]

_CALL_ID = re.compile(r"[a-zA-Z0-9_-]{1,40}")
_NOT_IN_TOOL_NAME = re.compile(r"[^a-zA-Z0-9_-]")
_TOOL_NAME_LENGTH_MAX = 64


def wire_call_id(tool_call_id: str) -> str:
    """An id of at most 40 letters, digits, `_` and `-`; a digest where this id is not one."""
    if _CALL_ID.fullmatch(tool_call_id):
        return tool_call_id
    return "call_" + hashlib.blake2b(tool_call_id.encode(), digest_size=16).hexdigest()


def wire_tool_name(tool_name: str) -> str:
    """A name of 1 to 64 letters, digits, `_` and `-`."""
    return _NOT_IN_TOOL_NAME.sub("_", tool_name)[:_TOOL_NAME_LENGTH_MAX] or "_"
