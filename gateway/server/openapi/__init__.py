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
from gateway.server.handling import StaticFile, file_or_not_modified
from gateway.server.openapi.paths import HEADERS, OWN, PARAMETERS, PROXIED, RESPONSES
from gateway.server.openapi.shapes import SCHEMAS, error_classes

__all__ = ["OpenApi", "document", "error_classes"]

_DESCRIPTION: Final = (
    "A reverse proxy that counts, trims and limits the sessions of long-running agents. Everything under `/v1` and "
    "`/s/{session}/v1` is forwarded to a model provider; this document lists the paths that the gateway understands. "
    "All other paths are the gateway's own. Except for `/api/results`, they contain no text of prompts or responses."
)
_SECURITY: Final = {
    "clientKey": {
        "type": "http",
        "scheme": "bearer",
        "description": "A client key: gives access to its own sessions. Required if client keys are configured.",
    },
    "clientKeyHeader": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "A client key in another header.",
    },
    "adminKey": {
        "type": "http",
        "scheme": "bearer",
        "description": "`auth.admin_key`: gives full access. If it is not set, requests from the gateway's own "
        "machine have full access.",
    },
}
#: one hour; afterwards clients check the tag, which a new version of the gateway changes
_CACHED: Final = {"cache-control": "public, max-age=3600"}


def document() -> dict[str, Any]:
    """Return the whole OpenAPI document."""
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
    """The handler of /openapi.json. The document is encoded once."""

    def __init__(self) -> None:
        self._document = StaticFile.from_bytes(msgspec.json.encode(document()), "application/json")

    def paths(self) -> list[Path]:
        """Return the routes."""
        return [Path("/openapi.json", self.describe, methods=["GET"])]

    async def describe(self, request: Request) -> Response:
        """GET /openapi.json."""
        return file_or_not_modified(request, self._document, _CACHED)
