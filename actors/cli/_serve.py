"""The commands of the gateway: `serve`, which serves an agent over HTTP, `inspect` and `token`.

A signal starts the drain: new streams end at once, turns may end within the grace period, the
conversations are handed over, and then the server stops. A second signal ends the grace period.

A server that starts while its database is away waits for it, for a limited time.
"""

from __future__ import annotations

import base64
import errno
import gc
import hashlib
import importlib
import importlib.util
import os
import re
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from inspect import isasyncgenfunction, iscoroutinefunction
from io import FileIO
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import anyio
import typer

from turnkeeper.runtime import Runtime, TurnkeeperError

from ..agents.agent import is_agent
from ..errors import JournalRefused, JournalUnavailable
from ..owner.draining import check_drain
from ._asking import SCHEMA, Schema, refuse_parameters, refuse_schema
from ._error_lines import error_line
from ._exits import BROKEN, UNUSABLE, fail, finite, is_given
from ._journal_jobs import LEASE_S, is_url, open_journal, was_url

if sys.platform != "win32":
    import fcntl
    import resource

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ..agents.agent import Agent
    from ..agents.turn_context import TurnContext
    from ..conversations.conversations import Conversations
    from ..gateway import Authenticate, Gateway, Node, NodeKeys
    from ..journals.postgres.journal import PostgresJournal
    from ..journals.sqlite.journal import SQLiteJournal

__all__ = ["inspect", "serve", "token"]

LOCK_WAIT_S = 5.0
"""Seconds that another program may keep the file of tokens locked."""
_LOCK_EVERY_S = 0.05
KEEP_ALIVE_S = 75
"""Seconds that a connection is kept open for the next request: longer than by the usual proxies,
which keep theirs for 60. A request that one sends just as the server closes would be lost, and the
client would get 502."""
STOP_S = 5
"""Seconds that requests get to end once the conversations are handed over."""
OWNER_WAIT_S = 5.0
"""Seconds that a server waits for the previous one to close the file."""
BLOCKED_S = 1.0
"""Seconds after which the operator is told of code that blocks the event loop."""
DATABASE_WAIT_S = 60.0
DATABASE_PAUSE_S = 0.5
"""Seconds between two attempts to open a database that is away."""
COLLECT_AFTER = 10_000
"""How many objects more than at its last run let the garbage collector run again. By default it is
700, and a request that waits holds 200 or more: so it looked at those of all requests, again and
again. That took a tenth of a message's time, and on trio a third of a frame's."""
_COLLECTS_BY_DEFAULT = gc.get_threshold()
FILES_MAX = 65_536
"""How many files a server may open if its hard limit allows so many: more than it takes
connections. Programs that a tool starts inherit the limit, and some of them close every file up to
it, so it does not become the billion that containers may allow."""
Backend = Literal["asyncio", "trio"]
_FORM = "write MODULE:AGENT, as in serve_me.py:support"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SCOPES = ("read", "write", "admin", "inspector")
_PRINCIPAL_LENGTH_MAX = 64
"""The same as in the gateway, which this command cannot import without its extra."""
_HASH = re.compile(rb"[0-9a-f]{64}")
"""How a line of a file of tokens begins; as above."""


def serve(
    context: typer.Context,
    agent: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:AGENT",
            help="A module or the path of a file, and the name of the agent in it.",
        ),
    ],
    *,
    db: Annotated[
        Path, typer.Option(metavar="FILE", dir_okay=False, help="The SQLite file of the journal.")
    ] = Path("chats.db"),
    postgres: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Keep the journal in this PostgreSQL database instead."),
    ] = None,
    schema: Annotated[
        str, typer.Option(metavar="NAME", help="With --postgres: the journal's schema.")
    ] = SCHEMA,
    search: Annotated[
        bool,
        typer.Option("--search", help="Keep an index of the words of chat messages, to find them."),
    ] = False,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=65_535, help="The port to listen on; 0 takes any free one."
        ),
    ] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="The file with the tokens' hashes, as `turnkeeper token` writes it.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Answer requests for this host name too, such as the public one behind a proxy; "
            "may be repeated.",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Another site whose pages may write here; may be repeated."
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            callback=finite,
            help="How long running turns may go on after a signal to stop.",
        ),
    ] = 10.0,
    node_address: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --postgres and several machines: the URL at which the others reach this "
            "machine and no other, such as http://10.0.0.3:8101. A command goes to the machine "
            "that owns its conversation.",
        ),
    ] = None,
    node_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Listen here for the other machines, if not at --node-address itself.",
        ),
    ] = None,
    node_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="The keys that machines sign with, one a line: this machine signs with the "
            "first, and accepts any of them.",
        ),
    ] = None,
    lease: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=1.0,
            callback=finite,
            help="With --postgres: how long after a machine died others may take over its "
            "conversations.",
        ),
    ] = LEASE_S,
    database_wait: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            callback=finite,
            help="With --postgres: how long to wait at the start if the database cannot be "
            "reached.",
        ),
    ] = DATABASE_WAIT_S,
    end_unfinished: Annotated[
        bool,
        typer.Option(
            "--end-unfinished",
            help="End the turns that a killed process left, as interrupted. Without it, an agent "
            "that can be run again goes on with them.",
        ),
    ] = False,
    backend: Annotated[
        Backend,
        typer.Option(
            help="The event loop; the HTTP server is uvicorn on asyncio, hypercorn on trio."
        ),
    ] = "asyncio",
) -> None:
    """Serve an agent over HTTP until a signal; its conversations are kept in a journal.

    Without `--token-file` it listens on loopback only: everyone who can connect may do everything.

    Exit status: 0, stopped by a signal; 1, the database could not be reached for too long, start it
    again; 2, the arguments are invalid.
    """
    if token_file is None and host not in _LOOPBACK:
        fail(
            UNUSABLE,
            f"without --token-file everyone who can reach {host} could do everything, so only "
            "loopback is served; make tokens with `turnkeeper token`",
        )
    if (node_address is None) is not (node_key_file is None):
        fail(
            UNUSABLE,
            "--node-address and --node-key-file go together: machines sign what they ask each "
            "other; give both",
        )
    if node_address is not None and postgres is None:
        fail(
            UNUSABLE,
            "--node-address is for several machines, which share a database; give --postgres too",
        )
    if node_listen is not None and node_address is None:
        fail(UNUSABLE, "--node-listen needs --node-address; give both")
    if postgres is not None and not is_url(postgres):
        # Else it would be the path of a file. It may hold a password, so it is not quoted.
        fail(
            UNUSABLE,
            "--postgres takes the URL of a database, as postgresql://USER@HOST/DATABASE; nothing "
            "was opened; --db takes the path of a file",
        )
    if was_url(db):
        fail(UNUSABLE, "--db takes the path of a file; give the URL of a database as --postgres")
    refuse_parameters(str(db))
    if postgres is not None and is_given(context, "db"):
        fail(UNUSABLE, "--db and --postgres name two journals; give one of them")
    for name in ("lease", "database_wait"):
        if postgres is None and is_given(context, name):
            option = name.replace("_", "-")
            fail(UNUSABLE, f"--{option} is for a database, and {db} is a file; give --postgres too")
    _check_extra("serve", backend)
    refuse_schema(postgres or str(db), schema)
    from ..gateway import BearerTokens, NodeKeys  # noqa: PLC0415 - an extra

    found = _load_agent(agent)
    _allow_more_files()
    try:
        check_drain(grace, "queue")  # checked now, not when the drain begins
        with ExitStack() as listening:
            nodes = None
            if node_address is not None and node_key_file is not None:
                nodes = _listen_for_nodes(
                    node_address, node_listen, NodeKeys.from_file(node_key_file)
                )
                listening.enter_context(nodes.listener)
            journal = open_journal(
                postgres or str(db),
                schema,
                read_only=False,
                search=search,
                address=None if nodes is None else nodes.address,
                lease_s=lease,
                owner_wait_s=OWNER_WAIT_S,
            )
            authenticate = None if token_file is None else BearerTokens.from_file(token_file)
            server = _Served(
                agent=found,
                journal=journal,
                place=str(db) if postgres is None else f"PostgreSQL, schema {schema}",
                listener=_listen(host, port),
                authenticate=authenticate,
                hosts=frozenset((host, *(allow_host or ()))),
                origins=tuple(allow_origin or ()),
                grace_s=grace,
                backend=backend,
                nodes=nodes,
                recover_every_s=lease,
                ends_unfinished=end_unfinished,
                database_wait_s=0.0 if postgres is None else database_wait,
            )
            listening.enter_context(server.listener)
            anyio.run(server.run, backend=backend)
    except JournalUnavailable as away:
        fail(BROKEN, error_line(away))
    except TurnkeeperError as error:
        fail(UNUSABLE, error_line(error))


def inspect(
    db: Annotated[
        str,
        typer.Argument(metavar="DB", help="A SQLite file, or the URL of a PostgreSQL database."),
    ],
    *,
    schema: Schema = SCHEMA,
    port: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=65_535, help="The port to listen on; 0 takes any free one."
        ),
    ] = 0,
) -> None:
    """Show a journal in the browser, read-only, until a signal.

    It also works while another process writes. It listens on loopback only: every user of this
    machine can read what it shows.
    """
    refuse_parameters(db)
    _check_extra("inspect")
    refuse_schema(db, schema)
    try:
        server = _Served(
            agent=_NoAgent(),
            journal=open_journal(db, schema, read_only=True, search=True),
            listener=_listen("127.0.0.1", port),
            grace_s=0,
            is_read_only=True,
        )
        with server.listener:
            anyio.run(server.run)
    except TurnkeeperError as error:
        fail(UNUSABLE, error_line(error))


def _check_extra(command: str, backend: Backend = "asyncio") -> None:
    by = ("hypercorn", "trio") if backend == "trio" else ("uvicorn",)
    for package in ("fastapi", *by):
        if importlib.util.find_spec(package) is None:
            wanted = "trio" if package == "trio" else "'turnkeeper[gateway]'"
            fail(
                UNUSABLE,
                f"`{command}` needs the package {package}, which is not installed; "
                f"pip install {wanted}",
            )


class _NoAgent:
    """The agent of conversations that are only read, which never runs."""

    async def run(self, turn: TurnContext) -> None:  # noqa: ARG002 - the port's
        raise AssertionError("a turn of a journal that is only read")


def token(
    principal: Annotated[
        str, typer.Argument(metavar="PRINCIPAL", help="The user or service that the token is for.")
    ],
    *,
    scopes: Annotated[
        str,
        typer.Option(
            metavar="SCOPES",
            help=f"What it allows: one or more of {', '.join(_SCOPES)}, separated by commas.",
        ),
    ] = "read,write",
    file: Annotated[
        Path,
        typer.Option(metavar="FILE", dir_okay=False, help="The file to add the token's hash to."),
    ] = Path("tokens.txt"),
) -> None:
    """Make a token for a principal: print it once, and add its hash to a file."""
    is_word = len(principal.split()) == 1 and "#" not in principal and principal.isprintable()
    if not is_word or len(principal) > _PRINCIPAL_LENGTH_MAX:
        fail(
            UNUSABLE,
            f"{principal!r} cannot be a principal; give one word of at most "
            f"{_PRINCIPAL_LENGTH_MAX} printable characters, without #",
        )
    if not set(scopes.split(",")) <= set(_SCOPES):
        fail(
            UNUSABLE,
            f"--scopes {scopes!r} has an unknown scope; give some of {', '.join(_SCOPES)}, "
            "separated by commas",
        )
    if sys.stdout is None:
        fail(UNUSABLE, "standard output is closed, so no token can be shown; none was made")
    made = base64.urlsafe_b64encode(os.urandom(32)).decode().rstrip("=")
    line = f"{hashlib.sha256(made.encode()).hexdigest()} {principal} {scopes}\n"
    try:
        opened = _open_tokens(file)
    except OSError as error:
        fail(UNUSABLE, f"{file}: {error.strerror}; no token was made")
    with opened:
        # It is shown first: a token that could not be shown must not get in.
        print(made, flush=True)
        try:
            _add_line(opened, line)
        except OSError as error:
            fail(UNUSABLE, f"{file}: {error.strerror}; the token above will not be accepted")


def _open_tokens(file: Path) -> FileIO:
    """Open a file of tokens to add to it; make it if there is none."""
    if file.exists():
        _check_tokens(file)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    return FileIO(descriptor, "r+")


def _add_line(opened: FileIO, line: str) -> None:
    """Add a line, even if the last line of the file has no line end; all of it, or nothing.

    Raises `OSError` if another program keeps the file locked.
    """
    # Else the line that another process adds meanwhile would be cut off with half of this one.
    anyio.run(_lock, opened)
    if end := opened.seek(0, os.SEEK_END):
        opened.seek(-1, os.SEEK_END)
        if opened.read(1) != b"\n":
            line = f"\n{line}"
    left = line.encode()
    try:
        while left:
            left = left[opened.write(left) :]
    except OSError:
        opened.truncate(end)  # part of a line would keep the server from reading the file
        raise


async def _lock(opened: FileIO) -> None:
    """Lock the file; raise `OSError` if that takes longer than `LOCK_WAIT_S`."""
    if sys.platform == "win32":
        return
    with anyio.move_on_after(LOCK_WAIT_S):
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            await anyio.sleep(_LOCK_EVERY_S)
    raise OSError(errno.EWOULDBLOCK, "another program keeps it locked")


def _check_tokens(file: Path) -> None:
    """Fail unless each line has a token: a mistyped name must not change a file of another kind."""
    lines = file.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        words = line.partition(b"#")[0].split()
        if words and not _HASH.fullmatch(words[0]):
            fail(
                UNUSABLE,
                f"line {number} of {file} is not `sha256 principal scopes`; no token was made; "
                "name a file of tokens, or a new one",
            )


def _load_agent(place: str) -> Agent:
    """Return the named agent from a module or from a file."""
    name, _, attribute = place.rpartition(":")
    is_file = name.endswith(".py")
    if not name or not attribute or (name.startswith(".") and not is_file):
        fail(UNUSABLE, f"{place!r} names no agent; {_FORM}")
    try:
        module = _load_file(Path(name)) if is_file else _load_module(name)
    except FileNotFoundError as error:
        said = f"{error.filename} does not exist" if error.filename else str(error)
        fail(UNUSABLE, f"{name} cannot be loaded: {said}")
    except (ImportError, OSError, SyntaxError) as error:
        # The module itself, and none that it imports: the file of an agent may lack its `.py`.
        is_missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(
            f"{error.name}."
        )
        form = f"; {_FORM}" if is_missing and not is_file else ""
        fail(UNUSABLE, f"{name} cannot be loaded: {error}{form}")
    except SystemExit as end:
        fail(
            UNUSABLE,
            f"{name} cannot be loaded: it ended the program ({end.code!r}); put what runs it as a "
            'program under `if __name__ == "__main__":`',
        )
    except Exception as error:  # noqa: BLE001 - whatever the module raises
        traceback.print_exception(error)
        fail(UNUSABLE, f"{name} cannot be loaded: {type(error).__name__}: {error}")
    found: Agent | FunctionType | type | None = getattr(module, attribute, None)
    call_it = f"write `served = {attribute}()` in the module and name `served`"
    if isinstance(found, type):
        fail(UNUSABLE, f"{place} is a class; if its objects are agents, {call_it}")
    if isinstance(found, FunctionType):
        is_async = iscoroutinefunction(found) or isasyncgenfunction(found)
        advice = "write @agent above its `async def`"
        if not is_async:
            advice = (
                f"if it returns an agent, {call_it}; if it answers itself, make it an `async def` "
                "with @agent above it"
            )
        fail(UNUSABLE, f"{place} is a plain function; {advice}")
    if found is None or not is_agent(found):
        known = [one for one, value in vars(module).items() if is_agent(value)]
        said = f"it has {', '.join(known)}" if known else "it has no agents; make one with @agent"
        fail(UNUSABLE, f"{name} has no agent named {attribute}; {said}")
    return found


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    if path.stem in sys.stdlib_module_names:  # an import of that module would give this one
        raise ImportError("a module of Python has this name; rename the file")
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _allow_more_files() -> None:
    """Raise the soft limit of open files: it is 1,024 on many systems, as `select` needs it.

    Nothing that serves calls `select`, and with the usual 1,024 the connections that clients keep
    open for `KEEP_ALIVE_S` would keep others out.
    """
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with suppress(OSError, ValueError):  # macOS may allow fewer than its hard limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _listen(host: str, port: int) -> socket.socket:
    from ..gateway import GatewayLimits  # noqa: PLC0415 - an extra
    from ..gateway.guard import PART_BYTES  # noqa: PLC0415 - as above

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        said = (error.strerror or str(error)).partition(" (while ")[0]  # Python adds the address
        other = "; `--port` takes another port" if error.errno == errno.EADDRINUSE else ""
        fail(UNUSABLE, f"cannot listen on {host}:{port}: {said}{other}")
    # Connections inherit this option. Without it, the first piece of an answer waits until the
    # client has acknowledged the head of the response, which takes 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The guard cannot cancel hypercorn's writes to a client that reads nothing. With this option,
    # if the kernel has it, the kernel ends them after the same time.
    if sys.platform == "linux":
        stall_ms = int(1_000 * GatewayLimits().write_stall_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
        # Else a kernel that holds megabytes takes nothing more before a third of them has left, and
        # the guard takes a client that reads slowly for one that reads nothing.
        with suppress(OSError):  # gVisor, for one, does not have it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 2 * PART_BYTES)
    return listener


@dataclass(frozen=True)
class _Nodes:
    """The listener for the other machines."""

    listener: socket.socket
    address: str
    keys: NodeKeys


def _listen_for_nodes(url: str, listen: str | None, keys: NodeKeys) -> _Nodes:
    """Listen for other machines; port 0 in the URL takes any free port."""
    from ..gateway import node_address  # noqa: PLC0415 - an extra

    try:
        parts = urlsplit(url)
        place = urlsplit(f"//{listen}") if listen else parts
        host, port = place.hostname, place.port
    except ValueError as error:
        fail(UNUSABLE, f"{url} is not the address of a machine: {error}; write http://HOST:PORT")
    if not host or port is None:
        fail(
            UNUSABLE,
            f"{listen or url} is not the address of a machine; write one like "
            "http://10.0.0.3:8101, or 0.0.0.0:8101 for --node-listen",
        )
    listener = _listen(host, port)
    if parts.port == 0:
        shown = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        url = f"{parts.scheme}://{shown}:{listener.getsockname()[1]}{parts.path}"
    try:
        return _Nodes(listener, node_address(url), keys)
    except TurnkeeperError:
        listener.close()
        raise


@dataclass(frozen=True)
class _Served:
    """One gateway of one journal, from entering to the end of its drain."""

    agent: Agent
    journal: SQLiteJournal | PostgresJournal
    listener: socket.socket
    grace_s: float
    authenticate: Authenticate | None = None
    hosts: frozenset[str] = frozenset()
    origins: tuple[str, ...] = ()
    is_read_only: bool = False
    place: str = ""
    """Tells the operator where the conversations are kept."""
    backend: Backend = "asyncio"
    nodes: _Nodes | None = None
    recover_every_s: float = LEASE_S
    ends_unfinished: bool = False
    database_wait_s: float = 0.0

    async def run(self) -> None:
        """Serve until a signal. Raises `JournalUnavailable` if the database stays away."""
        failure: TurnkeeperError | None = None
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            _load(self.backend)
            if gc.get_threshold() == _COLLECTS_BY_DEFAULT:  # else the agent's module has set it
                gc.set_threshold(COLLECT_AFTER)
            async with AsyncExitStack() as stack:
                runtime = await stack.enter_async_context(Runtime(report_blocked_s=BLOCKED_S))
                try:
                    conversations = await self._open(runtime, stack, signals)
                except TurnkeeperError as error:
                    failure = error  # raised below, where no task group wraps it
                else:
                    if conversations is not None:
                        await self._serve_open(conversations, stack, signals)
        if failure is not None:
            raise failure
        _say("stopped")

    def _make(self, runtime: Runtime) -> Conversations:
        from ..conversations.conversations import Conversations  # noqa: PLC0415 - loads slowly

        is_resumable = getattr(self.agent, "is_resumable", False) is True
        return Conversations(
            self.agent,
            journal=self.journal,
            unfinished="resume" if is_resumable and not self.ends_unfinished else "end",
            # A reader does not resume turns that others left.
            recover="on_message" if self.is_read_only else "on_enter",
            recover_every_s=self.recover_every_s,
            runtime=runtime,
        )

    async def _open(
        self, runtime: Runtime, stack: AsyncExitStack, signals: AsyncIterator[signal.Signals]
    ) -> Conversations | None:
        """Open the conversations until the stack ends; None if a signal came before they were open.

        Raises `JournalUnavailable` if the database is away for too long.
        """
        until = anyio.current_time() + self.database_wait_s
        while True:
            try:
                return await stack.enter_async_context(self._make(runtime))
            except JournalUnavailable as error:
                if anyio.current_time() >= until:
                    raise
                _say(f"waiting {self.database_wait_s:g} s at most: {error_line(error)}")
            if not await self._wait_for_database(runtime, until, signals):
                return None

    async def _wait_for_database(
        self, runtime: Runtime, until: float, signals: AsyncIterator[signal.Signals]
    ) -> bool:
        """Wait until the journal can be opened or the time is up; return False if a signal came.

        Meanwhile requests get the problem `not-open`, and `healthz` answers well: a restart by a
        supervisor would not bring the database back.
        """
        is_over, waiting, listening = anyio.Event(), anyio.CancelScope(), anyio.CancelScope()

        async def end_with_signal() -> None:
            with listening:
                await anext(signals)
                waiting.cancel()

        async with anyio.create_task_group() as group:
            app = self._app(self._make(runtime))
            group.start_soon(self._serve_app, app, self.listener.dup(), is_over)
            group.start_soon(end_with_signal)
            with waiting:
                while anyio.current_time() < until:
                    await anyio.sleep(DATABASE_PAUSE_S)
                    with suppress(JournalUnavailable):
                        if await self._is_there():
                            break
            listening.cancel()
            is_over.set()
        return not waiting.cancel_called

    async def _is_there(self) -> bool:
        """True if the journal can be opened, or raises an error that waiting will not end."""
        with suppress(JournalRefused):
            async with self.journal:
                pass
        return True

    async def _serve_app(self, app: ASGIApp, listener: socket.socket, is_over: anyio.Event) -> None:
        serve = _by_hypercorn if self.backend == "trio" else _by_uvicorn
        await serve(app, listener, is_over)

    def _app(self, conversations: Conversations) -> Gateway:
        from ..gateway import app  # noqa: PLC0415 - an extra
        from ..gateway.guard import LOOPBACK_HOSTS  # noqa: PLC0415 - an extra

        return app(
            conversations,
            authenticate=self.authenticate,
            hosts=self.hosts.union(LOOPBACK_HOSTS),
            origins=self.origins,
            read_only=self.is_read_only,
        )

    async def _serve_open(
        self,
        conversations: Conversations,
        stack: AsyncExitStack,
        signals: AsyncIterator[signal.Signals],
    ) -> None:
        """Serve open conversations until a signal, and then until they are drained."""
        from ..gateway import Node  # noqa: PLC0415 - an extra

        node = None
        if self.nodes is not None:
            node = Node(conversations, address=self.nodes.address, keys=self.nodes.keys)
            await stack.enter_async_context(node)
        await self._serve(self._app(conversations), node, signals)

    async def _serve(
        self, gateway: Gateway, node: Node | None, signals: AsyncIterator[signal.Signals]
    ) -> None:
        told = self._told()
        is_over = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(self._serve_app, gateway, self.listener, is_over)
            if node is not None and self.nodes is not None:
                group.start_soon(self._serve_app, node, self.nodes.listener, is_over)
            for line in told:
                _say(line)
            await anext(signals)
            if not self.is_read_only:
                _say("draining; a second signal ends the grace")
            await _drain(gateway, signals, self.grace_s)
            is_over.set()

    def _told(self) -> Sequence[str]:
        host, port, *_ = self.listener.getsockname()
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{port}"
        who = "with tokens" if self.authenticate else "loopback only: there is no authentication"
        inspector = f"inspector at {address}/inspector/"
        if self.is_read_only:
            return (f"{inspector} (read-only)",)
        told = [f"listening on {address} ({who})", f"conversations in {self.place}", inspector]
        if self.nodes is not None:
            told.append(f"other machines reach this one at {self.nodes.address}")
        return told


def _load(backend: Backend) -> None:
    """Load what serves before the event loop is watched: from a cold disk it may take seconds."""
    for name in ("conversations.conversations", "gateway.application", f"cli._{backend}_server"):
        importlib.import_module(f"..{name}", __package__)


async def _by_uvicorn(app: ASGIApp, listener: socket.socket, is_over: anyio.Event) -> None:
    from ._asyncio_server import serve_on_asyncio  # noqa: PLC0415 - an extra

    await serve_on_asyncio(app, listener, is_over, keep_alive_s=KEEP_ALIVE_S, stop_s=STOP_S)


async def _by_hypercorn(app: ASGIApp, listener: socket.socket, is_over: anyio.Event) -> None:
    from ._trio_server import serve_on_trio  # noqa: PLC0415 - an extra

    await serve_on_trio(app, listener, is_over, keep_alive_s=KEEP_ALIVE_S, stop_s=STOP_S)


async def _drain(gateway: Gateway, signals: AsyncIterator[signal.Signals], grace_s: float) -> None:
    async def hurry() -> None:
        await anext(signals)
        await gateway.drain(0)

    async with anyio.create_task_group() as group:
        group.start_soon(hurry)
        await gateway.drain(grace_s)
        group.cancel_scope.cancel()


def _say(line: str) -> None:
    """Tell the operator."""
    print(f"turnkeeper: {line}", file=sys.stderr, flush=True)
