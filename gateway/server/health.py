"""/api/health: report the state of the store, the providers and the running calls.

Only for requests that may see all sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, Literal, get_args

from starlette.requests import Request
from starlette.routing import Route as Path

from gateway.core import errors
from gateway.core.ports import Store
from gateway.core.times import time_text
from gateway.core.values import dataclass
from gateway.server.auth import Access, require_admin
from gateway.server.handling import ServerRules, wrapped
from gateway.server.unrecorded import UnrecordedRefusal

State = Literal["ok", "failing", "left_alone", "not_called", "no_key"]
STATES: Final[tuple[State, ...]] = get_args(State)


@dataclass(frozen=True, slots=True)
class ProviderHealth:
    """How a provider has done of late, as this worker saw it.

    Attributes:
        adapter: how it is spoken to, as in the configuration.
        state: one of `STATES`: its last call went well; it failed since; it failed too often in a row and is not asked;
            it was not called yet; and the gateway has no key for it either, so that only callers with their own can.
        failures: the last ones in a row.
        asked_in_s: seconds until it is asked again where it is left alone.
    """

    name: str
    adapter: str
    state: State
    failures: int = 0
    asked_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """What one worker process knows of itself. Times are seconds since the epoch.

    Attributes:
        workers: number of processes that were started; all other numbers here are of one of them.
        calls: number of calls under way.
        holds: number of holds that it keeps alive.
        store: its kind and place, without a password.
        is_unavailable: the store could not be used when it was used last.
        waiting: number of settled calls that wait for the store.
        on_failure: what becomes of new calls while the store is away.
        unrecorded_refusals: those without a record in the store, the newest first.
    """

    version: str
    pid: int
    workers: int
    started_at: float
    calls: int
    holds: int
    store: str
    is_unavailable: bool
    waiting: int
    on_failure: str
    default_provider: str | None
    providers: Sequence[ProviderHealth]
    unrecorded_refusals: Sequence[UnrecordedRefusal] = ()


class HealthApi:
    """The handler. `look` gives what the worker knows now."""

    def __init__(self, store: Store, rules: Callable[[], ServerRules], look: Callable[[], WorkerHealth]) -> None:
        self._store = store
        self._rules = rules
        self._look = look

    def paths(self) -> list[Path]:
        """The routes."""
        return [Path("/api/health", wrapped(self._rules, self.health), methods=["GET"])]

    async def health(self, request: Request, access: Access) -> Any:
        """GET /api/health."""
        del request
        require_admin(access)
        problem = await self._problem()
        return health_json(self._look(), problem)

    async def unready(self) -> str | None:
        """Why calls that come now find the store away; None: they do not."""
        problem, worker = await self._problem(), self._look()
        if problem is None and worker.is_unavailable:
            return f"The store was away. Settled calls that wait for it: {worker.waiting}. Try again shortly."
        return problem

    async def _problem(self) -> str | None:
        try:
            await self._store.ping()
        except errors.StoreUnavailable as fault:
            return fault.message
        return None


def health_json(worker: WorkerHealth, problem: str | None) -> dict[str, Any]:
    """A worker's state as /api shows it. `problem`: why its store cannot be used, where it cannot."""
    is_ready = problem is None and not worker.is_unavailable
    return {
        "status": "ready" if is_ready else "not ready",
        "version": worker.version,
        "worker": {
            "pid": worker.pid,
            "workers": worker.workers,
            "started_at": time_text(worker.started_at),
            "calls": worker.calls,
            "holds": worker.holds,
        },
        "store": {
            "url": worker.store,
            "reachable": problem is None,
            "problem": problem,
            "away": worker.is_unavailable,
            "waiting": worker.waiting,
            "on_failure": worker.on_failure,
        },
        "default_provider": worker.default_provider,
        "providers": [asdict(provider) for provider in worker.providers],
        "unrecorded_refusals": [_refusal_json(one) for one in worker.unrecorded_refusals],
    }


def _refusal_json(refusal: UnrecordedRefusal) -> dict[str, Any]:
    return {
        **asdict(refusal),
        "first_at": time_text(refusal.first_at),
        "last_at": time_text(refusal.last_at),
    }
