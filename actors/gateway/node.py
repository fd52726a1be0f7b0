"""One of several processes with the same journal: forwards commands to owners, and receives them.

    address = gateway.node_address("http://10.0.0.3:8101")
    journal = PostgresJournal("postgresql://…", address=address)
    async with (
        Conversations(support, journal=journal) as conversations,
        gateway.Node(conversations, address=address, keys=NodeKeys.from_file("node.keys")) as node,
    ):
        ...  # serve `gateway.app(conversations)` to clients, and `node` to the other nodes

A `Node` is an ASGI application. Serve it on a listener of its own that only the other nodes can
reach. It serves two routes, and none of the public ones:

1. a command, carried out here and never forwarded again;
2. the pieces of one conversation's answers, for all readers on the other node together.

It promises that a command is sent at most once for each call. If no answer comes, the call raises
`OutcomeUnknown`, and the same command under the same id finds out what happened. A node stops
waiting for the answer once the process that it asked has lost the conversation; a process that
hangs loses it when its lease runs out. If a process cannot be reached while its lease lasts, the
call raises `OwnedElsewhere`: nothing happened. If a node closes the connection because it stops
waiting, or ends, its command is not carried out any more, unless it has begun. A node does not
promise pieces: while the owner cannot be reached, readers get only the events, and streams get a
note about it.

The journal decides who owns what. A node keeps no list of the others: it calls the address in the
lease of the conversation's owner, which PostgreSQL gives only while that lease lasts.

A command is sent with its principal and that principal's scopes. The owner's node authorizes the
principal again before it carries the command out, since a right may have been taken away meanwhile.
Commands from the application's own code have no principal, and are carried out without this check.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Self, TypeVar, cast
from urllib.parse import urlsplit

import anyio
from anyio.abc import TaskGroup
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from turnkeeper.runtime import OutcomeUnknown, Ports, TurnkeeperError
from turnkeeper.runtime.lowlevel import Logger, is_interruption

from ..conversations.conversations import Conversations
from ..core.commands import Change, FromOutside
from ..errors import Forbidden, InvalidInput, NotYours
from ..events import TextDelta
from ..owner.nodes import NotReached, NotRead, Passed, ThisNode
from .access import (
    ACTIONS,
    Action,
    Authorize,
    Principal,
    Share,
    allows,
    check_authorize,
    find_place,
    is_allowed,
)
from .guard import Received, refuse
from .limits import check_limits
from .node_client import Broken, NodeClient, Unreachable
from .node_keys import BadSignature, NodeKeys, PerhapsSeen, Seen, Signed, digest_of
from .node_wire import (
    decode_ask,
    decode_line,
    decode_reply,
    encode_ask,
    encode_error,
    encode_line,
    encode_reply,
)
from .replies import LineStream, Write

__all__ = ["Node", "NodeLimits", "node_address"]

R = TypeVar("R")

SIGNATURE = "turnkeeper-node"
_RUN = re.compile(r"/[0-9a-f-]{16,64}")

_logger = Logger("turnkeeper.gateway")


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """The bounds on the requests between nodes. Raises `InvalidInput`."""

    body_bytes_max: int = 32 << 20
    body_s: float = 30.0
    answer_s: float = 40.0
    """After how many seconds without an answer the outcome of a command is unknown."""
    look_s: float = 2.0
    """How often to check that the process that is asked still owns the conversation."""
    asked_at_once: int = 4_096
    """How many commands of other nodes are carried out at once."""
    streams_max: int = 10_000
    """For how many conversations at once pieces are sent to other nodes, and received from them."""
    heartbeat_s: float = 5.0
    """How often a stream without pieces sends a heartbeat."""
    silence_s: float = 15.0
    """After how many seconds of silence a stream is given up."""
    retry_s: float = 1.0
    """How long to wait before asking for pieces again."""
    idle_look_s: float = 60.0
    """The longest time between checks who owns a conversation that is read here and runs no
    turn."""

    def __post_init__(self) -> None:
        check_limits(self)


def node_address(url: str, *, ports: Ports | None = None) -> str:
    """Return the address of this run of the process, given the URL of its listener for nodes.

    `http://10.0.0.3:8101` becomes `http://10.0.0.3:8101/<run>`. Give it to the journal and to the
    `Node`. Each run has a new name, so a request that was meant for an earlier run is refused.
    Raises `InvalidInput`.
    """
    if _split(url) != "" and _split(url) != "/":
        raise InvalidInput("the URL of a node is http://HOST:PORT, without a path")
    if _is_unspecified(host := urlsplit(url).hostname or ""):
        raise InvalidInput(
            f"the URL of a node is {url}; at {host} a machine may listen, but each other machine "
            "would reach itself there; take the name or the address at which they reach this one"
        )
    run = (ports or Ports()).ids.new().lower()
    return f"{url.rstrip('/')}/{run}"


def _is_unspecified(host: str) -> bool:
    """True for 0.0.0.0 and ::, in each spelling."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def _split(address: str) -> str | None:
    """Return the path of a node's address; None if this is not one."""
    try:
        parts = urlsplit(address)
        is_whole = parts.scheme == "http" and parts.hostname and parts.port
    except ValueError:
        return None
    if not is_whole or parts.query or parts.fragment or "@" in parts.netloc:
        return None
    return parts.path


@dataclass(slots=True)
class _Asked:
    """A command on its way."""

    address: str
    conversation_id: str
    began_at: float
    has_moved: bool = False
    """True if the last check found another owner, or none."""


class Node:
    """Connects this process with the other nodes; enter it inside `Conversations`, and serve it."""

    def __init__(
        self,
        conversations: Conversations,
        *,
        address: str,
        keys: NodeKeys,
        authorize: Authorize = allows,
        share: Share | None = None,
        limits: NodeLimits = NodeLimits(),
        ports: Ports | None = None,
    ) -> None:
        """Make a node; it forwards nothing until it is entered.

        `address`: from `node_address`, the same that the journal got. `keys`: the keys of all
        nodes. `authorize`, `share`: the same as for `gateway.app`, for commands that other nodes
        forward. Raises `InvalidInput`.
        """
        path = _split(address)
        if path is None or not _RUN.fullmatch(path):
            raise InvalidInput("the address of a node comes from node_address(url)")
        check_authorize(authorize)
        self._conversations = conversations
        self._path = path
        self._keys = keys
        self._authorize = authorize
        self._share = share
        self._limits = limits
        self._ports = ports if ports is not None else Ports()
        self._seen = Seen(keys, self._ports.now, self._ports.monotonic)
        self._make_client()
        self._here: ThisNode | None = None
        self._group: TaskGroup | None = None
        """This and `_here` are set only while the node is entered."""
        self._relays: dict[str, anyio.Event] = {}
        """The conversations whose pieces are asked for, each with the event that wakes its
        relay."""
        self._asking: dict[anyio.CancelScope, _Asked] = {}
        """The commands that wait for an answer, each with its cancel scope."""
        self._is_looking = False
        self._asked_count = 0
        self._streams_count = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._group = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(self._make_client)  # what is still under way keeps the closed one
            stack.push_async_callback(self._client.aclose)
            stack.callback(self._group.cancel_scope.cancel)
            self._here = self._conversations.join(self)
            stack.callback(self._leave)
            self._stack = stack.pop_all()
        return self

    def _make_client(self) -> None:
        self._client = NodeClient(monotonic=self._ports.monotonic, answer_s=self._limits.answer_s)

    def _leave(self) -> None:
        """Send and accept nothing from now on, and stop waiting for answers."""
        self._conversations.leave_nodes()
        self._here = self._group = None
        self._is_looking = False
        for scope in self._asking:
            scope.cancel()

    async def __aexit__(self, *exc_info: object) -> bool | None:
        return await self._stack.__aexit__(*exc_info)  # type: ignore[arg-type]  # as they came

    # --- requests to other nodes ------------------------------------------------------------------

    async def ask(self, address: str, conversation_id: str, command: FromOutside[R]) -> R:
        """Have the node at this address carry a command out; see `OtherNodes`."""
        path = _split(address)
        if path is None or not _RUN.fullmatch(path):
            raise NotReached  # a process that is no node
        if self._group is None:
            raise NotReached  # this node was left after the caller had begun
        body = encode_ask(conversation_id, command)
        target = f"{path}/ask"
        try:
            status, answer = await self._answer_of(address, conversation_id, target, body)
        except Unreachable as error:
            raise NotReached from error
        except Broken as error:
            raise _unknown(conversation_id) from error
        if status in _NOTHING_HAPPENED or (status == _UNAVAILABLE and answer == _NOT_TAKEN):
            _logger.warning("command not taken by its owner's node", status=status)
            raise NotRead if status == _NOT_READ else NotReached
        try:
            return cast("R", decode_reply(answer))
        except ValueError as error:
            if isinstance(error, TurnkeeperError):
                raise  # the error that came in place of a reply
            raise _unknown(conversation_id) from error

    async def _answer_of(
        self, address: str, conversation_id: str, target: str, body: bytes
    ) -> tuple[int, bytes]:
        """Send the command, and wait for the answer while the process that got it is the owner.

        Raises `Unreachable`, and `Broken` if the answer did not come.
        """
        group = self._group
        assert group is not None, "a command of a node that is not entered"
        scope = anyio.CancelScope()
        if not self._is_looking:
            self._is_looking = True
            group.start_soon(self._give_up_on_moved_owners)
        self._asking[scope] = _Asked(address, conversation_id, self._ports.monotonic())
        try:
            with scope:
                return await self._client.post(address, target, self._signed(target, body), body)
        finally:
            del self._asking[scope]
        raise Broken("its process does not own the conversation any more, or this node was left")

    async def _give_up_on_moved_owners(self) -> None:
        """Stop waiting for answers from processes that lost the conversation.

        Runs for as long as a command waits for its answer.

        A process that hangs does not answer, and its lease runs out. A process that has released
        the conversation may have sent its answer already: so two checks in a row must find it
        moved.
        """
        while self._asking:
            await anyio.sleep(self._limits.look_s)
            before = self._ports.monotonic() - self._limits.look_s
            late = [each for each in self._asking.items() if each[1].began_at <= before]
            moved: dict[tuple[str, str], bool] = {}
            for scope, asked in late:
                place = (asked.conversation_id, asked.address)
                if place not in moved:
                    moved[place] = await self._has_moved(*place)
                if moved[place] and asked.has_moved:
                    scope.cancel()
                asked.has_moved = moved[place]
        self._is_looking = False

    async def _has_moved(self, conversation_id: str, address: str) -> bool:
        """Return True if the journal says that the process at this address is not the owner."""
        here = self._here
        if here is None:
            return False  # this node was left, and waits for no answer any more
        try:
            return await here.has_moved(conversation_id, address)
        except Exception:  # noqa: BLE001 - it must not end this node's other tasks
            return False  # the database is away, so the owner is unknown

    def _signed(self, target: str, body: bytes) -> list[tuple[str, str]]:
        at, nonce = int(self._ports.now()), self._ports.ids.new().lower()
        signed = Signed(target, digest_of(body), 1, at, nonce)
        return [(SIGNATURE, signed.header(self._keys)), ("Content-Type", "application/json")]

    def want_pieces(self, conversation_id: str) -> None:
        """Ask the owner for the pieces of a conversation while readers here wait for them."""
        known = self._relays.get(conversation_id)
        if known is not None:
            known.set()
        elif self._group is not None and self._here is not None:
            if len(self._relays) >= self._limits.streams_max:
                self._here.note_heard(conversation_id, is_heard=False)
                return
            self._relays[conversation_id] = anyio.Event()
            self._group.start_soon(self._relay, conversation_id)

    async def _relay(self, conversation_id: str) -> None:
        """Give readers here the pieces that another node writes, while there are such readers."""
        here = self._here
        assert here is not None, "a relay of a node that was not entered"
        pause_s = self._limits.heartbeat_s
        try:
            while here.wants_pieces(conversation_id):
                called = self._relays[conversation_id] = anyio.Event()
                try:
                    found = await here.whereabouts_of(conversation_id)
                    if found.owner is not None and _split(found.owner):
                        await self._relay_from(found.owner, conversation_id, here)
                except Exception as error:  # noqa: BLE001 - it must not end the other relays
                    if not isinstance(error, Unreachable | Broken | TurnkeeperError):
                        _logger.error(  # noqa: TRY400 - what is said must not be in it
                            "relay of pieces failed", error=type(error).__name__
                        )
                    here.note_heard(conversation_id, is_heard=False)
                    await anyio.sleep(self._limits.retry_s * self._ports.random.uniform(0.5, 1))
                else:
                    # No owner, an owner here, or one that has ended: the next event tells of a new
                    # owner. But one that goes on with a turn may write pieces before any event.
                    here.note_heard(conversation_id, is_heard=True)
                    await self._wait_for_call(called, pause_s)
                    is_idle = found.is_idle and not called.is_set()
                    pause_s = (
                        min(2 * pause_s, self._limits.idle_look_s)
                        if is_idle
                        else self._limits.heartbeat_s
                    )
        finally:
            del self._relays[conversation_id]
            here.drop_pieces(conversation_id)
            here.note_heard(conversation_id, is_heard=True)

    async def _wait_for_call(self, called: anyio.Event, pause_s: float) -> None:
        with anyio.move_on_after(pause_s):
            await called.wait()

    async def _relay_from(self, address: str, conversation_id: str, here: ThisNode) -> None:
        target = f"{_split(address)}/pieces"
        body = json.dumps({"conversation_id": conversation_id}).encode()
        opened = self._client.lines(
            address, target, self._signed(target, body), body, silence_s=self._limits.silence_s
        )
        async with opened as (status, lines):
            if status != _OK:
                raise Broken(f"pieces were refused with {status}")
            try:
                await self._take_lines(lines, conversation_id, here)
            finally:
                # The stream broke, so the rest of an open answer will not come. A reader that comes
                # now must not get its beginning and wait for the rest.
                here.drop_pieces(conversation_id)

    async def _take_lines(
        self, lines: AsyncIterator[bytes], conversation_id: str, here: ThisNode
    ) -> None:
        """Take the pieces from the owner's node until they end or no reader here wants them."""
        after = 0
        here.note_heard(conversation_id, is_heard=True)
        async for line in lines:
            if not here.wants_pieces(conversation_id):
                return
            here.note_heard(conversation_id, is_heard=True)
            try:
                item = decode_line(line)
            except ValueError as error:
                raise Broken("a line that cannot be read") from error
            if isinstance(item, Passed):
                after = item.seq
                here.take_passed(conversation_id, item)
            elif item is not None:
                here.take_piece(conversation_id, item, after)

    # --- requests from other nodes ----------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                received = Received(receive)
                reply = await self._answer(scope, received)
                if received.is_whole:
                    await reply(scope, received, send)
                else:
                    await refuse(reply, scope, received, send)
            case "lifespan":
                while (await receive())["type"] != "lifespan.shutdown":
                    await send({"type": "lifespan.startup.complete"})
                await send({"type": "lifespan.shutdown.complete"})
            case _:
                await send({"type": "websocket.close", "code": 1000})

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        routes = {f"{self._path}/ask": self._carry_out, f"{self._path}/pieces": self._feed_pieces}
        route = routes.get(scope["path"])
        if route is None or scope["method"] != "POST" or scope["query_string"]:
            return _refused(404)
        given = [value for name, value in scope["headers"] if name == SIGNATURE.encode()]
        try:
            if len(given) != 1:
                raise BadSignature
            signed = self._seen.check(scope["path"], given[0].decode("latin-1"))
            # Only now: the request may have been carried out before this node was left.
            here = self._here
            if here is None:
                return _refused(404)
            body = await self._read_body(receive)
            if body is None:
                return _refused(413)
            if digest_of(body) != signed.body_digest:
                raise BadSignature
        except BadSignature:
            _logger.warning("request to a node refused: bad signature; check keys and clocks")
            return _refused(401)
        except PerhapsSeen:
            _logger.warning("request to a node refused: it may have been here before")
            return _refused(409)
        return await _while_awaited(receive, partial(route, here, body))

    async def _read_body(self, receive: Receive) -> bytes | None:
        """Read the whole body; None if it is too long, or does not come."""
        body = bytearray()
        with anyio.move_on_after(self._limits.body_s):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                body += message.get("body", b"")
                if len(body) > self._limits.body_bytes_max:
                    return None
                if not message.get("more_body", False):
                    return bytes(body)
        return None

    async def _carry_out(self, here: ThisNode, body: bytes) -> Response:
        if self._asked_count >= self._limits.asked_at_once:
            return _refused(503)
        try:
            conversation_id, command = decode_ask(body)
        except TurnkeeperError as error:
            return _reply(encode_error(error))
        except ValueError:
            return _refused(400)
        self._asked_count += 1
        try:
            if not await self._was_checked(conversation_id, command):
                return _refused(503)
            return _reply(encode_reply(await here.ask(conversation_id, command)))
        except TurnkeeperError as error:
            return _reply(encode_error(error))
        except Exception as error:  # noqa: BLE001 - a bug, after which it may have happened
            _logger.error(  # noqa: TRY400 - what is said must not be in it
                "command of another node failed", error=type(error).__name__
            )
            return _refused(500)
        finally:
            self._asked_count -= 1

    async def _was_checked(self, conversation_id: str, command: FromOutside[object]) -> bool:
        """Return True if the command may be carried out; False if this node cannot decide that.

        Raises `Forbidden`, `NotYours`, and `InvalidInput`.
        """
        try:
            await self._check_again(conversation_id, command)
        except TurnkeeperError:
            raise
        except BaseException as error:  # of the application's own functions
            if is_interruption(error):
                raise
            _logger.error(  # noqa: TRY400 - what is said must not be in it
                "command of another node not authorized", error=type(error).__name__
            )
            return False
        return True

    async def _check_again(self, conversation_id: str, command: FromOutside[object]) -> None:
        """Authorize the principal for whom another node has forwarded a command."""
        expected = command.expected
        behalf = None if expected is None else expected.behalf
        if expected is None or behalf is None:
            return  # sent by the application's own code, without a principal
        scopes = frozenset(action for action in ACTIONS if action in behalf.scopes)
        principal = Principal(behalf.principal, scopes)
        # All commands change something; reads are never forwarded.
        action: Action = "admin" if behalf.name is None else "write"
        gives_away = isinstance(command, Change) and command.owner is not None
        if not is_allowed(self._authorize, principal, action, behalf.name) or (
            gives_away and not principal.is_admin
        ):
            raise Forbidden(conversation_id, behalf.principal)
        if behalf.name is not None:
            place = await find_place(principal, behalf.name, self._share)
            # An administrator may name any user.
            is_meant = principal.is_admin or place.user == expected.owner
            if place.conversation_id != conversation_id or not is_meant:
                raise NotYours(conversation_id)

    async def _feed_pieces(self, here: ThisNode, body: bytes) -> Response:
        try:
            conversation_id = str(json.loads(body)["conversation_id"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return _refused(400)
        if self._streams_count >= self._limits.streams_max:
            return _refused(503)

        async def feed(write: Write) -> None:
            self._streams_count += 1
            try:
                await self._write_pieces(here, conversation_id, write)
            finally:
                self._streams_count -= 1

        return LineStream(feed)

    async def _write_pieces(self, here: ThisNode, conversation_id: str, write: Write) -> None:
        """Write the pieces from here, and end when no owner is active here: there may be another.

        The pieces that the last owner here has written until then come first.
        """
        pieces: AsyncIterator[Passed | TextDelta] | None = None
        is_owned = True
        while True:
            item: Passed | TextDelta | None = None
            try:
                if pieces is None:
                    pieces = await here.pieces(conversation_id)
                with anyio.move_on_after(self._limits.heartbeat_s if is_owned else 0):
                    item = await anext(pieces)
            except (StopAsyncIteration, TurnkeeperError):
                return
            if item is None and not is_owned:
                return
            is_owned = here.is_owner(conversation_id)
            with anyio.move_on_after(self._limits.silence_s) as scope:
                await write(encode_line(item))
            if scope.cancelled_caught:
                return  # the other node reads nothing, and has given this stream up


_OK = 200
_NOTHING_HAPPENED = frozenset((400, 401, 404, 413))
"""The statuses of an answer that mean that nothing of the command was carried out."""
_NOT_READ = 400
_UNAVAILABLE = 503
_NOT_TAKEN = b"not taken"
"""Marks a node's own 503. A proxy between two nodes may answer 503 although the command arrived."""


def _unknown(conversation_id: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"a command to conversation {conversation_id} went to the process that owns it, and no "
        "answer came; it may have happened; send it again under the same id"
    )


def _refused(status: int) -> Response:
    said = _NOT_TAKEN if status == _UNAVAILABLE else b""
    return Response(said, status_code=status, headers={"Connection": "close"})


async def _while_awaited(receive: Receive, answer: Callable[[], Awaitable[Response]]) -> Response:
    """Return the answer; cancel it if the asking node leaves.

    That node's caller is told to send the command again. A late copy that has not begun by then
    must not be carried out: the conversation may have been deleted after the repeat was.
    """

    async def watch() -> None:
        # The body is whole, so nothing else can come.
        if (await receive())["type"] == "http.disconnect":
            group.cancel_scope.cancel()

    given = _refused(500)  # the answer to a node that has left: the server does not send it
    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        given = await answer()
        group.cancel_scope.cancel()
    return given


def _reply(body: bytes) -> Response:
    return Response(body, media_type="application/json")
