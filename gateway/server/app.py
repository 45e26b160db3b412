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
from gateway.core.ports import Store
from gateway.server import headers
from gateway.server.auth import check_single, foreign_page
from gateway.server.context import ContextApi
from gateway.server.dashboard import Dashboard, is_browser
from gateway.server.endpoints import Forwarder, Receive, Scope, Send
from gateway.server.events import EventsApi
from gateway.server.handling import fault_response
from gateway.server.health import HealthApi
from gateway.server.metrics import MetricsApi
from gateway.server.openapi import OpenApi
from gateway.server.protocol import STOPPING
from gateway.server.sessions import SessionsApi
from gateway.server.sockets import Sockets

logger = logging.getLogger("gateway")

_OWN_PATHS: Final = ("/api/", "/healthz", "/readyz", "/ui", "/metrics", "/openapi.json")
_BOUNDS: Final = ("limit", "remaining", "reset")
#: what OpenAI's and Anthropic's documents say that their answers carry, beside our own names: clients read their limits
_PROVIDERS_HEADERS: Final = (
    "retry-after",
    "retry-after-ms",
    "request-id",
    "x-request-id",
    "openai-organization",
    "openai-processing-ms",
    "openai-project",
    "openai-version",
    "anthropic-organization-id",
    *(f"x-ratelimit-{bound}-{what}" for bound in _BOUNDS for what in ("requests", "tokens", "project-tokens")),
    *(
        f"anthropic-{what}-{bound}"
        for what in (
            *("ratelimit-requests", "ratelimit-tokens", "ratelimit-input-tokens", "ratelimit-output-tokens"),
            *("priority-input-tokens", "priority-output-tokens", "fast-input-tokens", "fast-output-tokens"),
        )
        for bound in _BOUNDS
    ),
)


class Runtime(Protocol):
    """What the lifespan opens. `forwarder` is another one after a reload."""

    store: Store

    @property
    def forwarder(self) -> Forwarder:
        """The one in force."""
        ...

    @property
    def api(self) -> SessionsApi:
        """The handlers under /api."""
        ...

    @property
    def context_api(self) -> ContextApi:
        """The handlers that look at a body."""
        ...

    @property
    def health_api(self) -> HealthApi:
        """The handler that says how the worker does."""
        ...

    @property
    def dashboard(self) -> Dashboard:
        """The page."""
        ...

    @property
    def events_api(self) -> EventsApi:
        """The handler that shows calls as they end."""
        ...

    @property
    def metrics_api(self) -> MetricsApi:
        """The handler of figures for Prometheus."""
        ...

    @property
    def cors_origins(self) -> Sequence[str]:
        """Origins of web pages that may call."""
        ...


class GatewayApp:
    """The application. `resources` opens everything a worker process needs and closes it again."""

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
        """Calls under way."""
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
            scope["path"] == "/" and self._runtime.dashboard.is_on and is_browser(scope)
        ):
            named = self._naming(scope, send)
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
            await _failed(send, str(error))
        except errors.StoreUnavailable as fault:
            await _failed(send, f"store.url: {fault.message}")
        except Exception:
            # The server ends without a word of its own.
            logger.exception("the gateway ends in a bug")
            raise
        else:
            await send({"type": "lifespan.shutdown.complete"})

    def _stop(self, runtime: Runtime) -> None:
        """The server begins to stop: nothing new is begun, and what has no end of its own ends."""
        self._is_stopping = True
        runtime.forwarder.take_no_more()
        runtime.events_api.stop()

    def _naming(self, scope: Scope, send: Send) -> Send:
        """`send` that puts the request's id on the answer."""
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
            problem = await runtime.health_api.unready()
            if problem is not None:
                return JSONResponse({"status": "not ready", "store": problem}, 503)
            return JSONResponse({"status": "ready"})

        return [
            Route("/healthz", _alive),
            Route("/readyz", ready),
            *runtime.api.paths(),
            *runtime.context_api.paths(),
            *runtime.health_api.paths(),
            *runtime.events_api.paths(),
            *runtime.metrics_api.paths(),
            *runtime.dashboard.paths(),
            *OpenApi().paths(),
        ]


class _Cors(CORSMiddleware):
    """Lets web pages of these origins call. What it refuses itself is refused as everything else is."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], new_id: Callable[[], str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            # Pages that may call may do so where this machine stands in a private network, or is their own.
            allow_private_network=True,
            expose_headers=(*headers.EXPOSED, *_PROVIDERS_HEADERS),
        )
        self._new_id = new_id

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code != 200:  # noqa: PLR2004
            origin, vary = request_headers["origin"], answer.headers["vary"]
            is_stranger = not self.is_allowed_origin(origin)
            why = foreign_page(origin) if is_stranger else errors.Forbidden(f"{bytes(answer.body).decode()}.")
            answer = fault_response(why)
            answer.headers["vary"] = vary
        answer.headers[headers.GATEWAY_REQUEST_ID.decode()] = headers.request_id(request_headers.raw) or self._new_id()
        return answer


async def _failed(send: Send, message: str) -> None:
    logger.error("the gateway cannot start: %s", message)
    await send({"type": "lifespan.startup.failed", "message": message})


async def _refuse_socket(_: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.close"})


async def _alive(_: Request) -> Response:
    return JSONResponse({"status": "alive"})


async def _http_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:  # noqa: PLR2004
        answer = fault_response(errors.MethodNotAllowed("This path does not take this method."))
        answer.headers.update(error.headers or {})  # `allow`: those that it takes
        return answer
    return fault_response(errors.NotFound("There is nothing under this path."))


async def _bug(_: Request, error: Exception) -> Response:
    logger.error("an /api request failed in a bug", exc_info=error)
    return fault_response(errors.InternalError("The gateway failed; the operator finds the reason in the log."))


_HANDLERS: Final = {HTTPException: _http_error, Exception: _bug}
