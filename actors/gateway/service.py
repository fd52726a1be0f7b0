"""Shared by all routes: the conversations, access, and the streams that are open.

A route names its action in its signature (`Reading`, `Writing`, `Inspecting` and the others). The
dependency behind that name authenticates, counts the request against the principal's rate,
authorizes it, turns the id in the path into the stored one, and checks who owns the conversation.
So a route that names no action does not get a conversation at all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, TypeVar

import anyio
from fastapi import Depends, Path, Request
from starlette.requests import HTTPConnection

from turnkeeper.runtime import Ports, TurnkeeperError
from turnkeeper.runtime.lowlevel import closing_scopes

from ..conversations.conversation import Conversation
from ..conversations.conversations import Conversations
from ..core.commands import Behalf
from ..core.state import Folded
from ..errors import (
    ConversationNotFound,
    CorruptLog,
    JournalRefused,
    JournalUnavailable,
    NotYours,
)
from ..events import LoggedEvent
from ..log_lines import log_unavailable
from .access import (
    Action,
    Authenticate,
    Authorize,
    BearerTokens,
    Place,
    Principal,
    Rates,
    Share,
    check_principal,
    find_place,
    is_allowed,
    user_of,
)
from .faults import OwnRoute, invalid_id, unusable
from .frames import Frames
from .history import Histories
from .limits import GatewayLimits
from .names import (
    Cursor,
    from_path,
    is_known_id,
    is_new_id,
    parse_cursor,
    principal_of,
    stored_id,
    wire_id,
)
from .problems import OWN, Problem, ProblemRaised, problem_of

__all__ = [
    "Caller",
    "ConversationCaller",
    "Inspecting",
    "Listing",
    "May",
    "Reading",
    "Ruling",
    "Service",
    "Streams",
    "Writing",
]

T = TypeVar("T")

WARN_EVERY_S = 60.0
"""Within this time, an error of the journal is logged once, and `WARNINGS_MAX` different ones."""
WARNINGS_MAX = 20

_PRINCIPAL = "turnkeeper.principal"
"""The key under which a request's scope has its principal, once that is known."""


class Counter:
    """Counts how many of something are open."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Count one more while inside."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


class Streams(Counter):
    """The streams that are open.

    While the gateway drains, new streams end at once, so that their clients go elsewhere. Streams
    that are open go on until the conversations are handed over.
    """

    def __init__(self, limits: GatewayLimits) -> None:
        super().__init__()
        self.is_draining = False
        self.changes = Counter()
        """The streams of changed rows, which read the journal at intervals."""
        self._limits = limits

    @property
    def is_full(self) -> bool:
        return self.count >= self._limits.streams_max

    async def until_beat(self, wait: Awaitable[T]) -> T | None:
        """Return the result of waiting, or None if a heartbeat is due first."""
        with anyio.move_on_after(self._limits.heartbeat_s):
            return await wait
        return None

    async def gather_pieces(self) -> None:
        """Wait after a piece was written, so that the pieces of that time are read as one."""
        await anyio.sleep(self._limits.pieces_gathered_s)


class Service:
    """The conversations as the routes see them."""

    def __init__(
        self,
        conversations: Conversations,
        *,
        limits: GatewayLimits,
        authenticate: Authenticate | None,
        authorize: Authorize,
        share: Share | None,
        ports: Ports,
        is_read_only: bool,
    ) -> None:
        self.is_read_only = is_read_only
        self.histories = Histories(conversations)
        self.conversations = conversations
        self.limits = limits
        self.ports = ports
        self.streams = Streams(limits)
        self.frames = Frames()
        self._authenticate = authenticate
        self._authorize = authorize
        self._share = share
        self._warned: dict[str, float] = {}
        """The errors of the journal that were logged of late, and when each may be again."""
        self._rates = Rates(
            ports.monotonic, per_s=limits.requests_per_s, burst=limits.requests_at_once
        )

    def told(self, error: TurnkeeperError) -> tuple[Problem, Mapping[str, object]]:
        """Return the problem that a client is told of, and its facts.

        A client is told of the journal in general words only, so an error of it is logged.
        """
        if isinstance(error, JournalRefused | JournalUnavailable | CorruptLog):
            self._warn(error)
        return problem_of(error)

    def _warn(self, error: TurnkeeperError) -> None:
        now = self.ports.monotonic()
        self._warned = {text: until for text, until in self._warned.items() if now < until}
        if str(error) not in self._warned and len(self._warned) < WARNINGS_MAX:
            self._warned[str(error)] = now + WARN_EVERY_S
            log_unavailable("journal cannot be used", error)

    async def identify(self, request: HTTPConnection) -> Principal | None:
        """Return the principal of a request, once counted; None if this gateway has none.

        Raises a problem if the request may not go on. It may be called again for one request, with
        the same result: the guard calls it before it reads a body.
        """
        scope = request.scope
        if _PRINCIPAL not in scope:
            if not self.conversations.is_entered:
                raise ProblemRaised(OWN["not-open"])
            scope[_PRINCIPAL] = await self._authenticated(request)
        principal: Principal | None = scope[_PRINCIPAL]
        return principal

    async def _authenticated(self, request: HTTPConnection) -> Principal | None:
        if self._authenticate is None:
            return None
        with closing_scopes("authenticate"):
            principal = await self._authenticate(request)
        if principal is None:
            raise ProblemRaised(OWN["unauthenticated"])
        check_principal(principal)
        wait_s = self._rates.take(principal.name)
        if wait_s:
            raise ProblemRaised(OWN["too-many-requests"], retry_after_s=wait_s)
        return principal

    async def admit(
        self, request: Request, action: Action, local_id: str | None
    ) -> Principal | None:
        """Return the principal of a request, as `identify` does, if it may do this.

        Raises a problem if the request may not go on, or has a query parameter that our own API
        does not take, or takes once. An application's own `authenticate` may read parameters that
        only it knows, such as the ticket of an `EventSource`, which cannot send headers: so it lets
        unknown ones through.
        """
        principal = await self.identify(request)
        self.check_may(principal, action, local_id)
        if isinstance(route := request.scope["route"], OwnRoute):
            is_ours = isinstance(self._authenticate, BearerTokens | None)
            route.check_parameters(request, takes_others=not is_ours)
        return principal

    def check_may(self, principal: Principal | None, action: Action, local_id: str | None) -> None:
        """Raise a problem unless the principal may do this; without principals, all may."""
        if principal is not None and not is_allowed(self._authorize, principal, action, local_id):
            raise ProblemRaised(OWN["forbidden"])

    async def caller_in(self, principal: Principal | None, local_id: str) -> ConversationCaller:
        """Return the caller with the conversation of this id.

        Raises a problem if a journal cannot have such an id.
        """
        place = await find_place(principal, local_id, self._share)
        if not is_known_id(place.conversation_id):
            raise invalid_id(parameter="conversation_id")
        if principal is not None and principal.is_admin:
            place = await self._as_begun(place)
        conversation = self.conversations[place.conversation_id].expecting(owner=place.user)
        try:
            # A command that changes the conversation checks the user again when it is decided.
            await conversation.check_user()
        except NotYours as error:
            return ConversationCaller(self, principal, local_id, place, error)
        return ConversationCaller(self, principal, local_id, place)

    async def _as_begun(self, place: Place) -> Place:
        """Return the place; a new conversation under a principal's id becomes that principal's."""
        user = principal_of(place.conversation_id)
        if user is None or await self.conversations[place.conversation_id].exists():
            return place
        return Place(place.conversation_id, user)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, and the service that it came to."""

    service: Service
    principal: Principal | None

    @property
    def user(self) -> str | None:
        """The principal whose own ids are on the wire; None if the wire has stored ids."""
        return user_of(self.principal)

    @property
    def author(self) -> str | None:
        """The author of the chat messages that the caller sends."""
        return None if self.principal is None else self.principal.name

    @property
    def behalf(self) -> Behalf | None:
        """The caller, as it is described to another process that carries out a command for it."""
        return self._behalf(None)

    def _behalf(self, local_id: str | None) -> Behalf | None:
        principal = self.principal
        if principal is None:
            return None
        return Behalf(principal.name, tuple(sorted(principal.scopes)), local_id)

    def stored(self, local_id: str) -> str:
        return stored_id(self.user, local_id)

    def rename(self, conversation_id: str) -> str | None:
        return wire_id(self.user, conversation_id)


@dataclass(frozen=True, slots=True)
class ConversationCaller(Caller):
    """A caller, and the conversation of the request."""

    local_id: str
    place: Place
    refusal: NotYours | None = None
    """Set if the conversation is another user's. It is raised only when the conversation is used:
    until then a request is checked as if there were no such conversation."""

    @property
    def behalf(self) -> Behalf | None:
        return self._behalf(self.local_id)

    @property
    def conversation_id(self) -> str:
        """The conversation's stored id. Raises `NotYours`."""
        if self.refusal is not None:
            raise self.refusal
        return self.place.conversation_id

    @property
    def conversation(self) -> Conversation:
        """The conversation; its commands are refused if it is another user's."""
        return self.expecting()

    def expecting(self, *, exists: bool = False, cursor: Cursor | None = None) -> Conversation:
        """Return the conversation; its commands are refused unless it exists, or has this event."""
        conversation = self.service.conversations[self.conversation_id]
        return conversation.expecting(
            owner=self.place.user,
            exists=exists,
            seq=None if cursor is None else cursor.seq,
            event_id=None if cursor is None else cursor.event_id,
            at_us=None if cursor is None else cursor.at_us,
            behalf=self.behalf,
        )

    async def at(self, seq: int | None = None) -> Folded:
        """Return the state at a seq, as `Conversation.at` does, but fast in a long log."""
        return await self.service.histories.at(self.conversation_id, seq)

    async def check_may_begin(self) -> None:
        """Raise a problem unless the id may be a new conversation's, or the conversation exists."""
        if not is_new_id(self.local_id) and not await self.conversation.exists():
            raise invalid_id(parameter="conversation_id")

    async def check_exists(self) -> None:
        """Raise `ConversationNotFound` if the conversation does not exist."""
        if not await self.conversation.exists():
            raise ConversationNotFound(self.conversation_id)

    async def find(self, cursor: Cursor) -> LoggedEvent | None:
        """Return the event at a cursor; None if the log does not have it there, or at seq 0."""
        if not cursor.seq:
            return None
        try:
            async for logged in self.conversation.events(after=cursor.seq - 1, live=False):
                return logged if cursor.fits(logged) else None
        except ConversationNotFound:
            pass
        return None


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


class May:
    """A dependency that admits a request if its sender may do this."""

    def __init__(self, action: Action) -> None:
        self.action = action

    async def __call__(self, request: Request) -> Caller:
        service = _service(request)
        return Caller(service, await service.admit(request, self.action, None))


class _MayHere(May):
    """Like `May`, for a route of one conversation."""

    async def __call__(  # type: ignore[override]  # FastAPI reads what it needs from it
        self,
        request: Request,
        conversation_id: Annotated[
            str, Path(description="An id; one with special characters as `~` and its base64url.")
        ],
    ) -> ConversationCaller:
        local_id = from_path(conversation_id)
        if local_id is None:
            raise invalid_id(parameter="conversation_id")
        service = _service(request)
        principal = await service.admit(request, self.action, local_id)
        return await service.caller_in(principal, local_id)


Listing = Annotated[Caller, Depends(May("read"))]
Inspecting = Annotated[Caller, Depends(May("inspector"))]
Ruling = Annotated[Caller, Depends(May("admin"))]
Reading = Annotated[ConversationCaller, Depends(_MayHere("read"))]
Writing = Annotated[ConversationCaller, Depends(_MayHere("write"))]


def cursor_of(text: str, **place: str) -> Cursor:
    """Return the cursor that a client sent at this place. Raises a problem if it is not one."""
    cursor = parse_cursor(text)
    if cursor is None:
        raise unusable("must be a seq, or `<seq>.<event id>` as received", **place)
    return cursor
