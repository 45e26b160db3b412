"""/openapi.json: describe the gateway's HTTP API as an OpenAPI 3.1 document.

No key needed.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path

from gateway import __version__
from gateway.server.handling import StaticFile, unless_known
from gateway.server.openapi.paths import HEADERS, OWN, PARAMETERS, PROXIED, RESPONSES
from gateway.server.openapi.shapes import SCHEMAS, faults

__all__ = ["OpenApi", "document", "faults"]

_DESCRIPTION: Final = (
    "A reverse proxy that meters, fits and bounds the sessions of long-running agents. Everything under `/v1` is "
    "forwarded to a model provider, and so is the same under `/s/{session}/v1`; of these paths the document has those "
    "that the gateway understands. The others are its own. They hold no prompt or answer text but for `/api/results`."
)
_SECURITY: Final = {
    "clientKey": {
        "type": "http",
        "scheme": "bearer",
        "description": "A client key: sees its own sessions. Needed where client keys are configured.",
    },
    "clientKeyHeader": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The same in another header.",
    },
    "adminKey": {
        "type": "http",
        "scheme": "bearer",
        "description": "`auth.admin_key`: sees and changes all. Where none is set, requests from the gateway's own "
        "machine have its rights.",
    },
}
#: an hour: a new version of the gateway has another tag
_CACHED: Final = {"cache-control": "public, max-age=3600"}


def document() -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "LLM session gateway",
            "version": __version__,
            "description": _DESCRIPTION,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": {**PROXIED, **OWN},
        "components": {
            "schemas": SCHEMAS,
            "parameters": PARAMETERS,
            "headers": HEADERS,
            "responses": RESPONSES,
            "securitySchemes": _SECURITY,
        },
    }


class OpenApi:
    """The handler; the document is written once."""

    def __init__(self) -> None:
        self._document = StaticFile.of(msgspec.json.encode(document()), "application/json")

    def paths(self) -> list[Path]:
        """The routes."""
        return [Path("/openapi.json", self.describe, methods=["GET"])]

    async def describe(self, request: Request) -> Response:
        """GET /openapi.json."""
        return unless_known(request, self._document, _CACHED)
