"""/metrics: serve the metrics of all workers of this machine for Prometheus.

Only for requests with access to all sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path

from gateway.core import errors
from gateway.server.auth import Access, require_admin
from gateway.server.handling import ServerRules, json_handler
from gateway.telemetry.metrics import CONTENT_TYPE, Metrics, WorkerState


class MetricsApi:
    """The handler of /metrics. `look` returns the state of the worker. `metrics`: None if metrics are off."""

    def __init__(
        self, rules: Callable[[], ServerRules], metrics: Metrics | None, look: Callable[[], WorkerState]
    ) -> None:
        self._rules = rules
        self._metrics = metrics
        self._look = look

    def paths(self) -> list[Path]:
        """Return the routes."""
        return [Path("/metrics", json_handler(self._rules, self.metrics), methods=["GET"])]

    async def metrics(self, request: Request, access: Access) -> Any:
        """GET /metrics."""
        del request
        if self._metrics is None:
            raise errors.NotFound("Metrics are off. Turn them on with telemetry.metrics.")
        require_admin(access)
        self._metrics.update_gauges(self._look())
        # With hundreds of models this takes milliseconds, which must not block the event loop.
        text = await asyncio.to_thread(self._metrics.text)
        return Response(text, media_type=CONTENT_TYPE, headers={"cache-control": "no-store"})
