"""/api/count, /api/trim and /api/context: count or trim a body without sending it.

The body is not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.routing import Route as Path

from gateway.budget.reservation import sessions_above
from gateway.call.routing import session_id_in_body
from gateway.call.types import PlanRequest
from gateway.context.inspector import SHOWN, WIRES
from gateway.core import errors
from gateway.core.context_budget import ContextOptions
from gateway.core.http.headers import by_name
from gateway.core.identity import ID_FORM, from_headers
from gateway.core.ledger.arithmetic import Balance, Claim
from gateway.core.ledger.charging import ChargedAccounts, KeyLimits, claims_of, rate_of
from gateway.core.ledger.output_limit import affordable_input
from gateway.core.ledger.session_key import OPEN_NAMESPACE, SessionKey
from gateway.core.ports import Store
from gateway.core.record import response_digest
from gateway.core.session import Remembered
from gateway.core.steps import Step
from gateway.core.views import VIEWED
from gateway.dialects.base import Call
from gateway.dialects.server_state import previous_response_id
from gateway.server import headers as ours
from gateway.server.auth import Access
from gateway.server.body import BodyMemory, Disconnected, MemoryPool, read_body
from gateway.server.handling import ServerRules, json_handler
from gateway.server.steps import step_of

#: number of bodies of the largest size that may be in memory at the same time
_BODIES_AT_ONCE: Final = 4


class ContextApi:
    """The handlers that count or trim a body. `rules` returns the rules in force."""

    def __init__(self, store: Store, rules: Callable[[], ServerRules]) -> None:
        self._store = store
        self._rules = rules
        self._pool = MemoryPool(_BODIES_AT_ONCE * rules().max_body)

    def paths(self) -> list[Path]:
        """Return the routes."""
        return [
            Path("/api/count", json_handler(self._rules, self.count), methods=["POST"]),
            Path("/api/context", json_handler(self._rules, self.context), methods=["POST"]),
            Path("/api/trim", json_handler(self._rules, self.trim), methods=["POST"]),
        ]

    async def count(self, request: Request, access: Access) -> Any:
        """POST /api/count?budget=&items=1&tools=1&wire=&session=: return the token counts of a body."""
        memory = BodyMemory(self._pool)
        try:
            _, asked, remembered = await self._read(request, access, memory)
            return await self._rules().inspector.count(asked, remembered, _requested_details(request))
        finally:
            memory.release()

    async def context(self, request: Request, access: Access) -> Any:
        """POST /api/context?budget=&items=1&tools=1&wire=&session=: return the numbers that agents pass to tools."""
        memory = BodyMemory(self._pool)
        try:
            _, asked, remembered = await self._read(request, access, memory)
            return await self._rules().inspector.context(asked, remembered, _requested_details(request))
        finally:
            memory.release()

    async def trim(self, request: Request, access: Access) -> Any:
        """POST /api/trim?budget=&explain=1&wire=&session=: return the trimmed body, and what was done."""
        memory = BodyMemory(self._pool)
        try:
            call, asked, remembered = await self._read(request, access, memory)
            inspector = self._rules().inspector
            body, plan = await inspector.trim(call, asked, remembered)
            explain = request.query_params.get("explain") in ("1", "true")
            return {"body": msgspec.Raw(body), "context": await inspector.trim_json(asked, plan, explain=explain)}
        finally:
            memory.release()

    async def _read(self, request: Request, access: Access, memory: BodyMemory) -> tuple[Call, PlanRequest, Remembered]:
        rules, headers = self._rules(), request.scope["headers"]
        self._pool.limit = _BODIES_AT_ONCE * rules.max_body
        wire = request.query_params.get("wire")
        if wire is not None and wire not in WIRES:
            raise errors.InvalidRequest(f'"wire" must be one of {", ".join(WIRES)}.', param="wire")
        try:
            body, _ = await read_body(request.receive, headers, rules.max_body, rules.body_timeout_s, memory)
        except Disconnected:
            raise errors.InvalidRequest("The connection was closed before the end of the request body.") from None
        directives = ours.directives(headers)
        options = _with_lower_budget(directives.context, _budget_of_query(request))
        call, asked = await rules.inspector.read_async(body, wire=wire, options=options)
        earlier = previous_response_id(call.fields) if asked.contents.wire == "responses" else None
        key = await self._session(request, access, call, earlier)
        charged = ChargedAccounts(
            access.namespace or "", KeyLimits(access.limits, shared=access.shared), key, declared=directives.budget
        )
        if key is None:
            return call, self._affordable(asked, *await self._read_accounts(charged), None), Remembered()
        named = (SessionKey(key.namespace, directives.parent),) if directives.parent is not None else ()
        claims = claims_of(rules.budget, replace(charged, parents=named))
        opening = await self._store.open_call(key, _without_declared(claims), with_totals=False, above=named)
        state, balances = opening.remembered.state, opening.balances
        read = dict(zip(named, opening.parents, strict=True))
        above, _ = await sessions_above(self._store, key, state.parent or directives.parent, read)
        if above != named:
            claims, balances = await self._read_accounts(replace(charged, parents=above))
        step = None
        if asked.contents.wire in VIEWED:
            step = step_of(state, rules.agents, asked.route, directives.agent)
        return call, self._affordable(asked, claims, balances, step), opening.remembered

    async def _read_accounts(self, charged: ChargedAccounts) -> tuple[tuple[Claim, ...], tuple[Balance, ...]]:
        claims = claims_of(self._rules().budget, charged)
        return claims, await self._store.balances(_without_declared(claims))

    async def _session(self, request: Request, access: Access, call: Call, earlier: str | None) -> SessionKey | None:
        """Return the session of the request, whose state and budgets apply, or None.

        The first of these names the session:

        1. the parameter `session` of the query
        2. a header or the body, like in a call
        3. the session of the `earlier` response that the request continues

        No id is derived from the conversation.

        Raises:
            InvalidRequest: the id in the query is not valid.
        """
        asked = request.query_params.get("session")
        if asked:
            key = SessionKey.parse(asked, access.namespace)
            if key is None:
                raise errors.InvalidRequest(
                    f'"session" must be a session id, not "{asked[:100]}". An id is {ID_FORM}.', param="session"
                )
            return key
        headers = by_name(request.scope["headers"])
        name = from_headers(headers, self._rules().id_headers) or session_id_in_body(call)
        namespace = access.namespace or OPEN_NAMESPACE
        if name is not None:
            return SessionKey(namespace, name)
        before = (
            await self._store.call_of_response(namespace, response_digest(earlier)) if earlier is not None else None
        )
        return before.session if before is not None else None

    @staticmethod
    def _affordable(
        asked: PlanRequest, claims: Sequence[Claim], stored: Sequence[Balance], step: Step | None
    ) -> PlanRequest:
        """Return the request with a context budget lowered to what the charged accounts and the step allow."""
        balances = [balance.lowered(claim.declared) for balance, claim in zip(stored, claims, strict=True)]
        left = affordable_input(balances, asked.options.output, rate_of(asked.facts.price, 0, None))
        most = step.context_budget if step is not None else None
        return replace(asked, options=_with_lower_budget(asked.options, left, most))


def _without_declared(claims: Sequence[Claim]) -> list[Claim]:
    return [claim.undeclared for claim in claims]


def _budget_of_query(request: Request) -> int | None:
    """Return the context budget of the query, or None.

    Raises:
        InvalidRequest: the value is not a whole number from 1.
    """
    text = request.query_params.get("budget")
    if text is None:
        return None
    return ours.context_budget(text.encode(), '"budget"', "budget")


def _with_lower_budget(options: ContextOptions, *budgets: int | None) -> ContextOptions:
    """Return the options with the lowest of these context budgets and their own."""
    budget = min((known for known in (options.budget, *budgets) if known is not None), default=None)
    return replace(options, budget=budget)


def _requested_details(request: Request) -> list[str]:
    """Return the names of the details that the query requests."""
    return [name for name in SHOWN if request.query_params.get(name) in ("1", "true")]
