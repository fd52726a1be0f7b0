"""Tells a user of the command line what an error means.

The workers load this module, too, so it loads little itself.
"""

from __future__ import annotations

from ..errors import OwnedElsewhere

__all__ = ["error_line"]


def error_line(error: BaseException) -> str:
    """Return in one line what an error says, and what a user of the command line can do."""
    if isinstance(error, OwnedElsewhere):
        whose = (
            "which is alive; nothing was changed; stop that process first; if it hangs, kill it: "
            "all that it has acknowledged stays"
            if error.is_file
            else "whose lease has not run out; nothing was changed; stop that process first; if it "
            "was killed, wait for the end of its lease"
        )
        return f"{error.owned} is owned by {error.owner}, {whose}"
    return " ".join(str(error).split())
