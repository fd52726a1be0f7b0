"""The keys of the nodes, and the signatures on the requests that nodes send each other.

A signature covers the method, the target, the digest of the body, the number of hops, the time and
a nonce. The target names one run of the receiving process, so a request that was signed for it is
invalid at another process, or at the same address after a restart. The signature is checked before
the body is read.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidInput
from .access import read_lines

__all__ = ["BadSignature", "NodeKeys", "PerhapsSeen", "Seen", "Signed"]

KEY_LENGTH_MIN = 32
SKEW_S = 30.0
"""How far the clocks of two nodes may be apart."""
_REMEMBERED_S = 2.5 * SKEW_S
"""A signature is valid for twice the skew at most; the rest allows for a wall clock that runs
slow."""
NONCES_MAX = 500_000
_VERSION = "turnkeeper-node-1"
_SAID = re.compile(
    r"hops=(?P<hops>[0-9]{1,3}) at=(?P<at>[0-9]{1,12}) nonce=(?P<nonce>[0-9a-f-]{16,64}) "
    r"body=(?P<body>[0-9a-f]{64}) hmac=(?P<hmac>[0-9a-f]{64})",
    re.ASCII,
)


class BadSignature(Exception):
    """The request is not from a node, or not recent; nothing of it was carried out."""


class PerhapsSeen(Exception):
    """The request is from a node, but may have come before: it may have been carried out then."""


class NodeKeys:
    """The keys that the nodes of one journal share: the first one signs, all of them verify.

    To change the key: add the new key after the old one at every node, then put it first at every
    node, then remove the old one.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        """Raises `InvalidInput` if there is no key, or if one is too short."""
        if not keys or any(len(key) < KEY_LENGTH_MIN for key in keys):
            raise InvalidInput(
                f"a node key has {KEY_LENGTH_MIN} random characters or more, and there is at least "
                "one; `openssl rand -hex 32` makes one"
            )
        self._keys = [key.encode() for key in keys]

    def __repr__(self) -> str:
        return f"<NodeKeys of {len(self._keys)}>"

    @classmethod
    def from_file(cls, path: str | Path) -> NodeKeys:
        """Read a file with a key on each line. Raises `InvalidInput`."""
        lines = read_lines(path, "the key file")
        return cls([line.strip() for line in lines if line.strip() and not line.startswith("#")])

    def sign(self, text: str) -> str:
        """Return the signature by the first key."""
        return _hmac(self._keys[0], text)

    def verifies(self, text: str, signature: str) -> bool:
        """True if one of the keys has signed this text. The time does not tell which one."""
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(_hmac(key, text), signature)
        return found


def _hmac(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Signed:
    """The facts that a signature covers."""

    target: str
    body_digest: str
    hops: int
    at: int
    nonce: str

    @property
    def text(self) -> str:
        facts = (_VERSION, "POST", self.target, self.body_digest, self.hops, self.at, self.nonce)
        return "\n".join(map(str, facts))

    def header(self, keys: NodeKeys) -> str:
        """Return the header that goes with the request."""
        return (
            f"hops={self.hops} at={self.at} nonce={self.nonce} body={self.body_digest} "
            f"hmac={keys.sign(self.text)}"
        )


def digest_of(body: bytes) -> str:
    """Return the digest of a body, as it stands in a signature."""
    return hashlib.sha256(body).hexdigest()


class Seen:
    """Checks signatures, and remembers their nonces for as long as the signatures are valid.

    The wall clock decides if a signature is recent. The monotonic clock decides how long a nonce is
    remembered: by a wall clock that is set forward and back again, it would be forgotten too early.
    """

    def __init__(
        self, keys: NodeKeys, now: Callable[[], float], monotonic: Callable[[], float]
    ) -> None:
        self._keys = keys
        self._now = now
        self._monotonic = monotonic
        self._nonces: OrderedDict[str, float] = OrderedDict()
        """Until when each nonce is remembered, in the order in which they are forgotten.

        Not a dict: to find its first key, Python passes over all that were deleted before that.
        """

    def check(self, target: str, header: str) -> Signed:
        """Return the signed facts, which must be for this target.

        Raises `BadSignature`, without a reason, or `PerhapsSeen`. For the latter, do not tell the
        sender that nothing happened: a proxy between two nodes may have repeated the request.
        """
        found = _SAID.fullmatch(header)
        if found is None:
            raise BadSignature
        signed = Signed(target, found["body"], int(found["hops"]), int(found["at"]), found["nonce"])
        if not self._keys.verifies(signed.text, found["hmac"]):
            raise BadSignature
        now = self._monotonic()
        self._forget(now)
        if signed.nonce in self._nonces or len(self._nonces) >= NONCES_MAX:
            raise PerhapsSeen
        # The nonce of a refused request is remembered too: its sender is told that nothing
        # happened, and if the wall clock were set, the same signature might be valid later.
        self._nonces[signed.nonce] = now + _REMEMBERED_S
        # One hop: a node never forwards a request that came from a node.
        if abs(self._now() - signed.at) > SKEW_S or signed.hops != 1:
            raise BadSignature
        return signed

    def _forget(self, now: float) -> None:
        while self._nonces:
            oldest = next(iter(self._nonces))
            if self._nonces[oldest] >= now:
                return
            del self._nonces[oldest]
