"""/ui: serve the files of the dashboard.

It holds no data: that comes from /api, behind its keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gateway.core import errors
from gateway.core.http.headers import header
from gateway.server.handling import StaticFile, fault_response, unless_known

FOLDER: Final = Path(__file__).parent / "static"
#: what a browser may do with the page: its own files and its own server, nothing else
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
#: stands in index.html where the version does
_VERSION: Final = b"{version}"
_INDEX: Final = "index.html"
_ASK_AGAIN: Final = "no-cache"
#: under an address with the hash of all files nothing ever changes
_FOR_EVER: Final = "public, max-age=31536000, immutable"


class Dashboard:
    """The files, read once. `is_on`: without it nothing is found under /ui."""

    def __init__(self, *, is_on: bool, folder: Path = FOLDER) -> None:
        self.is_on = is_on
        self._files = _read(folder) if is_on else {}
        digest = hashlib.sha256()
        for name, file in sorted(self._files.items()):
            digest.update(f"{name} {file.tag}\n".encode())
        self.version = digest.hexdigest()[:16]
        page = self._files.pop(_INDEX, None)
        self._page = StaticFile.of(page.body.replace(_VERSION, self.version.encode()), page.kind) if page else None

    def paths(self) -> list[Route]:
        """The routes."""
        return [
            Route("/", _from_root, methods=["GET"]),
            Route("/ui", self.page, methods=["GET"]),
            Route("/ui/", _without_slash, methods=["GET"]),
            Route("/ui/{version}/{name:path}", self.file, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        """GET /ui."""
        return _answer(request, self._page, _ASK_AGAIN)

    async def file(self, request: Request) -> Response:
        """GET /ui/{version}/{name}; of any version, as another worker may have served the page."""
        keep = _FOR_EVER if request.path_params["version"] == self.version else _ASK_AGAIN
        return _answer(request, self._files.get(request.path_params["name"]), keep)


def _read(folder: Path) -> dict[str, StaticFile]:
    paths = (path for path in folder.rglob("*") if path.suffix in _TYPES)
    return {
        path.relative_to(folder).as_posix(): StaticFile.of(path.read_bytes(), _TYPES[path.suffix]) for path in paths
    }


def _answer(request: Request, file: StaticFile | None, keep: str) -> Response:
    if file is None:
        return fault_response(
            errors.NotFound("There is nothing under this path. The dashboard, where it is on, is /ui.")
        )
    return unless_known(request, file, {**_HEADERS, "cache-control": keep})


def is_browser(scope: Mapping[str, Any]) -> bool:
    """Return True for a GET that takes a page: a person opened the address. API clients ask for JSON, or `*/*`."""
    accepted = header(scope["headers"], b"accept")
    return scope["method"] == "GET" and b"text/html" in accepted.lower()


async def _from_root(_: Request) -> Response:
    """Send a browser to the dashboard; relative, as `_without_slash`."""
    return RedirectResponse("ui", 307, headers={**_HEADERS, "vary": "accept"})


async def _without_slash(_: Request) -> Response:
    """Relative, so that it also leads there behind a proxy that puts a folder in front."""
    return RedirectResponse("../ui", 308, headers=_HEADERS)
