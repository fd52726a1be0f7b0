"""Access: principals, their scopes, and bearer tokens from a file of hashes.

An application connects its own users with two functions, `authenticate` and `authorize`. Bearer
tokens are built in. A file has one line for each: the SHA-256 of the token, the principal, its
scopes:

    # sha256 of the token                       principal  scopes
    9f86d081884c7d659a2feaa0c55ad015a3bf4f1b…   alice      read,write

Tokens are random and long, so a plain hash gives nothing away. They are read from the
`Authorization` header alone, never from an address, and no log line has them.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from starlette.requests import HTTPConnection

from turnkeeper.runtime.lowlevel import closing_scopes

from ..errors import InvalidInput
from .names import stored_id

__all__ = [
    "Action",
    "Authenticate",
    "Authorize",
    "BearerTokens",
    "Place",
    "Principal",
    "Rates",
    "Share",
    "allows",
    "check_access",
    "check_authorize",
    "check_principal",
    "find_place",
    "is_allowed",
    "read_lines",
    "user_of",
]

Action: TypeAlias = Literal["read", "write", "admin", "inspector"]
"""Says if a route reads, changes something, acts for all principals, or shows the runtime."""

ACTIONS: tuple[Action, ...] = get_args(Action)
TOKEN_LENGTH_MIN = 32
TOKEN_LENGTH_MAX = 512
PRINCIPAL_LENGTH_MAX = 64
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Principal:
    """The user who makes a request. Principals with the scope `admin` see all conversations."""

    name: str
    scopes: frozenset[Action] = frozenset(("read", "write"))

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= PRINCIPAL_LENGTH_MAX or not self.name.isprintable():
            raise InvalidInput(
                f"a principal's name must have 1 to {PRINCIPAL_LENGTH_MAX} visible characters"
            )
        scopes: object = self.scopes
        if isinstance(scopes, str):  # each part of it would be a scope that it has
            raise InvalidInput('scopes must be a set, such as frozenset(("read",)), not a text')

    @property
    def is_admin(self) -> bool:
        return "admin" in self.scopes


Authenticate: TypeAlias = Callable[[HTTPConnection], Awaitable[Principal | None]]
"""Returns the principal of a request, or None if the request has no valid credentials."""

Authorize: TypeAlias = Callable[[Principal, Action, str | None], bool]
"""Returns True if the principal may do this. The conversation is given by its id on the wire."""


@dataclass(frozen=True, slots=True)
class Place:
    """The conversation that an id on the wire means."""

    conversation_id: str
    """Its id in the journal."""
    user: str | None
    """The user who must own the conversation, or will own it once it begins; None: any user."""


Share: TypeAlias = Callable[[Principal, str], Awaitable[Place | None]]
"""Returns the place of a conversation that is shared with a principal, given its id on the wire, or
None if the id means one of the principal's own."""


def user_of(principal: Principal | None) -> str | None:
    """Return the user whose own ids a principal sends, or None if it sends stored ids."""
    return None if principal is None or principal.is_admin else principal.name


async def find_place(principal: Principal | None, local_id: str, share: Share | None) -> Place:
    """Return the place of the conversation that a principal means by an id on the wire."""
    user = user_of(principal)
    place = None
    if share is not None and principal is not None and user is not None:
        with closing_scopes("share"):
            place = await share(principal, local_id)
    return place or Place(stored_id(user, local_id), user)


def allows(principal: Principal, action: Action, _conversation: str | None) -> bool:
    """Return True if the principal has the scope of that name, or is an administrator."""
    return principal.is_admin or action in principal.scopes


def check_access(
    authenticate: Authenticate | None, authorize: Authorize, share: Share | None
) -> None:
    """Raise `InvalidInput` for functions that let everybody in, or fail every request."""
    check_authorize(authorize)
    for name, function in (("authenticate", authenticate), ("share", share)):
        if function is not None and not _may_be_awaited(function):
            raise InvalidInput(f"{name} is {function!r}; it takes an async function")
    if authenticate is None:
        for name, is_given in (("authorize", authorize is not allows), ("share", bool(share))):
            if is_given:
                raise InvalidInput(
                    f"{name} is given without authenticate: it would never be called, and every "
                    "request let in; give authenticate, too"
                )


def _may_be_awaited(function: object) -> bool:
    """Return False if this is no function, or a plain one: what it returns cannot be awaited."""
    if inspect.isroutine(function):
        return inspect.iscoroutinefunction(inspect.unwrap(function))
    return callable(function)


def check_authorize(authorize: Authorize) -> None:
    """Raise `InvalidInput` for an async function: what its call returns is true of all requests."""
    if inspect.iscoroutinefunction(authorize):
        raise InvalidInput(
            "authorize is an async function, and it is called without await; it takes a function "
            "that returns True or False; `authenticate` may await, and keep what it finds"
        )


def check_principal(said: object) -> None:
    """Raise `TypeError` unless `authenticate` returned a principal: another may have its names."""
    if not isinstance(said, Principal):
        raise TypeError(f"authenticate returned {type(said).__name__}; it returns a Principal")


def is_allowed(
    authorize: Authorize, principal: Principal, action: Action, local_id: str | None
) -> bool:
    """Return what `authorize` says. Raises `TypeError` if it says neither yes nor no."""
    said: object = authorize(principal, action, local_id)
    if said is not None and not isinstance(said, bool):
        raise TypeError(f"authorize returned {type(said).__name__}; it returns True or False")
    return said is True


class BearerTokens:
    """Authenticates by tokens whose hashes are in a file, which is read once."""

    def __init__(self, known: dict[bytes, Principal]) -> None:
        self._known = known

    def __repr__(self) -> str:
        return f"<BearerTokens of {len(self._known)}>"

    @classmethod
    def from_file(cls, path: str | Path) -> BearerTokens:
        """Read the file. Raises `InvalidInput` if a line cannot be used or the file has none."""
        known: dict[bytes, Principal] = {}
        for number, line in enumerate(read_lines(path, "the token file"), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            match words:
                case [digest, name, scopes] if _HASH.fullmatch(digest):
                    known[bytes.fromhex(digest)] = _principal(name, scopes, number)
                case _:
                    raise InvalidInput(
                        f"line {number} of the token file is not `sha256 principal scopes`"
                    )
        if not known:
            raise InvalidInput("the token file has no token, so no request would be let in")
        return cls(known)

    async def __call__(self, request: HTTPConnection) -> Principal | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not TOKEN_LENGTH_MIN <= len(token) <= TOKEN_LENGTH_MAX:
            return None
        shown = token_hash(token)
        found = None
        # All hashes are compared, each in constant time, so the time does not tell which one fits.
        for digest, principal in self._known.items():
            if hmac.compare_digest(digest, shown):
                found = principal
        return found


def token_hash(token: str) -> bytes:
    """Return the hash of a token in hexadecimal digits, as in the file."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def read_lines(path: str | Path, what: str) -> list[str]:
    """Return the lines of a text file. Raises `InvalidInput` if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InvalidInput(f"{what} is not UTF-8 text") from None
    except OSError as error:
        raise InvalidInput(f"{what} cannot be read: {error.strerror}") from None


def _principal(name: str, scopes: str, number: int) -> Principal:
    found = _scopes(scopes, number)
    try:
        return Principal(name, found)
    except InvalidInput as error:
        raise InvalidInput(f"line {number} of the token file: {error}") from None


def _scopes(text: str, number: int) -> frozenset[Action]:
    named = set(text.split(","))
    scopes = frozenset(action for action in ACTIONS if action in named)
    if len(scopes) != len(named):
        known = ", ".join(ACTIONS)
        raise InvalidInput(f"line {number} of the token file has a scope that is none of {known}")
    return scopes


class Rates:
    """Limits the requests of each principal: a bucket that fills at an even rate."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        *,
        per_s: float,
        burst: int,
        principals_max: int = 10_000,
    ) -> None:
        self._monotonic = monotonic
        self._per_s = per_s
        self._burst = burst
        self._principals_max = principals_max
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """How many requests each principal had left, and when; the longest unused comes first."""

    def take(self, principal: str) -> int:
        """Count one request. Returns 0, or after how many seconds to retry if none is left."""
        now = self._monotonic()
        left, since = self._buckets.pop(principal, (float(self._burst), now))
        left = min(self._burst, left + (now - since) * self._per_s)
        is_taken = left >= 1
        self._buckets[principal] = (left - 1 if is_taken else left, now)
        while len(self._buckets) > self._principals_max:
            self._buckets.popitem(last=False)
        return 0 if is_taken else int((1 - left) / self._per_s) + 1
