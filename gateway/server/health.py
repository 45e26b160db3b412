"""/api/health: report the state of the store, the providers and the running calls.

Only for requests with access to all sessions.
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
from gateway.server.handling import ServerRules, json_handler
from gateway.server.unrecorded import UnrecordedRefusal

State = Literal["ok", "failing", "left_alone", "not_called", "no_key"]
STATES: Final[tuple[State, ...]] = get_args(State)


@dataclass(frozen=True, slots=True)
class ProviderHealth:
    """The recent state of a provider, from the view of this worker.

    Attributes:
        adapter: as in the configuration.
        state: one of `STATES`:
            - `ok`: its last call succeeded
            - `failing`: its last calls failed
            - `left_alone`: the circuit is open after too many failures in a row; no calls are sent
            - `not_called`: not called yet
            - `no_key`: not called yet, and the gateway has no key for it, so callers must send their own
        failures: consecutive failures.
        asked_in_s: seconds until the provider is tried again, if the circuit is open.
    """

    name: str
    adapter: str
    state: State
    failures: int = 0
    asked_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class IdentityProviderHealth:
    """The identity provider of `auth.jwt`. `problem`: why its keys could not be read the last time, or None."""

    issuer: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """The state of one worker process. Times are Unix times in seconds.

    Attributes:
        workers: number of worker processes; all other numbers are of this worker only.
        calls: number of running calls.
        holds: number of holds whose leases this worker renews.
        store: URL of the store, without the password.
        is_unavailable: the store was unavailable when it was used last.
        waiting: number of settled calls that wait for the store.
        on_failure: what happens to new calls while the store is unavailable.
        unrecorded_refusals: refusals without a call record, newest first.
        identity_provider: None if no tokens are accepted.
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
    identity_provider: IdentityProviderHealth | None = None


class HealthApi:
    """The handler of /api/health. `look` returns the present state of the worker."""

    def __init__(self, store: Store, rules: Callable[[], ServerRules], look: Callable[[], WorkerHealth]) -> None:
        self._store = store
        self._rules = rules
        self._look = look

    def paths(self) -> list[Path]:
        """Return the routes."""
        return [Path("/api/health", json_handler(self._rules, self.health), methods=["GET"])]

    async def health(self, request: Request, access: Access) -> Any:
        """GET /api/health."""
        del request
        require_admin(access)
        problem = await self._problem()
        return health_json(self._look(), problem)

    async def unready(self) -> str | None:
        """Return why the store is unavailable for new calls, or None if it is available."""
        problem, worker = await self._problem(), self._look()
        if problem is None and worker.is_unavailable:
            return f"The store was unavailable, and {worker.waiting} settled calls wait for it. Try again shortly."
        return problem

    async def _problem(self) -> str | None:
        try:
            await self._store.ping()
        except errors.StoreUnavailable as fault:
            return fault.message
        return None


def health_json(worker: WorkerHealth, problem: str | None) -> dict[str, Any]:
    """Return the state of a worker as JSON. `problem`: why the store cannot be used; None if it can."""
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
        "unrecorded_refusals": [_refusal_json(refusal) for refusal in worker.unrecorded_refusals],
        "identity_provider": asdict(worker.identity_provider) if worker.identity_provider is not None else None,
    }


def _refusal_json(refusal: UnrecordedRefusal) -> dict[str, Any]:
    return {
        **asdict(refusal),
        "first_at": time_text(refusal.first_at),
        "last_at": time_text(refusal.last_at),
    }
