"""/api: read, change and delete sessions, read call records, look up models.

Responses are JSON. They contain no text of prompts and responses, except for stored tool results.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from itertools import islice
from typing import Any, Final

from starlette.requests import Request
from starlette.routing import Route as Path

from gateway.budget.reservation import sessions_above
from gateway.context.inspector import context_json
from gateway.core import errors
from gateway.core.audit import Author
from gateway.core.ledger.arithmetic import (
    LEAST_USD,
    MOST,
    MOST_USD,
    NO_LIMITS,
    Balance,
    Dimension,
    nano,
)
from gateway.core.ledger.burn_rate import NEWEST_CALLS, burn_rate
from gateway.core.ledger.charging import BudgetPolicy, claim_of_session
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Calls, Ledger, Observer, Store
from gateway.core.record import CallRecord
from gateway.core.session import SessionState
from gateway.core.steps import Agent
from gateway.core.stored import SORTS, SessionView, Sort
from gateway.core.times import time_text
from gateway.core.usage import Totals
from gateway.server.agents import agents_json, calls_of_agent
from gateway.server.audit import author_of
from gateway.server.auth import Access, require_admin
from gateway.server.handling import Handler, ServerRules, json_body, json_handler, limit_of
from gateway.server.session_changes import (
    change_budget,
    change_step,
    delete_session,
    is_known,
    is_stored,
    reset_session,
    resume_session,
)
from gateway.server.shown import (
    burn_rate_json,
    call_json,
    limits_json,
    models_json,
    parent_json,
    session_budget_json,
    session_json,
    session_tools_json,
)
from gateway.server.steps import setting_of, steps_json
from gateway.stores.damage import UnreadSessions

#: largest limits that the ledger counts exactly; the configuration has the same
_LARGEST_LIMITS: Final[Mapping[Dimension, int]] = {"tokens": MOST, "nano_usd": MOST_USD, "calls": MOST}
_DIMENSIONS: Final[Mapping[str, Dimension]] = {"tokens": "tokens", "usd": "nano_usd", "calls": "calls"}
#: fields of the body of a PATCH
_CHANGE_FIELDS: Final = frozenset({"budget", "active_step", "sequence_index", "agent"})
#: a body of a PATCH
_EXAMPLE: Final = '{"budget": {"tokens": 200000}}'
#: newest calls that are searched for the last one with token counts
LAST_CALLS: Final = 20
_CALL_ID: Final = re.compile(r"[0-9a-f]{12,64}")


class SessionsApi:
    """The handlers of sessions, call records, tool results, models and reload.

    Args:
        store: where sessions and records are stored.
        rules: returns the rules in force.
        reload: reads the configuration again for its author, and returns the changed keys that need a restart. Raises
            ConfigError.
        observers: are notified when a step is set.
    """

    def __init__(
        self,
        store: Store,
        rules: Callable[[], ServerRules],
        reload: Callable[[Author], Awaitable[list[str]]],
        observers: Sequence[Observer],
    ) -> None:
        self._store = store
        self._unread = UnreadSessions()
        self._observers = observers
        self._rules = rules
        self._reload = reload

    def paths(self) -> list[Path]:
        """Return the routes."""
        return [
            Path("/api/sessions", self._wrap(self.list), methods=["GET"]),
            Path("/api/sessions/{id:path}/calls", self._wrap(self.calls), methods=["GET"]),
            Path("/api/sessions/{id:path}/reset", self._wrap(self.reset), methods=["POST"]),
            Path("/api/sessions/{id:path}/resume", self._wrap(self.resume), methods=["POST"]),
            Path("/api/sessions/{id:path}", self._wrap(self.session), methods=["GET", "DELETE", "PATCH"]),
            Path("/api/calls", self._wrap(self.newest), methods=["GET"]),
            Path("/api/calls/{request_id:path}", self._wrap(self.call), methods=["GET"]),
            Path("/api/results/{handle}", self._wrap(self.result), methods=["GET"]),
            Path("/api/models", self._wrap(self.models), methods=["GET"]),
            Path("/api/reload", self._wrap(self.reload), methods=["POST"]),
        ]

    def _wrap(self, handler: Callable[[Request, Access], Awaitable[Any]]) -> Handler:
        return json_handler(self._rules, handler)

    async def list(self, request: Request, access: Access) -> Any:
        """GET /api/sessions?limit=&cursor=&sort=recent|tokens|cost&q=part of a name."""
        query = request.query_params
        sort, part = sort_of(query.get("sort")), query.get("q", "")
        page = await self._store.sessions(access.namespace, limit_of(request), query.get("cursor"), sort, part=part)
        rows = await rows_of(self._store, page.sessions, self._rules().budget, access, self._unread)
        return {"sessions": rows, "cursor": page.cursor}

    async def session(self, request: Request, access: Access) -> Any:
        """GET, PATCH or DELETE /api/sessions/{id}."""
        key = _key(request, access)
        if request.method == "PATCH":
            require_admin(access)
            await self._change(key, await json_body(request, _EXAMPLE), author_of(request, access))
            return await self._changed(key, access)
        if request.method == "DELETE":
            require_admin(access)
            if not await delete_session(self._store, key, author_of(request, access)):
                raise _no_session(key)
            return deleted_json(key, access)
        rules = self._rules()
        details = await details_json(self._store, key, access, rules.budget, rules.agents)
        if details is None:
            raise _no_session(key)
        return details

    async def _change(self, key: SessionKey, asked: Any, author: Author) -> None:
        """Change or remove the session's budget, or set its step, from its next call on."""
        if not isinstance(asked, dict) or not {"budget", "active_step"} & set(asked) or set(asked) - _CHANGE_FIELDS:
            raise errors.InvalidRequest(
                'Send "budget", "active_step" or both, such as {"budget": {"tokens": 200000}} or {"active_step": '
                '"review", "sequence_index": 1, "agent": "writer"}. Defaults: the default agent, and index 0.'
            )
        if "active_step" not in asked and len(asked) > 1:
            raise errors.InvalidRequest('"agent" and "sequence_index" need "active_step". Name the step as well.')
        limits = parse_limits(asked["budget"]) if "budget" in asked else None
        setting = setting_of(asked, self._rules().agents) if "active_step" in asked else None
        if "budget" in asked:
            await change_budget(self._store, key, limits, self._rules().budget, author)
        if setting is not None:
            await change_step(self._store, key, setting, self._observers, author)

    async def _changed(self, key: SessionKey, access: Access) -> dict[str, Any]:
        rules = self._rules()
        return await changed_json(self._store, key, access, rules.budget, rules.agents)

    async def calls(self, request: Request, access: Access) -> Any:
        """GET /api/sessions/{id}/calls?limit=&cursor=&agent=id of an agent."""
        key, limit = _key(request, access), limit_of(request)
        cursor, agent = request.query_params.get("cursor"), request.query_params.get("agent")
        if cursor is not None and not _CALL_ID.fullmatch(cursor):
            raise errors.InvalidRequest("The cursor is invalid. Send one that this list returned.", param="cursor")
        records: Sequence[CallRecord]
        if agent:
            records, more = await calls_of_agent(self._store, key, agent, limit, cursor)
        else:
            records = await self._store.calls(key, limit, cursor)
            more = records[-1].call_id if len(records) == limit else None
        if not records and not await is_known(self._store, key):
            raise _no_session(key)
        return {"calls": [call_json(record, access) for record in records], "cursor": more}

    async def newest(self, request: Request, access: Access) -> Any:
        """GET /api/calls?limit=: return the newest records of all sessions."""
        records = await self._store.newest_calls(access.namespace, limit_of(request))
        return {"calls": [call_json(record, access) for record in records]}

    async def reset(self, request: Request, access: Access) -> Any:
        """POST /api/sessions/{id}/reset."""
        require_admin(access)
        key = _key(request, access)
        if not await reset_session(self._store, key, author_of(request, access)):
            raise _no_session(key)
        return await self._changed(key, access)

    async def resume(self, request: Request, access: Access) -> Any:
        """POST /api/sessions/{id}/resume: allow calls again that runaway protection refuses."""
        require_admin(access)
        key = _key(request, access)
        if not await resume_session(self._store, key, author_of(request, access)):
            raise _no_session(key)
        return await self._changed(key, access)

    async def call(self, request: Request, access: Access) -> Any:
        """GET /api/calls/{request_id}?explain=1: return a record; `explain`: with what was done with each message."""
        wanted = request.path_params["request_id"]
        record = await self._store.call(access.namespace, wanted)
        if record is None:
            raise errors.NotFound(
                f'There is no record of a call "{wanted[:100]}". The call may still be running, belong to another '
                "client key, or have expired with its session (sessions.ttl)."
            )
        found = call_json(record, access)
        if record.context is not None and request.query_params.get("explain") in ("1", "true"):
            found["context"] = context_json(record.context, explain=True)
        return found

    async def result(self, request: Request, access: Access) -> Any:
        """GET /api/results/{handle}: return the full text of a tool result that was sent in a shorter form."""
        handle = request.path_params["handle"]
        text = await self._store.result(access.namespace, handle)
        if text is None:
            raise errors.NotFound(
                f'There is no result "{handle[:100]}". It may belong to another client key, or have expired.'
            )
        return text

    async def models(self, request: Request, access: Access) -> Any:
        """GET /api/models?q=: return limits and prices of models; q: part of the name, or a shell pattern."""
        del access
        wanted = request.query_params.get("q", "")
        rules = self._rules()
        rows = islice(models_json(rules.routes, rules.catalog, wanted), limit_of(request))
        # Searching the whole table takes tens of milliseconds, which must not block the event loop.
        return {"models": await asyncio.to_thread(list, rows)}

    async def reload(self, request: Request, access: Access) -> Any:
        """POST /api/reload."""
        require_admin(access)
        try:
            restart_keys = await self._reload(author_of(request, access))
        except errors.ConfigError as error:
            raise errors.InvalidRequest("Nothing was changed: " + "; ".join(error.problems)) from None
        return {"reloaded": True, **({"needs_restart": restart_keys} if restart_keys else {})}


async def details_json(
    store: Store, key: SessionKey, access: Access, policy: BudgetPolicy, agents: Mapping[str, Agent]
) -> dict[str, Any] | None:
    """Return a session with its parents, tools, steps and agents, or None if nothing is stored under this name.

    A session without calls of its own, such as a parent session, has totals of zero. A declared budget is in force
    until a later call declares another one or none.
    """
    view = await store.session(key)
    if view is None and not await is_stored(store, key):
        return None
    records = await store.calls(key, LAST_CALLS)
    state = (await store.remembered(key)).state
    parents, _ = await sessions_above(store, key, state.parent)
    balance, *above = await balances_of(store, [key, *parents], policy)
    declared = records[0].declared if records else None
    balance = balance.lowered(declared or NO_LIMITS)
    shown_view = view or SessionView(key, 0, 0, Totals())
    shown = session_json(shown_view, access, balance, has_modes=policy.modes)
    rate = burn_rate(balance, await _charged(store, key, balance, shown_view, records), time.time())
    if view is None:
        shown["created_at"] = None
        shown["last_call_at"] = time_text(records[0].started_at) if records else None
    return {
        **shown,
        "burn_rate": burn_rate_json(rate),
        "declared_budget": limits_json(declared) if declared is not None else None,
        "parent": parents[0].shown(access.namespace) if parents else None,
        "parents": [parent_json(parent, access, balance) for parent, balance in zip(parents, above, strict=True)],
        **session_tools_json(shown_view, records),
        **placed_json(state, agents),
        "agents": await agents_json(store, shown_view, records, policy, is_child=bool(parents)),
    }


async def _charged(
    store: Calls, key: SessionKey, balance: Balance, view: SessionView, records: Sequence[CallRecord]
) -> Sequence[CallRecord]:
    """Return the newest calls that were charged to a session, also those of its children.

    `records`: the newest ones of its own.
    """
    if balance.limits.is_none or balance.used.calls <= view.totals.calls:
        return records
    return await store.newest_calls(key.namespace, NEWEST_CALLS)


async def changed_json(
    store: Store, key: SessionKey, access: Access, policy: BudgetPolicy, agents: Mapping[str, Agent]
) -> dict[str, Any]:
    """Return a session after a change. For a session without calls, return only id, budget and steps."""
    (balance,) = await balances_of(store, [key], policy)
    view, remembered = await store.session(key), await store.remembered(key)
    placed = placed_json(remembered.state, agents)
    if view is not None:
        return {**session_json(view, access, balance, has_modes=policy.modes), **placed}
    return {"id": key.shown(access.namespace), **session_budget_json(balance, has_modes=policy.modes), **placed}


def deleted_json(key: SessionKey, access: Access) -> dict[str, Any]:
    """Return the response to the deletion of a session."""
    return {"id": key.shown(access.namespace), "deleted": True}


def placed_json(state: SessionState, agents: Mapping[str, Agent]) -> dict[str, Any]:
    """Return the step state of each agent of a session, and the limit for which its calls were refused last."""
    stopped = state.stopped
    return {**steps_json(state, agents), "last_stop": stopped.stopped if stopped is not None else None}


async def rows_of(
    store: Ledger, views: Sequence[SessionView], policy: BudgetPolicy, access: Access, unread: UnreadSessions
) -> list[dict[str, Any]]:
    """Return sessions as rows of a list, without sessions whose accounts cannot be read."""
    try:
        balances = await balances_of(store, [view.key for view in views], policy)
    except errors.StoreDamaged:
        rows = []
        for view in views:
            with unread.skip_damaged(f"{view.key.namespace}/{view.key.id}"):
                (balance,) = await balances_of(store, [view.key], policy)
                rows.append(session_json(view, access, balance, has_modes=policy.modes))
        return rows
    return [
        session_json(view, access, balance, has_modes=policy.modes)
        for view, balance in zip(views, balances, strict=True)
    ]


async def balances_of(store: Ledger, sessions: Sequence[SessionKey], policy: BudgetPolicy) -> tuple[Balance, ...]:
    """Return the balances of sessions, with limits from the configuration or set for a single session."""
    return await store.balances([claim_of_session(policy, key) for key in sessions])


def parse_limits(asked: Any) -> Mapping[Dimension, int | None] | None:
    """Return the limits to set for one session, or None for `"default"`: the configured limits.

    A limit is a number, or null for no limit.

    Raises:
        InvalidRequest: the limits are invalid.
    """
    if asked == "default":
        return None
    if not isinstance(asked, dict) or not asked or set(asked) - set(_DIMENSIONS):
        raise errors.InvalidRequest(
            '"budget" is "default", or an object with tokens, usd or calls: numbers, or null for no limit.',
            param="budget",
        )
    return {_DIMENSIONS[name]: _parsed_limit(name, value) for name, value in asked.items()}


def _parsed_limit(name: str, value: Any) -> int | None:
    if value is None:
        return None
    is_number = isinstance(value, int | float | str) and not isinstance(value, bool)
    try:
        number = Decimal(str(value)) if is_number else Decimal(-1)
    except InvalidOperation:
        number = Decimal(-1)
    most = _LARGEST_LIMITS[_DIMENSIONS[name]]
    is_counted = number.is_finite() and (number.is_zero() or LEAST_USD <= number <= most)
    if not is_counted or (name != "usd" and number != number.to_integral_value()):
        what = f"0 or a number from {LEAST_USD:f}" if name == "usd" else "a whole number from 0"
        raise errors.InvalidRequest(
            f'"budget.{name}" must be {what} to {most:,}; null removes the limit.',
            param=f"budget.{name}",
        )
    return nano(number) if name == "usd" else int(number)


def sort_of(text: str | None) -> Sort:
    """Return the requested order of a list of sessions.

    Raises:
        InvalidRequest: the order is unknown.
    """
    for sort in SORTS:
        if text in (sort, None):
            return sort
    raise errors.InvalidRequest(f'"sort" must be one of {", ".join(SORTS)}.', param="sort")


def _key(request: Request, access: Access) -> SessionKey:
    text = request.path_params["id"]
    key = SessionKey.parse(text, access.namespace)
    if key is None:
        raise errors.NotFound(f'There is no session "{text[:100]}".')
    return key


def _no_session(key: SessionKey) -> errors.NotFound:
    return errors.NotFound(
        f'There is no session "{key.id}". Its first call may still be running, or it has expired (sessions.ttl).'
    )
