"""/api: read, change and delete sessions, read call records, look up models.

JSON; no prompt or answer text.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from itertools import islice
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.routing import Route as Path

from gateway.budget.reservation import sessions_above
from gateway.context.inspector import context_json
from gateway.core import errors
from gateway.core.ledger.arithmetic import (
    LEAST_USD,
    MOST,
    MOST_USD,
    NO_LIMITS,
    NOTHING,
    Balance,
    Claim,
    Dimension,
    nano,
)
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Ledger, Observer, Sessions, Store
from gateway.core.steps import Agent
from gateway.core.stored import SORTS, SessionView, Sort
from gateway.core.times import time_text
from gateway.core.usage import Totals
from gateway.server.auth import Access, require_admin
from gateway.server.handling import Handler, ServerRules, wrapped
from gateway.server.shown import (
    call_json,
    limits_json,
    models_json,
    parent_json,
    session_budget_json,
    session_json,
    session_tools_json,
)
from gateway.server.steps import set_step, setting_of, steps_json
from gateway.stores.damage import UnreadSessions

_MAX_LIMIT: Final = 1000
_MAX_CHANGE: Final = 64 * 1024
#: what the ledger counts exactly, as in the configuration
_MOST_LIMITS: Final[Mapping[Dimension, int]] = {"tokens": MOST, "nano_usd": MOST_USD, "calls": MOST}
_DIMENSIONS: Final[Mapping[str, Dimension]] = {"tokens": "tokens", "usd": "nano_usd", "calls": "calls"}
_MAX_LIMIT_DIGITS: Final = 20
#: what a PATCH of a session may hold
_CHANGES: Final = frozenset({"budget", "active_step", "sequence_index", "agent"})
#: calls among which the last one that was weighed is looked for
LAST_CALLS: Final = 20
_CALL_ID: Final = re.compile(r"[0-9a-f]{12,64}")


class SessionsApi:
    """The handlers.

    `rules` gives those in force; `reload` reads the configuration again, or raises ConfigError, and names the keys that
    need a restart; `observers` are told of steps that are set.
    """

    def __init__(
        self,
        store: Store,
        rules: Callable[[], ServerRules],
        reload: Callable[[], list[str]],
        observers: Sequence[Observer],
    ) -> None:
        self._store = store
        self._unread = UnreadSessions()
        self._observers = observers
        self._rules = rules
        self._reload = reload

    def paths(self) -> list[Path]:
        """The routes."""
        return [
            Path("/api/sessions", self._wrap(self.list), methods=["GET"]),
            Path("/api/sessions/{id:path}/calls", self._wrap(self.calls), methods=["GET"]),
            Path("/api/sessions/{id:path}/reset", self._wrap(self.reset), methods=["POST"]),
            Path("/api/sessions/{id:path}", self._wrap(self.session), methods=["GET", "DELETE", "PATCH"]),
            Path("/api/calls", self._wrap(self.newest), methods=["GET"]),
            Path("/api/calls/{request_id:path}", self._wrap(self.call), methods=["GET"]),
            Path("/api/results/{handle}", self._wrap(self.result), methods=["GET"]),
            Path("/api/models", self._wrap(self.models), methods=["GET"]),
            Path("/api/reload", self._wrap(self.reload), methods=["POST"]),
        ]

    def _wrap(self, handler: Callable[[Request, Access], Awaitable[Any]]) -> Handler:
        return wrapped(self._rules, handler)

    async def list(self, request: Request, access: Access) -> Any:
        """GET /api/sessions?limit=&cursor=&sort=recent|tokens|cost&q=part of a name."""
        query = request.query_params
        sort, part = sort_of(query.get("sort")), query.get("q", "")
        page = await self._store.sessions(access.namespace, _limit(request), query.get("cursor"), sort, part=part)
        rows = await rows_of(self._store, page.sessions, self._rules().budget, access, self._unread)
        return {"sessions": rows, "cursor": page.cursor}

    async def session(self, request: Request, access: Access) -> Any:
        """GET, PATCH or DELETE /api/sessions/{id}."""
        key = _key(request, access)
        if request.method == "PATCH":
            return await self._change(key, await self._body(request), access)
        if request.method == "DELETE":
            require_admin(access)
            if not await delete_session(self._store, key):
                raise _no_session(key)
            return deleted_json(key, access)
        rules = self._rules()
        found = await details_json(self._store, key, access, rules.budget, rules.agents)
        if found is None:
            raise _no_session(key)
        return found

    async def _body(self, request: Request) -> Any:
        """The JSON of a small request."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > _MAX_CHANGE:
                raise errors.InvalidRequest(f"The body of this request has at most {_MAX_CHANGE:,} bytes.")
        try:
            return msgspec.json.decode(bytes(body))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise errors.InvalidRequest('The body must be JSON, such as {"budget": {"tokens": 200000}}.') from None

    async def _change(self, key: SessionKey, asked: Any, access: Access) -> Any:
        """Raise, lower or lift the session's budget, or set its step; its next call goes by that."""
        require_admin(access)
        if not isinstance(asked, dict) or not {"budget", "active_step"} & set(asked) or set(asked) - _CHANGES:
            raise errors.InvalidRequest(
                'What can be changed is "budget" and "active_step", as {"budget": {"tokens": 200000}} or '
                '{"active_step": "review", "sequence_index": 1, "agent": "writer"}; without "agent" it is the default '
                'one, without "sequence_index" the beginning of the step.'
            )
        if "active_step" not in asked and len(asked) > 1:
            raise errors.InvalidRequest('"agent" and "sequence_index" go with "active_step". Name the step as well.')
        limits = decided_limits(asked["budget"]) if "budget" in asked else None
        setting = setting_of(asked, self._rules().agents) if "active_step" in asked else None
        if "budget" in asked:
            await self._store.decide(key.account, limits)
        if setting is not None:
            await set_step(self._store, key, setting, self._observers, time.time())
        return await self._changed(key, access)

    async def _changed(self, key: SessionKey, access: Access) -> dict[str, Any]:
        rules = self._rules()
        return await changed_json(self._store, key, access, rules.budget, rules.agents)

    async def calls(self, request: Request, access: Access) -> Any:
        """GET /api/sessions/{id}/calls?limit=&cursor=."""
        key, limit = _key(request, access), _limit(request)
        cursor = request.query_params.get("cursor")
        if cursor is not None and not _CALL_ID.fullmatch(cursor):
            raise errors.InvalidRequest("The cursor is not one that this list returned.", param="cursor")
        records = await self._store.calls(key, limit, cursor)
        if not records and not await _is_known(self._store, key):
            raise _no_session(key)
        more = records[-1].call_id if len(records) == limit else None
        return {"calls": [call_json(record, access) for record in records], "cursor": more}

    async def newest(self, request: Request, access: Access) -> Any:
        """GET /api/calls?limit=: the newest records of all sessions."""
        records = await self._store.newest(access.namespace, _limit(request))
        return {"calls": [call_json(record, access) for record in records]}

    async def reset(self, request: Request, access: Access) -> Any:
        """POST /api/sessions/{id}/reset."""
        require_admin(access)
        key = _key(request, access)
        if not await reset_session(self._store, key):
            raise _no_session(key)
        return await self._changed(key, access)

    async def call(self, request: Request, access: Access) -> Any:
        """GET /api/calls/{request_id}?explain=1: with what became of each message."""
        wanted = request.path_params["request_id"]
        record = await self._store.call(access.namespace, wanted)
        if record is None:
            raise errors.NotFound(
                f'There is no record of a call "{wanted[:100]}". It may not have ended yet, or it belongs to another '
                "client key, or its session has expired (sessions.ttl)."
            )
        found = call_json(record, access)
        if record.context is not None and request.query_params.get("explain") in ("1", "true"):
            found["context"] = context_json(record.context, explain=True)
        return found

    async def result(self, request: Request, access: Access) -> Any:
        """GET /api/results/{handle}: a tool result of which a session was shown less, as it came."""
        handle = request.path_params["handle"]
        text = await self._store.result(access.namespace, handle)
        if text is None:
            raise errors.NotFound(
                f'There is no result "{handle[:100]}". It belongs to another client key, or its session has expired.'
            )
        return text

    async def models(self, request: Request, access: Access) -> Any:
        """GET /api/models?q=: what is known of the models whose name q is a part or a shell pattern of."""
        del access
        wanted = request.query_params.get("q", "")
        rules = self._rules()
        rows = islice(models_json(rules.routes, rules.catalog, wanted), _limit(request))
        # The whole table is looked through: tens of milliseconds that the loop should not wait for.
        return {"models": await asyncio.to_thread(list, rows)}

    async def reload(self, request: Request, access: Access) -> Any:
        """POST /api/reload."""
        del request
        require_admin(access)
        try:
            needing_restart = self._reload()
        except errors.ConfigError as error:
            raise errors.InvalidRequest("Nothing was changed: " + "; ".join(error.problems)) from None
        return {"reloaded": True, **({"needs_restart": needing_restart} if needing_restart else {})}


async def details_json(
    store: Store, key: SessionKey, access: Access, policy: BudgetPolicy, agents: Mapping[str, Agent]
) -> dict[str, Any] | None:
    """Return a session with its parents, tools and steps; None if nothing is kept under this name.

    A session that made no call itself, such as the parent of others, has totals of zero. The budget that its last call
    declared is in force until a later call declares another one or none.
    """
    view = await store.session(key)
    if view is None and not await _is_kept(store, key):
        return None
    records = await store.calls(key, LAST_CALLS)
    state = (await store.remembered(key)).state
    parents, _ = await sessions_above(store, key, state.parent)
    balance, *above = await balances_of(store, [key, *parents], policy)
    declared = records[0].declared if records else None
    balance = balance.lowered(declared or NO_LIMITS)
    shown_view = view or SessionView(key, 0, 0, Totals())
    shown = session_json(shown_view, access, balance, has_modes=policy.modes)
    if view is None:
        shown["created_at"] = None
        shown["last_call_at"] = time_text(records[0].started_at) if records else None
    return {
        **shown,
        "declared_budget": limits_json(declared) if declared is not None else None,
        "parent": parents[0].shown(access.namespace) if parents else None,
        "parents": [parent_json(one, access, how) for one, how in zip(parents, above, strict=True)],
        **session_tools_json(shown_view, records),
        **steps_json(state, agents),
    }


async def changed_json(
    store: Store, key: SessionKey, access: Access, policy: BudgetPolicy, agents: Mapping[str, Agent]
) -> dict[str, Any]:
    """A session after a change; of one without calls only its id, budget and steps."""
    (balance,) = await balances_of(store, [key], policy)
    view, placed = await store.session(key), await placed_json(store, key, agents)
    if view is not None:
        return {**session_json(view, access, balance, has_modes=policy.modes), **placed}
    return {"id": key.shown(access.namespace), **session_budget_json(balance, has_modes=policy.modes), **placed}


async def reset_session(store: Store, key: SessionKey) -> bool:
    """Let totals, and what is used of the budget, begin anew; False where nothing is kept under this name."""
    was_kept = await _is_kept(store, key)
    return await store.reset(key) or was_kept


async def delete_session(store: Store, key: SessionKey) -> bool:
    """Forget a session and its budget; False where nothing is kept under this name."""
    was_kept = await _is_kept(store, key)
    return await store.delete(key) or was_kept


async def _is_known(store: Store, key: SessionKey) -> bool:
    return await store.session(key) is not None or await _is_kept(store, key)


async def _is_kept(store: Store, key: SessionKey) -> bool:
    """Whether something is kept in this name, also where no call of it was counted.

    That is a budget, what was spent of it, as by sessions below this one, or records of calls that failed.
    """
    try:
        (balance,) = await store.balances([Claim(key.account)])
    except errors.StoreDamaged:
        # There is something, and to delete it is how it is mended.
        return True
    return balance.used != NOTHING or not balance.limits.is_none or bool(await store.calls(key, 1))


def deleted_json(key: SessionKey, access: Access) -> dict[str, Any]:
    """What is said of a session that was deleted."""
    return {"id": key.shown(access.namespace), "deleted": True}


async def placed_json(store: Sessions, key: SessionKey, agents: Mapping[str, Agent]) -> dict[str, Any]:
    """Where a session is in the steps of its agents."""
    remembered = await store.remembered(key)
    return steps_json(remembered.state, agents)


async def rows_of(
    store: Ledger, views: Sequence[SessionView], policy: BudgetPolicy, access: Access, unread: UnreadSessions
) -> list[dict[str, Any]]:
    """Sessions as lists show them, without those whose accounts cannot be read."""
    try:
        balance = await balances_of(store, [view.key for view in views], policy)
    except errors.StoreDamaged:
        found = []
        for view in views:
            with unread.passed_over(f"{view.key.namespace}/{view.key.id}"):
                (one,) = await balances_of(store, [view.key], policy)
                found.append(session_json(view, access, one, has_modes=policy.modes))
        return found
    return [session_json(view, access, one, has_modes=policy.modes) for view, one in zip(views, balance, strict=True)]


async def balances_of(store: Ledger, sessions: Sequence[SessionKey], policy: BudgetPolicy) -> tuple[Balance, ...]:
    """How the budgets of sessions stand, as far as they are configured or were set for them."""
    return await store.balances([Claim(key.account, policy.session) for key in sessions])


def decided_limits(asked: Any) -> Mapping[Dimension, int | None] | None:
    """The limits to set for one session: numbers, null to lift one; "default" for all: as they are configured.

    Raises:
        InvalidRequest: they are something else.
    """
    if asked == "default":
        return None
    if not isinstance(asked, dict) or not asked or set(asked) - set(_DIMENSIONS):
        raise errors.InvalidRequest(
            '"budget" is "default", or an object with tokens, usd or calls: numbers, or null for no limit.',
            param="budget",
        )
    return {_DIMENSIONS[name]: _decided(name, value) for name, value in asked.items()}


def _decided(name: str, value: Any) -> int | None:
    if value is None:
        return None
    is_number = isinstance(value, int | float | str) and not isinstance(value, bool)
    try:
        number = Decimal(str(value)) if is_number else Decimal(-1)
    except InvalidOperation:
        number = Decimal(-1)
    most = _MOST_LIMITS[_DIMENSIONS[name]]
    is_counted = number.is_finite() and (number.is_zero() or LEAST_USD <= number <= most)
    if not is_counted or (name != "usd" and number != number.to_integral_value()):
        what = f"0, a number from {LEAST_USD:f}" if name == "usd" else "a whole number from 0"
        raise errors.InvalidRequest(
            f'"budget.{name}" is {what} to {most:,}, or null for no limit.',
            param=f"budget.{name}",
        )
    return nano(number) if name == "usd" else int(number)


def sort_of(text: str | None) -> Sort:
    """Return the order of a list of sessions that was asked for.

    Raises:
        InvalidRequest: there is no such order.
    """
    for sort in SORTS:
        if text in (sort, None):
            return sort
    raise errors.InvalidRequest(f'"sort" is one of {", ".join(SORTS)}.', param="sort")


def _key(request: Request, access: Access) -> SessionKey:
    text = request.path_params["id"]
    key = SessionKey.parse(text, access.namespace)
    if key is None:
        raise errors.NotFound(f'There is no session "{text[:100]}".')
    return key


def _no_session(key: SessionKey) -> errors.NotFound:
    return errors.NotFound(
        f'There is no session "{key.id}". No call of it may have ended yet, or it has expired (sessions.ttl).'
    )


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", "50")
    # `int` refuses thousands of digits with an error of its own.
    if not text.isdecimal() or len(text) > _MAX_LIMIT_DIGITS or not 1 <= int(text) <= _MAX_LIMIT:
        raise errors.InvalidRequest(f'"limit" is a whole number from 1 to {_MAX_LIMIT}.', param="limit")
    return int(text)
