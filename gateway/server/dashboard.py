"""/ui: serve the files of the dashboard.

The files contain no data. The page reads its data from /api, which requires a key.
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
from gateway.server.handling import StaticFile, fault_response, file_or_not_modified

FOLDER: Final = Path(__file__).parent / "static"
#: content security policy: the page may use only its own files and its own server
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
#: placeholder for the version in index.html
_VERSION_MARK: Final = b"{version}"
_INDEX: Final = "index.html"
_REVALIDATE: Final = "no-cache"
#: the path contains the hash of all files, so files under it never change
_FOR_EVER: Final = "public, max-age=31536000, immutable"


class Dashboard:
    """The files of the dashboard, read once. `is_on`: if False, /ui does not exist."""

    def __init__(self, *, is_on: bool, folder: Path = FOLDER) -> None:
        self.is_on = is_on
        self._files = _read(folder) if is_on else {}
        digest = hashlib.sha256()
        for name, file in sorted(self._files.items()):
            digest.update(f"{name} {file.tag}\n".encode())
        self.version = digest.hexdigest()[:16]
        page = self._files.pop(_INDEX, None)
        self._page = (
            StaticFile.from_bytes(page.body.replace(_VERSION_MARK, self.version.encode()), page.kind) if page else None
        )

    def paths(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/", _redirect_root, methods=["GET"]),
            Route("/ui", self.page, methods=["GET"]),
            Route("/ui/", _redirect_slash, methods=["GET"]),
            Route("/ui/{version}/{name:path}", self.file, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        """GET /ui: return the page."""
        return _file_response(request, self._page, _REVALIDATE)

    async def file(self, request: Request) -> Response:
        """GET /ui/{version}/{name}: return a file. Any version is accepted: another worker may have served the page."""
        keep = _FOR_EVER if request.path_params["version"] == self.version else _REVALIDATE
        return _file_response(request, self._files.get(request.path_params["name"]), keep)


def _read(folder: Path) -> dict[str, StaticFile]:
    paths = (path for path in folder.rglob("*") if path.suffix in _TYPES)
    return {
        path.relative_to(folder).as_posix(): StaticFile.from_bytes(path.read_bytes(), _TYPES[path.suffix])
        for path in paths
    }


def _file_response(request: Request, file: StaticFile | None, keep: str) -> Response:
    if file is None:
        return fault_response(errors.NotFound("This path does not exist. The dashboard, if it is on, is at /ui."))
    return file_or_not_modified(request, file, {**_HEADERS, "cache-control": keep})


def is_browser(scope: Mapping[str, Any]) -> bool:
    """Return True for a GET that accepts HTML, which a browser sends. API clients accept JSON or `*/*`."""
    accepted = header(scope["headers"], b"accept")
    return scope["method"] == "GET" and b"text/html" in accepted.lower()


async def _redirect_root(_: Request) -> Response:
    """Redirect a browser to the dashboard. The URL is relative, see `_redirect_slash`."""
    return RedirectResponse("ui", 307, headers={**_HEADERS, "vary": "accept"})


async def _redirect_slash(_: Request) -> Response:
    """Redirect to /ui. The URL is relative, so that it works with a proxy that adds a path prefix."""
    return RedirectResponse("../ui", 308, headers=_HEADERS)
