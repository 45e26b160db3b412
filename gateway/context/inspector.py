"""Count or trim a request without sending it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, get_args

from gateway.call.types import PlanRequest
from gateway.context.planner import Planner
from gateway.core.context_budget import ContextOptions, budget_of, with_call_limits
from gateway.core.counting.context import TokensByTool
from gateway.core.counting.measure import Wire
from gateway.core.counting.request import ITEMS, wire_of
from gateway.core.errors import InvalidRequest
from gateway.core.plan import Plan
from gateway.core.record import ContextRecord, ThinkingRecord
from gateway.core.routing import ModelFacts, Route, Routes
from gateway.core.session import Remembered
from gateway.core.trimming.report import MessageOutcome
from gateway.core.views import VIEWED
from gateway.dialects.base import Call
from gateway.dialects.contents import contents_of
from gateway.dialects.fields import Fields, decode, join, read_fields, write_fields
from gateway.dialects.limits import output_limit

#: details of a request that are shown only on demand
SHOWN: Final = ("items", "tools")
#: Bytes that are read in the event loop. Reading more would block all calls.
_INLINE_BYTES: Final = 64 * 1024
_EMBEDDINGS: Final = "embeddings"
#: the formats that a body may have, and the format that each is read as: texts to embed are counted like bare prompts
WIRES: Final[Mapping[str, Wire]] = {**{wire: wire for wire in get_args(Wire)}, _EMBEDDINGS: "completions"}
#: part of the names of most embedding models
_EMBEDS: Final = "embed"


class Inspector:
    """Reads bodies of any format, which is guessed because there is no path that names it."""

    def __init__(self, planner: Planner, routes: Routes, facts: Callable[[Route], ModelFacts]) -> None:
        self._planner = planner
        self._routes = routes
        self._facts = facts

    def read(
        self, body: bytes, *, model: str | None = None, wire: str | None = None, options: ContextOptions | None = None
    ) -> tuple[Call, PlanRequest]:
        """Return the call and the request in a body.

        Args:
            body: the body, JSON.
            model: the model to count for; None for the one that the body names.
            wire: the format of the body; None to guess it.
            options: the limits of the call; None for none.

        Raises:
            InvalidRequest: the body has no messages or texts that can be counted.
            UnknownModel: no provider has the model.
        """
        fields = read_fields(body)
        named = decode(fields["model"]) if "model" in fields else None
        name = model or (named if isinstance(named, str) else None)
        if not name:
            raise InvalidRequest('The field "model" is missing. Name the model to count for.', param="model")
        call = Call("chat", name, stream=False, body=body, fields=fields)
        form = wire or _format(fields, name)
        contents = contents_of(_as_prompt(call) if form == _EMBEDDINGS else call, WIRES[form])
        if contents is None:
            raise InvalidRequest(
                'The body has no "messages", "input" or "prompt" that can be counted.', param="messages"
            )
        route = self._routes.resolve(name)
        wanted = replace(options or ContextOptions(), output=output_limit(contents.fields, contents.wire))
        return call, PlanRequest(contents, route, self._facts(route), wanted, len(body), format_name=form)

    async def read_async(
        self, body: bytes, *, wire: str | None = None, options: ContextOptions | None = None
    ) -> tuple[Call, PlanRequest]:
        """Return what `read` returns. A large body is read in a thread, so that the event loop is not blocked."""
        work = partial(self.read, body, wire=wire, options=options)
        return await asyncio.to_thread(work) if len(body) > _INLINE_BYTES else work()

    async def count(self, request: PlanRequest, remembered: Remembered, show: Collection[str] = ()) -> dict[str, Any]:
        """Return the token counts of a request, as `gateway count` and /api/count show them.

        `show`: `items` for the tokens of each message, `tools` for those of each tool's results.
        """
        original, learned, *_ = await self._planner.count_tokens(request, remembered)
        parts = original.estimate.context
        shown: dict[str, Any] = {
            "model": original.request.model,
            "provider": original.request.provider,
            "wire": request.format_name or original.request.wire,
            "tokens": original.tokens,
            "margin": original.margin(self._planner.policy.safety),
            "kept_tokens": original.stored_tokens,
            "source": original.expected.source,
            "counter": original.estimate.counter,
            "family": original.estimate.family,
            "conversation_tokens": parts.conversation_tokens,
            "tool_tokens": parts.tool_tokens,
            "tool_results": parts.results,
            "definition_tokens": parts.definition_tokens,
            # Texts to embed have no context budget, because each one may fill the model's window.
            "budget": None
            if request.format_name == _EMBEDDINGS
            else budget_of(
                self._planner.policy, with_call_limits(request.facts, request.options, learned.limit), request.options
            ),
        }
        if "items" in show:
            shown["items"] = await self._items(request)
        if "tools" in show:
            shown["tools"] = tools_json(parts.tools)
        return shown

    async def _items(self, request: PlanRequest) -> list[dict[str, Any]]:
        tokens = await self._planner.message_tokens(request)
        messages = request.contents.messages or ()
        is_long = sum(map(len, messages)) > _INLINE_BYTES
        known_roles = await asyncio.to_thread(_roles, messages) if is_long else _roles(messages)
        roles = known_roles or ["input"] * len(tokens)
        return [
            {"index": index, "role": role, "tokens": number}
            for index, (role, number) in enumerate(zip(roles, tokens, strict=True))
        ]

    async def context(self, request: PlanRequest, remembered: Remembered, show: Collection[str] = ()) -> dict[str, Any]:
        """Return the numbers that an agent passes to its tools. `show`: see `count`."""
        shown = await self.count(request, remembered, show)
        budget = shown["budget"]
        return {
            "conversation_tokens": shown["conversation_tokens"],
            "accumulated_tool_tokens": shown["tool_tokens"],
            "budget": budget,
            "remaining": None if budget is None else max(0, budget - shown["tokens"] - shown["margin"]),
            **{name: shown[name] for name in SHOWN if name in show},
        }

    async def trim(self, call: Call, request: PlanRequest, remembered: Remembered) -> tuple[bytes, Plan]:
        """Return the trimmed body and its plan, without sending anything.

        - Tool results stay unchanged: a response mode would have to store what it leaves out.
        - No model is called. If a summary would be requested first, the body is the one without that summary, and the
          plan says what it needs (`Plan.needs`).

        Raises:
            ContextOverflow: the messages that must stay exceed the budget.
            InvalidRequest: requests of this format are not trimmed.
        """
        if request.format_name == _EMBEDDINGS:
            raise InvalidRequest(
                "A request for embeddings is never trimmed: it has no messages, and is sent unchanged."
            )
        if request.contents.wire not in VIEWED:
            raise InvalidRequest(
                f"A {request.contents.wire} request is never trimmed: it has no messages. Over its budget it is "
                "refused (400 context_length_exceeded), or sent unchanged with context.on_overflow: least or forward."
            )
        plan = await self._planner.plan(request, remembered, use="ask")
        if plan.needs is not None:
            plan = replace(await self._planner.plan(request, remembered), needs=plan.needs)
        if plan.overflow is not None:
            raise plan.overflow
        messages = (
            plan.messages if plan.messages is not None or not request.contents.marked else request.contents.messages
        )
        if messages is None:
            return call.body, plan
        return write_fields(call.fields, {ITEMS[request.contents.wire]: join(messages)}), plan

    async def trim_json(self, request: PlanRequest, plan: Plan, *, explain: bool) -> dict[str, Any]:
        """Return the result of a trim, as `gateway trim` and /api/trim show it.

        `explain`: add what happens to each message. The field `note` says that a summary would be requested first.
        """
        shown = context_json(plan.context, explain=explain)
        if explain and not plan.context.message_fates:
            shown["items"] = [
                {**item, "sent_tokens": item["tokens"], "rule": "kept"} for item in await self._items(request)
            ]
        if plan.needs is not None:
            shown["note"] = (
                f"{plan.needs.model} would first be asked to summarize {plan.needs.count} messages; "
                "this is what would be sent without that summary"
            )
        return shown


def context_json(context: ContextRecord, *, explain: bool) -> dict[str, Any]:
    """Return the token counts of a call and what was trimmed, as /api and the command line show them.

    `explain`: add what happened to each message.
    """
    shown: dict[str, Any] = {
        "tokens": context.tokens,
        "original_tokens": context.original_tokens,
        "kept_tokens": context.kept,
        "source": context.source,
        "budget": context.budget,
        "remaining": context.remaining,
        "conversation_tokens": context.conversation_tokens,
        "tool_tokens": context.tool_tokens,
        "tools": tools_json(context.tool_weights),
        "trimmed": context.trimmed,
        "thinking": thinking_json(context.thinking) if context.thinking is not None else None,
        "shadow": context.shadow,
    }
    if explain:
        shown["items"] = [fate_json(index, fate) for index, fate in enumerate(context.message_fates)]
    return shown


def thinking_json(thinking: ThinkingRecord) -> dict[str, Any]:
    """Return how many thinking blocks a call received and sent, and why the others were removed."""
    return {"received": thinking.received, "sent": thinking.sent, "reason": thinking.reason or None}


def tools_json(tokens: TokensByTool) -> dict[str, dict[str, int]]:
    """Return the number and tokens of results by tool, most tokens first."""
    largest = sorted(tokens.items(), key=lambda item: -item[1].tokens)
    return {name: {"results": counts.results, "result_tokens": counts.tokens} for name, counts in largest}


def fate_json(index: int, fate: MessageOutcome) -> dict[str, Any]:
    """Return what happened to one message."""
    return {
        "index": index,
        "role": fate.role,
        "tokens": fate.tokens_before,
        "sent_tokens": fate.tokens_after,
        "rule": fate.rule,
    }


def _format(fields: Fields, model: str) -> str:
    """Return the name of the format of a body. Only the fields that distinguish formats are decoded."""
    if _EMBEDS in model.lower() and "input" in fields and "messages" not in fields:
        return _EMBEDDINGS
    decoded = {name: decode(fields[name]) if name in ("model", "tools") else None for name in fields}
    return wire_of(decoded)


def _as_prompt(call: Call) -> Call:
    """Return a call for embeddings as a call that completes its texts."""
    fields = {name: value for name, value in call.fields.items() if name not in ("input", "prompt")}
    return replace(call, fields={**fields, "prompt": call.fields["input"]} if "input" in call.fields else fields)


def _roles(messages: Sequence[bytes]) -> list[str]:
    return [_role(message) for message in messages]


def _role(message: bytes) -> str:
    try:
        value = json.loads(message)
    except (ValueError, RecursionError):
        return "unknown"
    role = value.get("role", value.get("type")) if isinstance(value, dict) else None
    return role if isinstance(role, str) else "unknown"
