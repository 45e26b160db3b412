"""Define the JSON of sessions, budgets, tools, calls and models for /api and the commands.

The JSON contains no text of prompts and responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gateway.config.model_catalog import Catalog, is_wanted
from gateway.context.inspector import context_json
from gateway.core.calling_agent import CallingAgent
from gateway.core.counting.context import NO_RESULTS
from gateway.core.ledger.arithmetic import Balance, Limits
from gateway.core.ledger.burn_rate import BurnRate
from gateway.core.ledger.charging import remaining_fraction
from gateway.core.ledger.refusals import usd
from gateway.core.ledger.session_key import SessionKey
from gateway.core.modes import mode_for
from gateway.core.record import CallError, CallRecord
from gateway.core.routing import ModelFacts, Route, Routes
from gateway.core.stored import SessionView
from gateway.core.times import time_text
from gateway.core.usage import Totals, Usage
from gateway.server.auth import Access

#: number of the last tool calls that are listed
_RECENT_TOOLS: Final = 20


def session_json(view: SessionView, access: Access, balance: Balance, *, has_modes: bool) -> dict[str, Any]:
    """Return a session as JSON for /api and the command line. `has_modes`: as for `session_budget_json`."""
    totals = view.totals
    return {
        "id": view.key.shown(access.namespace),
        "created_at": time_text(view.created_at),
        "last_call_at": time_text(view.last_call_at),
        "calls": totals.calls,
        "calls_under_way": balance.held.calls,
        "cumulative_token_usage": totals_json(totals),
        "usage_source": totals.source,
        "cost_usd": None if totals.unpriced_calls else f"{totals.cost_usd:.6f}",
        "saved_by_trimming": {"input_tokens": totals.saved_tokens, "calls": totals.trimmed_calls},
        "used_with_children": {"tokens": balance.used.tokens, "calls": balance.used.calls},
        **session_budget_json(balance, has_modes=has_modes),
        "derived_id": view.derived,
    }


def session_tools_json(view: SessionView, records: Sequence[CallRecord]) -> dict[str, Any]:
    """Return the tools that a session called, and the results in its context. `records`: records of its last calls."""
    calls = view.tools.calls
    context = next((record.context for record in records if record.context is not None), None)
    results = context.tool_weights if context is not None else {}
    tools = {}
    for name in sorted({*calls, *results}, key=lambda name: (-calls.get(name, 0), name)):
        result = results.get(name, NO_RESULTS)
        tools[name] = {"calls": calls.get(name, 0), "result_tokens": result.tokens, "results": result.results}
    return {"recent_tools": view.tools.recent[-_RECENT_TOOLS:], "tools": tools}


def session_budget_json(balance: Balance, *, has_modes: bool) -> dict[str, Any]:
    """Return the budget of a session, null if it has no limit, and the response mode that follows from the budget.

    `has_modes`: tool results get shorter as the budget runs out (`budget.modes`).
    """
    if balance.limits.is_none:
        return {"budget": None, "response_mode": "raw"}
    used = balance.used
    return {
        "budget": {
            **limits_json(balance.limits),
            "used": {"tokens": used.tokens, "usd": usd(used.nano_usd), "calls": used.calls},
            "held": balance.held.tokens,
            "remaining": balance.left("tokens"),
            "used_fraction": round(balance.used_fraction or 0.0, 4),
            "resets_in_s": round(balance.resets_s) if balance.resets_s is not None else None,
            "kept_for_closing": balance.kept("tokens") or None,
            "is_closed": bool(balance.closing),
        },
        "response_mode": mode_for(remaining_fraction([balance])) if has_modes else "raw",
    }


def burn_rate_json(rate: BurnRate | None) -> dict[str, Any] | None:
    """Return when a budget is empty at the rate of its newest calls, or None if that is unknown."""
    if rate is None:
        return None
    is_usd = rate.unit == "nano_usd"
    return {
        "unit": "usd" if is_usd else rate.unit,
        "per_minute": usd(round(rate.per_minute)) if is_usd else round(rate.per_minute, 1),
        "per_call": usd(round(rate.per_call)) if is_usd else round(rate.per_call, 1),
        "calls": rate.calls,
        "empty_in_s": round(rate.empty_in_s),
        "empty_in_calls": rate.empty_in_calls,
        "refills_first": rate.refills_first,
    }


def parent_json(key: SessionKey, access: Access, balance: Balance) -> dict[str, Any]:
    """Return a parent session with its budget."""
    return {"id": key.shown(access.namespace), "budget": session_budget_json(balance, has_modes=False)["budget"]}


def totals_json(totals: Totals) -> dict[str, int]:
    """Return the totals of a session as JSON."""
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
    """Return a call record as JSON."""
    charge = record.charge
    cost = charge.cost_usd if charge else None
    return {
        "request_id": record.request_id,
        "call_id": record.call_id,
        "session": record.session.shown(access.namespace) if record.session else None,
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
        "error": _error_json(record.error) if record.error is not None else None,
        "declared_budget": limits_json(record.declared) if record.declared is not None else None,
        "finish_reason": record.finish_reason,
        "tools": record.tools,
        "response_mode": record.mode,
        "active_step": record.step,
        **_agent_json(record.agent),
        "usage": _usage_json(charge.usage) if charge else None,
        "usage_source": charge.source if charge else None,
        "cost_usd": f"{cost:.6f}" if cost is not None else None,
        "overhead_ms": round(record.overhead_s * 1000, 3),
        "first_byte_ms": round(record.first_byte_s * 1000, 3) if record.first_byte_s is not None else None,
        "duration_ms": round(record.duration_s * 1000, 3),
        "request_bytes": record.request_bytes,
        "response_bytes": record.response_bytes,
        "notes": record.notes,
        "labels": record.labels,
        "unread_thinking": [
            {"blocks": item.blocks, "reason": item.reason, "provider": item.provider, "model": item.model}
            for item in record.unread_thinking
        ],
        "context": context_json(record.context, explain=False) if record.context is not None else None,
    }


def _agent_json(agent: CallingAgent | None) -> dict[str, str | None]:
    """Return the agent that made a call; null for what its client does not say."""
    return {
        "agent": agent.id if agent is not None else None,
        "agent_type": agent.type if agent is not None else None,
        "parent_agent": agent.parent if agent is not None else None,
        "request_class": agent.request_class if agent is not None else None,
    }


def _error_json(error: CallError) -> dict[str, Any]:
    """Return the gateway's own error as the client received it."""
    return {"message": error.message, "budget": error.budget}


def limits_json(limits: Limits) -> dict[str, Any]:
    """Return the limits of a budget as JSON; null for units without a limit."""
    return {
        "tokens": limits.tokens,
        "usd": usd(limits.nano_usd) if limits.nano_usd is not None else None,
        "calls": limits.calls,
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
    """Yield the models of the configured providers that match `wanted` (see `is_wanted`), with their request names."""
    own = dict.fromkeys(routes.names())
    for name in own:
        if is_wanted(name, wanted):
            route = routes.resolve(name)
            yield model_json(name, route, catalog.facts(route))
    for provider, model in catalog.offered(routes.providers, wanted):
        name = model if routes.leads_to(model, provider) else f"{provider}/{model}"
        if name in own:
            continue
        route = routes.resolve(name)
        if route.provider == provider:  # otherwise calls with this name go to another provider
            yield model_json(name, route, catalog.facts(route))


def model_json(name: str, route: Route, facts: ModelFacts) -> dict[str, Any]:
    """Return a model as JSON for /api/models and `gateway models`.

    Prices are in US dollars per million tokens, and per web search.
    """
    price: Mapping[str, Any] | None = None
    if facts.price is not None:
        rates = facts.price.rates
        search = facts.price.search
        price = {
            part: f"{(value * 1_000_000).normalize():f}" if value is not None else None
            for part, value in (
                ("input", rates.input),
                ("output", rates.output),
                ("cache_read", rates.cache_read),
                ("cache_write", rates.cache_write),
                ("cache_write_1h", rates.cache_write_1h),
            )
        } | {"search": f"{search.normalize():f}" if search is not None else None}
    return {
        "model": name,
        "provider": route.provider,
        "name": route.model,
        "window": facts.window,
        "input": facts.input,
        "output": facts.output,
        "tokenizer": facts.tokenizer,
        "price": price,
        "reasoning": facts.reasoning,
        "sources": facts.sources or {},
    }
