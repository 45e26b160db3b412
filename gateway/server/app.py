"""Build the ASGI application: forwarded paths, /api, the dashboard and health checks."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from gateway.core import errors
from gateway.core.values import dataclass
from gateway.server import headers
from gateway.server.audit import AuditApi
from gateway.server.auth import check_single, foreign_page
from gateway.server.context import ContextApi
from gateway.server.dashboard import Dashboard, is_browser
from gateway.server.endpoints import Forwarder, Receive, Scope, Send
from gateway.server.events import EventsApi
from gateway.server.handling import fault_response
from gateway.server.health import HealthApi
from gateway.server.keys import KeysApi
from gateway.server.metrics import MetricsApi
from gateway.server.openapi import OpenApi
from gateway.server.protocol import STOPPING
from gateway.server.sessions import SessionsApi
from gateway.server.sockets import Sockets
from gateway.server.usage import UsageApi

logger = logging.getLogger("gateway")

_OWN_PATHS: Final = ("/api/", "/healthz", "/readyz", "/ui", "/metrics", "/openapi.json")
_RATE_LIMIT_FIELDS: Final = ("limit", "remaining", "reset")
#: response headers in the documentation of OpenAI and Anthropic; clients read their rate limits
_PROVIDER_HEADERS: Final = (
    "retry-after",
    "retry-after-ms",
    "request-id",
    "x-request-id",
    "openai-organization",
    "openai-processing-ms",
    "openai-project",
    "openai-version",
    "anthropic-organization-id",
    *(
        f"x-ratelimit-{bound}-{what}"
        for bound in _RATE_LIMIT_FIELDS
        for what in ("requests", "tokens", "project-tokens")
    ),
    *(
        f"anthropic-{what}-{bound}"
        for what in (
            *("ratelimit-requests", "ratelimit-tokens", "ratelimit-input-tokens", "ratelimit-output-tokens"),
            *("priority-input-tokens", "priority-output-tokens", "fast-input-tokens", "fast-output-tokens"),
        )
        for bound in _RATE_LIMIT_FIELDS
    ),
)


@dataclass(frozen=True, slots=True)
class OwnApi:
    """The gateway's own API: handlers of the paths that are not forwarded."""

    sessions: SessionsApi
    keys: KeysApi
    usage: UsageApi
    audit: AuditApi
    context: ContextApi
    health: HealthApi
    events: EventsApi
    metrics: MetricsApi
    dashboard: Dashboard

    def paths(self) -> list[BaseRoute]:
        """Return the routes of all handlers."""
        return [
            *self.sessions.paths(),
            *self.keys.paths(),
            *self.usage.paths(),
            *self.audit.paths(),
            *self.context.paths(),
            *self.health.paths(),
            *self.events.paths(),
            *self.metrics.paths(),
            *self.dashboard.paths(),
        ]


class Runtime(Protocol):
    """The parts that the lifespan opens. A reload replaces `forwarder`."""

    @property
    def forwarder(self) -> Forwarder:
        """Return the forwarder in force."""
        ...

    @property
    def api(self) -> OwnApi:
        """Return the handlers of the gateway's own paths."""
        ...

    @property
    def cors_origins(self) -> Sequence[str]:
        """Return the origins of web pages that may call."""
        ...


class GatewayApp:
    """The ASGI application. `resources` opens everything that a worker process needs, and closes it again."""

    def __init__(
        self, resources: Callable[[], AbstractAsyncContextManager[Runtime]], new_id: Callable[[], str]
    ) -> None:
        self._resources = resources
        self._new_id = new_id
        self._runtime: Runtime | None = None
        self._router: Starlette | None = None
        self._serve: ASGIApp = self._dispatch
        self._sockets: ASGIApp = _refuse_socket
        self._is_stopping = False

    @property
    def running(self) -> int:
        """Return the number of running calls."""
        return self._runtime.forwarder.running if self._runtime is not None else 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._sockets(scope, receive, send)
        else:
            await self._lifespan(scope.get("state", {}), receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._runtime is None or self._router is None:
            await fault_response(errors.ShuttingDown("The gateway is stopping. Try again shortly."))(
                scope, receive, send
            )
        elif scope["path"].startswith(_OWN_PATHS) or (
            scope["path"] == "/" and self._runtime.api.dashboard.is_on and is_browser(scope)
        ):
            named = self._with_request_id(scope, send)
            try:
                check_single(scope["headers"])
            except errors.InvalidRequest as fault:
                await fault_response(fault)(scope, receive, named)
            else:
                await self._router(scope, receive, named)
        else:
            await self._runtime.forwarder(scope, receive, send)

    async def _lifespan(self, state: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await receive()
        try:
            async with self._resources() as runtime:
                self._router = Starlette(routes=self._routes(runtime), exception_handlers=_HANDLERS)
                self._runtime = runtime
                self._sockets = Sockets(lambda: runtime.forwarder, self._new_id)
                state[STOPPING] = lambda: self._stop(runtime)
                if runtime.cors_origins:
                    self._serve = _Cors(self._dispatch, runtime.cors_origins, self._new_id)
                await send({"type": "lifespan.startup.complete"})
                await receive()
                self._runtime = None
        except errors.ConfigError as error:
            await _report_failure(send, str(error))
        except errors.StoreUnavailable as fault:
            await _report_failure(send, f"store.url: {fault.message}")
        except Exception:
            # The server would end without a message.
            logger.exception("the gateway stops because of a bug")
            raise
        else:
            await send({"type": "lifespan.shutdown.complete"})

    def _stop(self, runtime: Runtime) -> None:
        """Refuse new calls and end the event streams, because the server is stopping."""
        self._is_stopping = True
        runtime.forwarder.stop_accepting()
        runtime.api.events.stop()

    def _with_request_id(self, scope: Scope, send: Send) -> Send:
        """Return `send` that adds the request id to the response."""
        request_id = headers.request_id(scope["headers"]) or self._new_id()

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (headers.GATEWAY_REQUEST_ID, request_id.encode())]
            await send(message)

        return named

    def _routes(self, runtime: Runtime) -> list[BaseRoute]:
        async def ready(_: Request) -> Response:
            if self._is_stopping:
                return JSONResponse({"status": "stopping"}, 503)
            problem = await runtime.api.health.unready()
            if problem is not None:
                return JSONResponse({"status": "not ready", "store": problem}, 503)
            return JSONResponse({"status": "ready"})

        return [
            Route("/healthz", _alive),
            Route("/readyz", ready),
            *runtime.api.paths(),
            *OpenApi().paths(),
        ]


class _Cors(CORSMiddleware):
    """Allow web pages of these origins to call. Its own refusals have the format of all other errors."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], new_id: Callable[[], str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            # Allowed pages may also call a gateway on their own machine or in a private network.
            allow_private_network=True,
            expose_headers=(*headers.RESPONSE_HEADERS, *_PROVIDER_HEADERS),
        )
        self._new_id = new_id

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code != 200:  # noqa: PLR2004
            origin, vary = request_headers["origin"], response.headers["vary"]
            is_allowed = self.is_allowed_origin(origin)
            fault = errors.Forbidden(f"{bytes(response.body).decode()}.") if is_allowed else foreign_page(origin)
            response = fault_response(fault)
            response.headers["vary"] = vary
        request_id = headers.request_id(request_headers.raw) or self._new_id()
        response.headers[headers.GATEWAY_REQUEST_ID.decode()] = request_id
        return response


async def _report_failure(send: Send, message: str) -> None:
    logger.error("the gateway cannot start: %s", message)
    await send({"type": "lifespan.startup.failed", "message": message})


async def _refuse_socket(_: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.close"})


async def _alive(_: Request) -> Response:
    return JSONResponse({"status": "alive"})


async def _routing_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:  # noqa: PLR2004
        response = fault_response(errors.MethodNotAllowed("This path does not support this method."))
        response.headers.update(error.headers or {})  # `allow`: the supported methods
        return response
    return fault_response(errors.NotFound("This path does not exist."))


async def _internal_error(_: Request, error: Exception) -> Response:
    logger.error("an /api request failed because of a bug", exc_info=error)
    return fault_response(errors.InternalError("The gateway failed. Its operator finds the reason in the log."))


_HANDLERS: Final = {HTTPException: _routing_error, Exception: _internal_error}
