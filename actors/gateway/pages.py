"""The inspector's pages: static, public, and served under a strict policy.

They are files of this package, sent unchanged. The policy forbids them to load anything from
elsewhere and to run inline code, and forbids other sites to frame them. They read all data through
the API, with the token that the person typed in.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import RedirectResponse, Response

from .problems import OWN, ProblemRaised

__all__ = ["pages"]

pages = APIRouter(prefix="/inspector", include_in_schema=False)

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def _pages() -> dict[str, tuple[bytes, str]]:
    """Return each file with its media type, by name."""
    folder = files(__package__) / "inspector"
    return {
        path.name: (path.read_bytes(), _TYPES[suffix])
        for path in folder.iterdir()
        if (suffix := path.name[path.name.rfind(".") :]) in _TYPES
    }


@pages.get("")
async def to_pages() -> Response:
    """Redirect to the address at which the page's relative links work."""
    return RedirectResponse("inspector/", headers=_HEADERS)


@pages.get("/")
async def read_index() -> Response:
    """Return the page that loads the others."""
    return await read_page("index.html")


@pages.get("/{name}")
async def read_page(name: str) -> Response:
    """Return one of the files."""
    found = _pages().get(name)
    if found is None:
        raise ProblemRaised(OWN["not-found"])
    content, media_type = found
    return Response(content, media_type=media_type, headers=_HEADERS)
