"""/api: read, change and delete sessions, read call records, look up models. JSON; no prompt or answer text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from itertools import islice
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path

from gateway.catalog import Catalog
from gateway.core import errors
from gateway.core.counting.context import NO_WEIGHT
from gateway.core.identity import is_valid
from gateway.core.ledger import MOST, Claim, Dimension, Standing, nano
from gateway.core.modes import mode_for
from gateway.core.ports import OPEN_NAMESPACE, CallRecord, SessionKey, SessionView, Store
from gateway.core.routing import ModelFacts, Route, Routes
from gateway.core.spending import BudgetPolicy, remaining_fraction, usd
from gateway.core.steps import DEFAULT_AGENT, Agent
from gateway.core.usage import Totals, Usage
from gateway.dialects import openai_errors
from gateway.inspection import Inspector, context_json
from gateway.server import headers as ours
from gateway.server.auth import Access, Authenticator
from gateway.server.finding import Wanted, find_sessions, newest_calls, sort_of
from gateway.server.keyring import KeyRing
from gateway.server.steps import set_step, steps_json

Handler = Callable[[Request], Awaitable[Response]]

_MAX_LIMIT: Final = 1000
_MAX_CHANGE: Final = 64 * 1024
#: what the ledger counts exactly, as in the configuration
_MOST_LIMITS: Final[Mapping[Dimension, int]] = {"tokens": MOST, "nano_usd": 9_000_000, "calls": MOST}
_DIMENSIONS: Final[Mapping[str, Dimension]] = {"tokens": "tokens", "usd": "nano_usd", "calls": "calls"}
_MAX_LIMIT_DIGITS: Final = 20
#: what a PATCH of a session may hold
_CHANGES: Final = frozenset({"budget", "active_step", "agent"})
#: tools that are listed in their order, and calls among which the last one that was weighed is looked for
_RECENT_TOOLS: Final = 20
_LAST_CALLS: Final = 20
_CALL_ID: Final = re.compile(r"[0-9a-f]{12,64}")
_NO_STORE: Final = {"cache-control": "no-store"}


@dataclass(frozen=True, slots=True)
class Rules:
    """What a reload replaces."""

    authenticator: Authenticator
    keys: KeyRing
    routes: Routes
    catalog: Catalog
    inspector: Inspector
    budget: BudgetPolicy
    max_body: int
    body_timeout_s: float
    agents: Mapping[str, Agent] = field(default_factory=dict)


class SessionsApi:
    """The handlers. `rules` gives those in force; `reload` re-reads the configuration or raises ConfigError."""

    def __init__(self, store: Store, rules: Callable[[], Rules], reload: Callable[[], None]) -> None:
        self._store = store
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
        wanted = Wanted(access.namespace, _limit(request), query.get("cursor"), sort, part)
        page = await find_sessions(self._store, wanted)
        stands = await standings_of(self._store, [view.key for view in page.sessions], self._rules().budget)
        rows = [session_json(view, access, one) for view, one in zip(page.sessions, stands, strict=True)]
        return {"sessions": rows, "cursor": page.cursor}

    async def session(self, request: Request, access: Access) -> Any:
        """GET, PATCH or DELETE /api/sessions/{id}."""
        key = _key(request, access)
        if request.method == "PATCH":
            return await self._change(key, await self._body(request), access)
        if request.method == "DELETE":
            _require_admin(access)
            if not await self._store.delete(key):
                raise _no_session(key)
            return {"id": shown_id(key, access), "deleted": True}
        view = await self._store.session(key)
        if view is None:
            raise _no_session(key)
        records = await self._store.calls(key, _LAST_CALLS)
        (stands,) = await standings_of(self._store, [key], self._rules().budget)
        return {**session_json(view, access, stands), **session_tools_json(view, records), **await self._placed(key)}

    async def _body(self, request: Request) -> Any:
        """The JSON of a small request."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > _MAX_CHANGE:
                raise errors.InvalidRequest(f"The body of this request has at most {_MAX_CHANGE:,} bytes.")
        try:
            return msgspec.json.decode(bytes(body))
        except (msgspec.DecodeError, RecursionError):
            raise errors.InvalidRequest('The body must be JSON, such as {"budget": {"tokens": 200000}}.') from None

    async def _change(self, key: SessionKey, asked: Any, access: Access) -> Any:
        """Raise, lower or lift the session's budget, or set its step; its next call goes by that."""
        _require_admin(access)
        if not isinstance(asked, dict) or not {"budget", "active_step"} & set(asked) or set(asked) - _CHANGES:
            raise errors.InvalidRequest(
                'What can be changed is "budget" and "active_step", as {"budget": {"tokens": 200000}} or '
                '{"active_step": "review", "agent": "writer"}; without "agent" it is the default one.'
            )
        limits = decided_limits(asked["budget"]) if "budget" in asked else None
        if "active_step" in asked:
            agents, agent = self._rules().agents, asked.get("agent", DEFAULT_AGENT)
            await set_step(self._store, key, agents, agent, asked["active_step"])
        if "budget" in asked:
            await self._store.decide(key.account, limits)
        (stands,) = await standings_of(self._store, [key], self._rules().budget)
        view, placed = await self._store.session(key), await self._placed(key)
        shown = session_json(view, access, stands) if view else {"id": shown_id(key, access), **budget_json(stands)}
        return {**shown, **placed}

    async def _placed(self, key: SessionKey) -> dict[str, Any]:
        remembered = await self._store.remembered(key)
        return steps_json(remembered.state, self._rules().agents)

    async def calls(self, request: Request, access: Access) -> Any:
        """GET /api/sessions/{id}/calls?limit=&cursor=."""
        key, limit = _key(request, access), _limit(request)
        cursor = request.query_params.get("cursor")
        if cursor is not None and not _CALL_ID.fullmatch(cursor):
            raise errors.InvalidRequest("The cursor is not one that this list returned.", param="cursor")
        records = await self._store.calls(key, limit, cursor)
        if not records and await self._store.session(key) is None:
            raise _no_session(key)
        more = records[-1].call_id if len(records) == limit else None
        return {"calls": [call_json(record, access) for record in records], "cursor": more}

    async def newest(self, request: Request, access: Access) -> Any:
        """GET /api/calls?limit=: the newest records of all sessions."""
        records = await newest_calls(self._store, access.namespace, _limit(request))
        return {"calls": [call_json(record, access) for record in records]}

    async def reset(self, request: Request, access: Access) -> Any:
        """POST /api/sessions/{id}/reset."""
        _require_admin(access)
        key = _key(request, access)
        if not await self._store.reset(key):
            raise _no_session(key)
        view = await self._store.session(key)
        (stands,) = await standings_of(self._store, [key], self._rules().budget)
        return session_json(view, access, stands) if view else {}

    async def call(self, request: Request, access: Access) -> Any:
        """GET /api/calls/{request_id}?explain=1: with what became of each message."""
        wanted = request.path_params["request_id"]
        record = await self._store.call(access.namespace, wanted)
        if record is None:
            raise errors.NotFound(f'There is no record of a call "{wanted[:100]}".')
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
        """GET /api/models?q=: what is known of the models whose name contains q."""
        del access
        wanted = request.query_params.get("q", "")
        rules = self._rules()
        rows = islice(models_json(rules.routes, rules.catalog, wanted), _limit(request))
        # The whole table is looked through: tens of milliseconds that the loop should not wait for.
        return {"models": await asyncio.to_thread(list, rows)}

    async def reload(self, request: Request, access: Access) -> Any:
        """POST /api/reload."""
        del request
        _require_admin(access)
        try:
            self._reload()
        except errors.ConfigError as error:
            raise errors.InvalidRequest("Nothing was changed: " + "; ".join(error.problems)) from None
        return {"reloaded": True}


def wrapped(rules: Callable[[], Rules], handler: Callable[[Request, Access], Awaitable[Any]]) -> Handler:
    """The handler behind the question who asks, its answer as JSON and its faults as errors."""

    async def handle(request: Request) -> Response:
        try:
            return _answer(await handler(request, await accessed(rules, request)))
        except errors.GatewayError as fault:
            return fault_response(fault)

    return handle


async def accessed(rules: Callable[[], Rules], request: Request) -> Access:
    """What whoever asks may see and do.

    Raises:
        Unauthenticated, Forbidden: nothing.
    """
    peer = request.client.host if request.client else None
    await rules().keys.ready()
    return rules().authenticator.api(request.scope["headers"], peer)


def fault_response(fault: errors.GatewayError) -> Response:
    """An error of ours on a path that no dialect speaks."""
    headers = {name.decode(): value.decode() for name, value in ours.of_fault(fault)}
    return Response(openai_errors.body(fault), fault.status, {**headers, **_NO_STORE}, "application/json")


async def standings_of(store: Store, sessions: Sequence[SessionKey], policy: BudgetPolicy) -> tuple[Standing, ...]:
    """How the budgets of sessions stand, as far as they are configured or were set for them."""
    return await store.standings([Claim(key.account, policy.session) for key in sessions])


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
    is_whole = number.is_finite() and number == number.to_integral_value()
    if not number.is_finite() or not 0 <= number <= most or (name != "usd" and not is_whole):
        raise errors.InvalidRequest(
            f'"budget.{name}" is a number from 0 to {most:,}, whole where it is no money, or null for no limit.',
            param=f"budget.{name}",
        )
    return nano(number) if name == "usd" else int(number)


def budget_json(stands: Standing) -> dict[str, Any]:
    """What a session may spend, and the mode its tool results are in for that; null where nothing is limited."""
    if stands.limits.is_none:
        return {"budget": None, "response_mode": "raw"}
    limits, used = stands.limits, stands.used
    return {
        "budget": {
            "tokens": limits.tokens,
            "usd": usd(limits.nano_usd) if limits.nano_usd is not None else None,
            "calls": limits.calls,
            "used": {"tokens": used.tokens, "usd": usd(used.nano_usd), "calls": used.calls},
            "held": stands.held.tokens,
            "remaining": stands.left("tokens"),
            "used_fraction": round(stands.used_fraction or 0.0, 4),
            "resets_in_s": round(stands.resets_s) if stands.resets_s is not None else None,
        },
        "response_mode": mode_for(remaining_fraction([stands])),
    }


def session_json(view: SessionView, access: Access, stands: Standing) -> dict[str, Any]:
    """A session as /api and the command line show it."""
    totals = view.totals
    return {
        "id": shown_id(view.key, access),
        "created_at": time_text(view.created_at),
        "last_call_at": time_text(view.last_call_at),
        "calls": totals.calls,
        "calls_under_way": stands.held.calls,
        "cumulative_token_usage": totals_json(totals),
        "usage_source": totals.source,
        "cost_usd": None if totals.unpriced_calls else f"{totals.cost_usd:.6f}",
        "saved_by_trimming": {"input_tokens": totals.saved_tokens, "calls": totals.trimmed_calls},
        "used_with_children": {"tokens": stands.used.tokens, "calls": stands.used.calls},
        **budget_json(stands),
        "derived_id": view.derived,
    }


def session_tools_json(view: SessionView, records: Sequence[CallRecord]) -> dict[str, Any]:
    """The tools that a session called, and what is in its context of their results. `records`: of its last calls."""
    calls, weighed = view.tools.calls, next((one.context for one in records if one.context is not None), None)
    weights = weighed.tool_weights if weighed is not None else {}
    names = sorted({*calls, *weights}, key=lambda name: (-calls.get(name, 0), name))
    found = {}
    for name in names:
        weight = weights.get(name, NO_WEIGHT)
        found[name] = {"calls": calls.get(name, 0), "result_tokens": weight.tokens, "results": weight.results}
    return {"recent_tools": view.tools.recent[-_RECENT_TOOLS:], "tools": found}


def totals_json(totals: Totals) -> dict[str, int]:
    """The sums of a session."""
    return {
        "input_tokens": totals.input_tokens,
        "output_tokens": totals.output_tokens,
        "total_tokens": totals.total_tokens,
        "cache_read_tokens": totals.cache_read_tokens,
        "cache_write_tokens": totals.cache_write_tokens,
        "reasoning_tokens": totals.reasoning_tokens,
        "estimated_tokens": totals.estimated_tokens,
    }


def call_json(record: CallRecord, access: Access) -> dict[str, Any]:
    """A call record as /api shows it."""
    charge = record.charge
    cost = charge.cost_usd if charge else None
    return {
        "request_id": record.request_id,
        "call_id": record.call_id,
        "session": shown_id(record.session, access) if record.session else None,
        "started_at": time_text(record.started_at),
        "dialect": record.dialect,
        "operation": record.operation,
        "provider": record.provider,
        "model": record.model,
        "response_model": record.response_model,
        "stream": record.stream,
        "status": record.status,
        "outcome": record.outcome,
        "error_code": record.error_code,
        "finish_reason": record.finish_reason,
        "tools": record.tools,
        "response_mode": record.mode,
        "active_step": record.step,
        "usage": _usage_json(charge.usage) if charge else None,
        "usage_source": charge.source if charge else None,
        "cost_usd": f"{cost:.6f}" if cost is not None else None,
        "overhead_ms": round(record.overhead_s * 1000, 3),
        "first_byte_ms": round(record.first_byte_s * 1000, 3) if record.first_byte_s is not None else None,
        "duration_ms": round(record.duration_s * 1000, 3),
        "request_bytes": record.request_bytes,
        "response_bytes": record.response_bytes,
        "notes": record.notes,
        "context": context_json(record.context, explain=False) if record.context is not None else None,
    }


def _usage_json(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "cache_read_tokens": usage.cache_read_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
    }


def models_json(routes: Routes, catalog: Catalog, wanted: str) -> Iterator[dict[str, Any]]:
    """The models of the configured providers whose name contains `wanted`, under the name a client asks for."""
    own = dict.fromkeys(routes.names())
    for name in own:
        if wanted in name:
            route = routes.resolve(name)
            yield model_json(name, route, catalog.facts(route))
    for provider, model in catalog.offered(routes.providers, wanted):
        name = model if routes.leads_to(model, provider) else f"{provider}/{model}"
        if name in own:
            continue
        route = routes.resolve(name)
        yield model_json(name, route, catalog.facts(route))


def model_json(name: str, route: Route, facts: ModelFacts) -> dict[str, Any]:
    """A model as /api/models and `gateway models` show it. Prices in USD per million tokens."""
    price: Mapping[str, Any] | None = None
    if facts.price is not None:
        rates = facts.price.rates
        price = {
            part: f"{(value * 1_000_000).normalize():f}" if value is not None else None
            for part, value in (
                ("input", rates.input),
                ("output", rates.output),
                ("cache_read", rates.cache_read),
                ("cache_write", rates.cache_write),
                ("cache_write_1h", rates.cache_write_1h),
            )
        }
    return {
        "model": name,
        "provider": route.provider,
        "name": route.model,
        "window": facts.window,
        "output": facts.output,
        "tokenizer": facts.tokenizer,
        "price": price,
        "reasoning": facts.reasoning,
        "sources": facts.sources or {},
    }


def session_key(text: str, namespace: str | None) -> SessionKey | None:
    """`id`, or `key name/id` for someone who sees all; None where it is neither."""
    own, slash, rest = text.partition("/")
    if slash and namespace is None:
        return SessionKey(own, rest) if is_valid(own) and is_valid(rest) else None
    return SessionKey(namespace or OPEN_NAMESPACE, text) if is_valid(text) else None


def _key(request: Request, access: Access) -> SessionKey:
    text = request.path_params["id"]
    key = session_key(text, access.namespace)
    if key is None:
        raise errors.NotFound(f'There is no session "{text[:100]}".')
    return key


def shown_id(key: SessionKey, access: Access) -> str:
    """A session's name for whoever asks: those who see all see whose it is."""
    bare = access.namespace is not None or key.namespace == OPEN_NAMESPACE
    return key.id if bare else f"{key.namespace}/{key.id}"


def _no_session(key: SessionKey) -> errors.NotFound:
    return errors.NotFound(f'There is no session "{key.id}". It may never have called, or has expired (sessions.ttl).')


def _require_admin(access: Access) -> None:
    if not access.admin:
        raise errors.Forbidden(
            "This needs the admin key (auth.admin_key), or a call from this machine where none is set."
        )


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", "50")
    # `int` refuses thousands of digits with an error of its own.
    if not text.isdecimal() or len(text) > _MAX_LIMIT_DIGITS or not 1 <= int(text) <= _MAX_LIMIT:
        raise errors.InvalidRequest(f'"limit" is a whole number from 1 to {_MAX_LIMIT}.', param="limit")
    return int(text)


def time_text(seconds: float) -> str:
    """Seconds since the epoch as /api writes them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(text: str) -> Response:
    """What a tool said, for whoever asks; a browser must not take it for a page."""
    headers = {**_NO_STORE, "x-content-type-options": "nosniff", "content-security-policy": "sandbox"}
    return Response(text.encode("utf-8", "replace"), media_type="text/plain; charset=utf-8", headers=headers)


def _answer(found: Any) -> Response:
    if isinstance(found, Response):
        return found
    return _text(found) if isinstance(found, str) else _json(found)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers=_NO_STORE)
