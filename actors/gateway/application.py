"""The gateway as an ASGI application.

    async with Conversations(support, journal=SQLiteJournal("chats.db")) as conversations:
        served = gateway.app(conversations)

It takes `Conversations` that you have opened and that you close; serve it alone, or mount it in
your own application. Without `authenticate` it lets every request in, so serve it on loopback only.
With `authenticate`, each principal has its own ids.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from turnkeeper.runtime import Ports, TurnkeeperError

from ..conversations.conversations import Conversations
from ..core.working_state import WhileDraining
from ..errors import InvalidInput
from ..owner.draining import Drained, check_drain
from ..values.text import check_bool
from .access import Authenticate, Authorize, Share, allows, check_access
from .ag_ui_routes import ag_ui
from .ai_sdk_routes import ai_sdk
from .events import feed_end
from .faults import argument_faults, validation_faults
from .guard import LOOPBACK_HOSTS, Guard, check_hosts, check_origins
from .inspection import inspection
from .limits import GatewayLimits
from .pages import pages
from .problems import OWN, ProblemRaised
from .replies import EventStream, problem_reply
from .routes import EVENT_SOURCES, health, router, wants_page
from .service import Service

__all__ = ["ROUTERS", "Gateway", "app"]

ROUTERS = (ai_sdk, ag_ui, router, inspection, health)
"""All routes of the API, for the application and for its tests.

They are tried in this order. The few routes of a chat come first, because a person waits for
them."""

_BY_STATUS = {
    401: "unauthenticated",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    429: "too-many-requests",
}
"""The problems of the framework's own errors, which an application's functions may raise, too."""


class Gateway:
    """An ASGI application; make it with `gateway.app`."""

    def __init__(self, api: FastAPI, service: Service, guard: Guard) -> None:
        self.api = api
        """The application behind the guard, with its routes and its OpenAPI document."""
        self._service = service
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)

    async def drain(self, grace_s: float, *, messages: WhileDraining = "queue") -> Drained:
        """Hand the conversations over to other processes, as `Conversations.drain` does.

        `grace_s` and `messages` mean the same as for that method.

        From now on `readyz` answers 503 and new streams end at once. Streams that are open end
        last. Call it before the server stops.
        """
        check_drain(grace_s, messages)
        self._service.streams.is_draining = True
        return await self._service.conversations.drain(grace_s, messages=messages)


def app(
    conversations: Conversations,
    *,
    authenticate: Authenticate | None = None,
    authorize: Authorize = allows,
    share: Share | None = None,
    hosts: Collection[str] = LOOPBACK_HOSTS,
    origins: Collection[str] = (),
    limits: GatewayLimits = GatewayLimits(),
    read_only: bool = False,
    ports: Ports | None = None,
) -> Gateway:
    """Return a gateway that serves these conversations.

    `authenticate`: returns the principal of a request. `authorize`: returns True if that principal
    may do this; by default its scopes decide. `share`: returns the place of a conversation that
    another principal shares with this one, or None. `hosts`: the host names under which clients
    reach this server, without ports. `origins`: the origins of other sites whose pages may write,
    such as `https://chat.example`. `limits`: the bounds on requests, streams and rates.
    `read_only`: answer 405 to every request that may write, before any other check. Raises
    `InvalidInput`.
    """
    if not isinstance(conversations, Conversations):
        raise InvalidInput(f"gateway.app takes Conversations, and not {conversations!r}")
    check_access(authenticate, authorize, share)
    check_bool("read_only", read_only)
    for name, given in (("hosts", hosts), ("origins", origins)):
        if isinstance(given, str):
            raise InvalidInput(f"{name} must be a list of texts, such as [{given!r}], not one text")
    check_hosts(hosts)
    check_origins(origins)
    service = Service(
        conversations,
        limits=limits,
        authenticate=authenticate,
        authorize=authorize,
        share=share,
        ports=ports if ports is not None else Ports(),
        is_read_only=read_only,
    )
    api = FastAPI(
        title="turnkeeper",
        # Not `include_router`: FastAPI would look for the route of each request router by router,
        # and twice in the one that has it.
        routes=[route for part in (*ROUTERS, pages) for route in part.routes],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # In a program that has set up OpenTelemetry, FastAPI would record the queries of searches,
        # and the texts and frames of unhandled errors. Older releases ignore this.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    api.state.service = service
    api.add_exception_handler(TurnkeeperError, _refused)
    api.add_exception_handler(ProblemRaised, _raised)
    api.add_exception_handler(RequestValidationError, _invalid)
    api.add_exception_handler(HTTPException, _by_status)
    api.add_exception_handler(Exception, _failed)

    async def identify(scope: Scope) -> Response | None:
        scope["app"] = api  # as the application does later: `authenticate` may ask for it
        request = Request(scope)
        try:
            await service.identify(HTTPConnection(scope))
        except TurnkeeperError as error:
            return await _refused(request, error)
        except ProblemRaised as error:
            return await _raised(request, error)
        except HTTPException as error:
            return await _by_status(request, error)
        return None

    guard = Guard(
        api,
        limits=limits,
        hosts=hosts,
        origins=origins,
        identify=identify,
        refuses=_may_write if read_only else None,
    )
    return Gateway(api, service, guard)


_READING_POSTS = re.compile(r".*/v1/conversations/[^/]+/verify")


def _may_write(scope: Scope) -> bool:
    """Return True unless a request only reads."""
    is_read = scope["method"] in ("GET", "OPTIONS")
    return not is_read and not (
        scope["method"] == "POST" and _READING_POSTS.fullmatch(scope["path"])
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, TurnkeeperError), error
    service: Service = request.app.state.service
    problem, facts = service.told(error)
    if isinstance(error, InvalidInput):
        facts = {**facts, **argument_faults(error, request)}
    return problem_reply(problem, facts)


async def _raised(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemRaised), error
    is_stream = request.scope.get("endpoint") in EVENT_SOURCES and not wants_page(request)
    if error.problem is OWN["not-open"] and is_stream:
        return EventStream(feed_end(error.problem.name))
    return problem_reply(error.problem, error.facts, retry_after_s=error.retry_after_s)


async def _invalid(request: Request, error: Exception) -> Response:
    """Say where the request is wrong and what is allowed there; never quote the request."""
    assert isinstance(error, RequestValidationError), error
    _release(error)
    return problem_reply(OWN["invalid-request"], validation_faults(error, request))


async def _by_status(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    if isinstance(error.__cause__, MemoryError):
        raise error.__cause__  # FastAPI takes any error while it reads a body for the client's
    _release(error)
    is_ours = error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR
    problem = OWN[_BY_STATUS.get(error.status_code, "internal" if is_ours else "malformed")]
    is_other_method = error.status_code == HTTPStatus.METHOD_NOT_ALLOWED
    return problem_reply(problem, headers=_allow(request) if is_other_method else None)


def _release(error: Exception) -> None:
    """Free the body that FastAPI could not read.

    The frame that read it holds the error, and the tracebacks of the error and its cause hold the
    frame. So the bodies of many requests would stay until the garbage collector runs.
    """
    error.__traceback__ = None
    if error.__cause__ is not None:
        error.__cause__.__traceback__ = None


def _allow(request: Request) -> Mapping[str, str]:
    """Return the header `Allow` with the methods of all routes of this address."""
    methods: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    if "GET" in methods:
        methods.add("HEAD")  # which the guard answers by it
    return {"Allow": ", ".join(sorted(methods))}


async def _failed(_request: Request, _error: Exception) -> Response:
    """Say that the request failed, without details; the guard logs where."""
    return problem_reply(OWN["internal"])
