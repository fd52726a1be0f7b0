"""The actor runtime: actors, mailboxes, supervision, regions. It knows nothing of conversations."""

if __name__ != "turnkeeper.runtime":
    raise ImportError(
        f"import turnkeeper.runtime, not {__name__}: a second copy would share nothing"
    )

from ._backend import OneShot, thread_caller

__all__ = ["OneShot", "thread_caller"]
