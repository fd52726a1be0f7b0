"""Stands before the application: bounds each request, and refuses requests from other sites' pages.

The application sees a request only once these hold: the host is a known one; no header that a check
relies on comes twice; the headers and the body are within their bounds, its nesting included, and
arrived in time; a request that may change something declares a body of JSON, which another site's
form cannot do, does not come from another site's page, and its sender is known. The body is read
last, so that a stranger cannot make this process keep one. A request that only reads has none.

A request without a body need not declare a type. Such a request is never a form's, which always
declares one; if a script of another site sends it, the browser names that site.

A client that reads nothing of its response for a while is cut off. On trio the listener does this,
since hypercorn shields its writes from all cancellation. Each exception of the application, and
each panic, ends here, with a log line that has its type and its place, and nothing of the request.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from ipaddress import ip_address
from urllib.parse import unquote_to_bytes

import anyio
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnkeeper.runtime.lowlevel import Logger, is_interruption

from ..errors import InvalidInput
from .limits import GatewayLimits
from .problems import OWN, Problem
from .replies import problem_reply

__all__ = ["LOOPBACK_HOSTS", "PART_BYTES", "Guard", "Received", "is_deeper", "refuse"]

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_READS = frozenset(("GET", "OPTIONS"))
_JSON = frozenset(("application/json", "application/merge-patch+json"))
_FROM_HERE = frozenset(("", "none", "same-origin"))
"""The values of `Sec-Fetch-Site` if no other site sent the request; empty: no browser sent it."""
_ONCE = frozenset(
    (
        b"accept",
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"host",
        b"idempotency-key",
        b"if-match",
        b"last-event-id",
        b"origin",
        b"prefer",
    )
)

PART_BYTES = 64 << 10
"""How much of a body is given to the server at once."""
REST_S = 5.0
"""For how many seconds a refused request may go on sending its body."""
REST_BYTES_MAX = 64 << 20
"""How much of its body a refused request may send."""

_SAFE = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)
"""Headers of every response that does not set its own: no cache keeps it, and a browser that opens
it runs nothing."""

# A string without an end matches to the end of the body. If it did not match, the search would
# begin anew at each of its quotes, and take time with the square of their number.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_ABSOLUTE = re.compile(r"(?i:https?)://([^/]+)(/.*)?", re.DOTALL)
_PORT = re.compile(r":[0-9]*\Z")
_HOST = re.compile(r"\[[0-9a-f:.%\w]+\]|[^\s/:*\[\]@,?#]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/*?#@,]+")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")

_logger = Logger("turnkeeper.gateway")


class Refused(Exception):
    """Ends a request before the application sees it."""

    def __init__(self, problem: Problem, rule: str = "", **place: str) -> None:
        super().__init__(problem.name)
        self.problem = problem
        self.facts = {"errors": [{**place, "detail": rule}]} if rule else None


class Guard:
    """An ASGI application that checks each request before another application gets it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: GatewayLimits,
        hosts: Collection[str],
        origins: Collection[str],
        identify: Callable[[Scope], Awaitable[Response | None]],
        refuses: Callable[[Scope], bool] | None,
    ) -> None:
        self._app = app
        self._identify = identify
        """Returns the refusal of a request whose sender may send none, or None."""
        self._refuses = refuses
        """Returns True for a request that this read-only server refuses, since it may write."""
        self._limits = limits
        self._hosts = frozenset(map(_as_asked_for, hosts))
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http" if scope["method"] == "HEAD":
                with anyio.CancelScope() as serving:
                    head_only = _HeadOnly(send, serving.cancel)
                    await self._serve({**scope, "method": "GET"}, receive, head_only)
            case "http":
                await self._serve(scope, receive, send)
            case "lifespan":
                await self._app(scope, receive, send)
            case _:
                await send({"type": "websocket.close", "code": 1000})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = _Out(send, self._limits.write_stall_s)
        received = Received(receive)
        try:
            try:
                await self._admit(scope, received, out)
            except Refused as refused:
                await refuse(problem_reply(refused.problem, refused.facts), scope, received, out)
        except BaseException as error:
            # The server behind would log its text; on trio it would end with what is no Exception,
            # such as a panic in an extension module.
            if is_interruption(error):
                raise
            self._log(scope, error)
            if not out.has_begun:
                await problem_reply(OWN["internal"])(scope, receive, out)

    async def _admit(self, scope: Scope, received: Received, out: Send) -> None:
        """Give the application a request that is allowed; raise `Refused` for another one."""
        raw_path = scope.get("raw_path") if "\ufffd" in scope["path"] else None
        if not (_is_utf8(raw_path or b"") and _is_utf8(scope["query_string"])):
            # An id, a filter or a cursor in it would be read as another one.
            raise Refused(OWN["malformed"], "the address must be UTF-8")
        scope = _in_origin_form(scope)
        if self._refuses is not None and self._refuses(scope):
            raise Refused(OWN["read-only"])
        is_read = scope["method"] in _READS
        bytes_max = 0 if is_read else self._limits.body_bytes_max
        is_untyped = self._check_headers(scope, bytes_max)
        refusal = None if is_read else await self._identify(scope)
        if refusal is not None:
            await refuse(refusal, scope, received, out)
            return
        body = await self._read_body(received, bytes_max)
        if body and is_untyped:
            raise Refused(OWN["not-json"])
        await self._app(scope, _Replayed(body, received), out)

    def _check_headers(self, scope: Scope, bytes_max: int) -> bool:
        """Raise `Refused` if the headers are not allowed; return True if they name no body type."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > self._limits.header_bytes_max:
            raise Refused(OWN["headers-too-large"])
        counts = Counter(name for name, _ in headers)
        if any(count > 1 and name in _ONCE for name, count in counts.items()):
            raise Refused(OWN["malformed"])
        known = {name: value.decode("latin-1") for name, value in headers}
        host = known.get(b"host", "").lower()
        if _PORT.sub("", host) not in self._hosts:
            raise Refused(OWN["unknown-host"])
        if b"content-length" in known and b"transfer-encoding" in known:
            # A proxy may have read another length, and then the rest is another client's request.
            raise Refused(OWN["malformed"])
        length = known.get(b"content-length", "0")
        if not (length.isascii() and length.isdigit()):
            raise Refused(OWN["malformed"])
        if len(length) > len(str(1 << 63)) or int(length) > bytes_max:
            raise Refused(OWN["too-large"])
        if scope["method"] in _READS:
            return False
        if known.get(b"content-encoding", "").strip().lower() not in ("", "identity"):
            raise Refused(OWN["encoded"])
        origin = known.get(b"origin")
        if origin is not None and not self._is_ours(origin, host):
            raise Refused(OWN["foreign-origin"])
        content_type = known.get(b"content-type")
        if content_type is None and known.get(b"sec-fetch-site", "") in _FROM_HERE:
            return True
        if content_type is None or content_type.partition(";")[0].strip().lower() not in _JSON:
            raise Refused(OWN["not-json"])
        return False

    def _is_ours(self, origin: str, host: str) -> bool:
        """Return True if this host served the page, or if its origin is in the list."""
        return origin in self._origins or origin.partition("://")[2].lower() == host

    async def _read_body(self, receive: Receive, bytes_max: int) -> bytes:
        """Read the whole body, within its bounds."""
        pieces: list[bytes] = []
        length = 0
        with anyio.move_on_after(self._limits.body_s):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise _Left
                piece: bytes = message.get("body", b"")
                length += len(piece)
                if length > bytes_max:
                    raise Refused(OWN["too-large"])
                pieces.append(piece)
                if not message.get("more_body", False):
                    body = b"".join(pieces)
                    if b"\0" in body:  # never in UTF-8 JSON, which the bracket count relies on
                        raise Refused(OWN["malformed"], "must be JSON in UTF-8", pointer="#")
                    depth_max = self._limits.depth_max
                    if is_deeper(body, depth_max):
                        raise Refused(
                            OWN["too-deep"],
                            f"must be nested {depth_max} levels at most",
                            pointer="#",
                        )
                    return body
        raise Refused(OWN["too-slow"])

    @staticmethod
    def _log(scope: Scope, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, _Stalled):
            _logger.info("client cut off: it does not read its response", method=scope["method"])
            return
        if isinstance(error, _Left) or not _logger.is_enabled_for(logging.WARNING):
            return
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
        _logger.warning(
            "request failed", method=scope["method"], error=type(error).__name__, place=place
        )


class _Left(Exception):
    """The client left before its request was whole."""


class _Stalled(Exception):
    """The client reads nothing of its response."""


class Received:
    """Receives a request, and knows how much of its body has come, and when no more comes."""

    def __init__(self, receive: Receive) -> None:
        self.is_whole = False
        """The body has come whole, or the client has left."""
        self.length = 0
        self._receive = receive

    async def __call__(self) -> Message:
        message = await self._receive()
        self.length += len(message.get("body", b""))
        self.is_whole = not message.get("more_body", False)
        return message


async def refuse(refusal: Response, scope: Scope, received: Received, out: Send) -> None:
    """Send a refusal, then read and drop the rest of the request's body, and close the connection.

    If a connection is closed while its client still sends, it is reset, and many clients lose the
    answer to the reset: they would send the same body again and again. The rest may take `REST_S`
    seconds and have `REST_BYTES_MAX` bytes.
    """
    refusal.headers["Connection"] = "close"

    async def send(message: Message) -> None:
        if message["type"] != "http.response.body":
            await out(message)
            return
        await out({**message, "more_body": True})
        with anyio.move_on_after(REST_S):
            while not received.is_whole and received.length < REST_BYTES_MAX:
                await received()
        await out({"type": "http.response.body", "body": b"", "more_body": False})

    await refusal(scope, received, send)


class _Replayed:
    """Gives the application the body that was read, then the messages after it."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Out:
    """Sends a response, with the headers that all responses have, and bounds each write in time.

    A write ends once the client has read most of what was written before. So a large body goes out
    in parts: a client that takes longer than the bound to read it may read on, and one that reads
    nothing holds a copy of one part, not of the whole body.
    """

    def __init__(self, send: Send, stall_s: float) -> None:
        self.has_begun = False
        self._send = send
        self._stall_s = stall_s

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name.lower() for name, _ in message["headers"]}
            added = [header for header in _SAFE if header[0] not in own]
            message["headers"] = [*message["headers"], *added]
        self.has_begun = True
        body = message.get("body", b"")
        if len(body) > PART_BYTES:
            last = (len(body) - 1) // PART_BYTES * PART_BYTES
            for begin in range(0, last, PART_BYTES):
                part = body[begin : begin + PART_BYTES]
                await self._write({**message, "body": part, "more_body": True})
            message = {**message, "body": body[last:]}
        await self._write(message)

    async def _write(self, message: Message) -> None:
        with anyio.move_on_after(self._stall_s) as scope:
            await self._send(message)
        if scope.cancelled_caught:
            raise _Stalled


class _HeadOnly:
    """Sends the head of a response as all of it, and then ends what would send the rest."""

    def __init__(self, send: Send, end: Callable[[], None]) -> None:
        self._send = send
        self._end = end

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._send(message)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            self._end()


def check_hosts(hosts: Collection[str]) -> None:
    """Raise `InvalidInput` for a host that no request can name."""
    for host in hosts:
        if not (host.isascii() and _HOST.fullmatch(_as_asked_for(host))):
            raise InvalidInput(
                f"host is {host!r}; it takes a name or an address, such as 'chat.example.org', "
                "without a scheme or a port; a name with other letters than those of ASCII is "
                "written as clients send it: 'xn--...'"
            )


def check_origins(origins: Collection[str]) -> None:
    """Raise `InvalidInput` for an origin that no browser sends, and for "null", which all share."""
    for origin in origins:
        if not (origin.isascii() and _ORIGIN.fullmatch(origin)):
            raise InvalidInput(
                f"origin is {origin!r}; it takes a scheme, a host and a port if it is not the "
                "usual one, in lower case, such as 'https://chat.example.org', without a path"
            )


def _as_asked_for(host: str) -> str:
    """Return a host's name or address as clients write it in the header `Host`."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return host.lower()
    return f"[{address}]" if address.version == 6 else str(address)  # noqa: PLR2004 - its name


def _is_utf8(quoted: bytes) -> bool:
    try:
        unquote_to_bytes(quoted).decode()
    except UnicodeDecodeError:
        return False
    return True


def _in_origin_form(scope: Scope) -> Scope:
    """Return a request whose target was a whole address as if its path alone had been sent.

    As RFC 9112 (3.2.2) has it, the host in the address takes the place of the header's.
    """
    target = _ABSOLUTE.fullmatch(scope["path"])
    if target is None:
        return scope
    host, path = target.groups()
    headers = [header for header in scope["headers"] if header[0] != b"host"]
    if len(headers) < len(scope["headers"]) - 1:
        return scope  # more than one host, which is refused
    headers.append((b"host", host.encode()))
    origin_form = {**scope, "path": path or "/", "headers": headers}
    origin_form.pop("raw_path", None)  # optional, and not used here
    return origin_form


def is_deeper(body: bytes, depth_max: int) -> bool:
    """Return True if the JSON of a body is nested more deeply than this, without parsing it."""
    depth = 0
    for bracket in _STRING.sub(b"", body).translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > depth_max:
            return True
    return False
