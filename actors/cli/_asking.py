"""Options, questions and messages that the commands about a journal share."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from turnkeeper.runtime import TurnkeeperError

from ..errors import ConversationNotFound, CorruptLog
from ..values.text import check_conversation_id
from ._display import printable
from ._error_lines import error_line
from ._exits import BROKEN, INTERRUPTED, UNUSABLE, fail, forget_output, how_stopped
from ._journal_jobs import is_url
from ._naming import is_text

__all__ = [
    "SCHEMA",
    "Db",
    "Schema",
    "Yes",
    "confirm",
    "refuse_missing",
    "refuse_no_folder",
    "refuse_odd",
    "refuse_parameters",
    "refuse_schema",
    "refuse_url",
    "say",
    "told",
    "without_password",
]

SCHEMA = "turnkeeper"
"""The schema of a journal in a database, by default."""
# After the user's name in a URL, also in one that is quoted, or whose scheme is mistyped or
# missing; or among the parameters, where `sslpassword` is one, too.
_PASSWORD = re.compile(
    r"(?P<user>(:|^postgres[a-z]*|^)//[^/@:]*):[^/@]*@"
    r"|(?<=[?&])(ssl)?password=[^&]*&?",
    re.IGNORECASE,
)
_OTHER_URL = re.compile(r"[\w+.-]+://")
_PARAMETER = re.compile(r"\s*(host|hostaddr|port|dbname|user|password|service)\s*=")

Db = Annotated[
    str, typer.Argument(metavar="DB", help="A SQLite file, or the URL of a PostgreSQL database.")
]
Schema = Annotated[
    str, typer.Option(metavar="NAME", help="The schema of the journal in a PostgreSQL database.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before replacing or deleting.")]


def without_password(db: str) -> str:
    """Return a path, or a URL without its password, so that it may be shown."""
    return _PASSWORD.sub(lambda found: "" if found["user"] is None else f"{found['user']}@", db)


@contextmanager
def told(db: str, schema: str = SCHEMA) -> Iterator[None]:
    """Turn errors into one line on standard error and an exit status."""
    refuse_parameters(db)
    refuse_schema(db, schema)
    try:
        yield
    except ConversationNotFound as error:
        refuse_missing([error.conversation_id], db)
    except CorruptLog as error:
        fail(BROKEN, str(error))
    except TurnkeeperError as error:
        fail(UNUSABLE, error_line(error))
    except BrokenPipeError:
        raise  # `told_output` gives the exit status
    except OSError as error:
        forget_output()
        if error.filename is not None:
            fail(UNUSABLE, f"{error.filename}: {error.strerror}")
        fail(UNUSABLE, f"output: {error.strerror}; the rest was not written")
    except KeyboardInterrupt:
        fail(INTERRUPTED, how_stopped())


def refuse_url(db: str) -> None:
    if is_url(db):
        fail(UNUSABLE, "this command is for files; use the server's own tools for a database")


def refuse_schema(db: str, schema: str) -> None:
    if schema != SCHEMA and not is_url(db):
        fail(
            UNUSABLE,
            f"{printable(without_password(db))} is a file, and only a database has schemas; "
            "leave out --schema",
        )


def refuse_parameters(db: str) -> None:
    """Fail if this names a database in another way than by its URL: it would be a new file's path.

    It may hold a password, so it is not quoted.
    """
    if _OTHER_URL.match(db) and not is_url(db):
        fail(
            UNUSABLE,
            "a URL takes the form postgresql://USER@HOST/DATABASE; nothing was opened; a file is "
            "named by its path, with ./ before it if it has such a name",
        )
    if _PARAMETER.match(db):
        fail(
            UNUSABLE,
            "a database is named by its URL, as postgresql://USER@HOST/DATABASE; nothing was "
            "opened; begin the path of a file that has such a name with ./",
        )


def refuse_odd(names: Sequence[str], db: str) -> None:
    """Exit, or raise `InvalidConversationId`, if a conversation cannot have one of these names."""
    refuse_missing([name for name in names if not is_text(name)], db)
    for name in names:
        check_conversation_id(name)


def refuse_missing(names: Sequence[str], db: str) -> None:
    if names:
        place = without_password(db)
        listed = ", ".join(printable(name) for name in names)
        fail(
            UNUSABLE,
            f"there is no conversation {listed} in {place}; `turnkeeper show {quote(place)}` lists "
            "the existing ones",
        )


def refuse_no_folder(file: Path) -> None:
    if not file.parent.is_dir():
        fail(UNUSABLE, f"{file} cannot be written: there is no folder {file.parent}")


def confirm(consequence: str, *, yes: bool) -> None:
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():  # None if it was closed
        fail(UNUSABLE, f"{consequence}; nothing was done; pass --yes to do it")
    if not typer.confirm(f"{consequence}. Go on?", err=True):
        fail(UNUSABLE, "nothing was done")


def say(line: str) -> None:
    Console(highlight=False).print(Text(line), soft_wrap=True)
