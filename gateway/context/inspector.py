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
from gateway.core.context_budget import ContextOptions, budget_of, within
from gateway.core.counting.context import ToolWeights
from gateway.core.counting.measure import Wire
from gateway.core.counting.request import ITEMS, wire_of
from gateway.core.errors import InvalidRequest
from gateway.core.fitting.report import Fate
from gateway.core.plan import Plan
from gateway.core.record import ContextRecord, ThinkingRecord
from gateway.core.routing import ModelFacts, Route, Routes
from gateway.core.session import Remembered
from gateway.core.views import VIEWED
from gateway.dialects.base import Call
from gateway.dialects.contents import contents_of
from gateway.dialects.fields import Fields, decode, join, read_fields, write_fields
from gateway.dialects.limits import output_limit

#: details of a request that are shown only where they are asked for
SHOWN: Final = ("items", "tools")
#: bytes that are read in the loop; more of them would keep all calls waiting
_INLINE_BYTES: Final = 64 * 1024
_EMBEDDINGS: Final = "embeddings"
#: the formats that a body may have, and which each is read as: texts to embed are weighed as bare prompts are
WIRES: Final[Mapping[str, Wire]] = {**{wire: wire for wire in get_args(Wire)}, _EMBEDDINGS: "completions"}
#: what the names of most models hold that take nothing but texts to embed
_EMBEDS: Final = "embed"


class Inspector:
    """Reads bodies of any format, without the path that would tell which it is."""

    def __init__(self, planner: Planner, routes: Routes, facts: Callable[[Route], ModelFacts]) -> None:
        self._planner = planner
        self._routes = routes
        self._facts = facts

    def read(
        self, body: bytes, *, model: str | None = None, wire: str | None = None, options: ContextOptions | None = None
    ) -> tuple[Call, PlanRequest]:
        """The request in a body. `model`: asked for instead of the one it names; `wire`: its format, else guessed.

        Raises:
            InvalidRequest: it is no request that could be weighed.
            UnknownModel: nobody serves its model.
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
                'The body holds no "messages", "input" or "prompt" that could be weighed.', param="messages"
            )
        route = self._routes.resolve(name)
        wanted = replace(options or ContextOptions(), output=output_limit(contents.fields, contents.wire))
        return call, PlanRequest(contents, route, self._facts(route), wanted, len(body), format_name=form)

    async def read_apart(
        self, body: bytes, *, wire: str | None = None, options: ContextOptions | None = None
    ) -> tuple[Call, PlanRequest]:
        """The same as `read`, where others wait for the loop: a large body is read in a thread."""
        work = partial(self.read, body, wire=wire, options=options)
        return await asyncio.to_thread(work) if len(body) > _INLINE_BYTES else work()

    async def count(self, asked: PlanRequest, remembered: Remembered, show: Collection[str] = ()) -> dict[str, Any]:
        """What a request weighs, as `gateway count` and /api/count show it.

        `show`: `items` for each message's tokens, `tools` for those of each tool's results.
        """
        original, learned, *_ = await self._planner.count_tokens(asked, remembered)
        parts = original.estimate.context
        found: dict[str, Any] = {
            "model": original.request.model,
            "provider": original.request.provider,
            "wire": asked.format_name or original.request.wire,
            "tokens": original.tokens,
            "margin": original.margin(self._planner.policy.safety),
            "kept_tokens": original.kept,
            "source": original.expected.source,
            "counter": original.estimate.counter,
            "family": original.estimate.family,
            "conversation_tokens": parts.conversation_tokens,
            "tool_tokens": parts.tool_tokens,
            "tool_results": parts.results,
            "definition_tokens": parts.definition_tokens,
            # Texts to embed have no context budget: each has the model's window to itself.
            "budget": None
            if asked.format_name == _EMBEDDINGS
            else budget_of(self._planner.policy, within(asked.facts, asked.options, learned.limit), asked.options),
        }
        if "items" in show:
            found["items"] = await self._items(asked)
        if "tools" in show:
            found["tools"] = tools_json(parts.tools)
        return found

    async def _items(self, asked: PlanRequest) -> list[dict[str, Any]]:
        tokens = await self._planner.message_tokens(asked)
        messages = asked.contents.messages or ()
        is_long = sum(map(len, messages)) > _INLINE_BYTES
        found = await asyncio.to_thread(_roles, messages) if is_long else _roles(messages)
        roles = found or ["input"] * len(tokens)
        return [
            {"index": index, "role": role, "tokens": number}
            for index, (role, number) in enumerate(zip(roles, tokens, strict=True))
        ]

    async def context(self, asked: PlanRequest, remembered: Remembered, show: Collection[str] = ()) -> dict[str, Any]:
        """The numbers an agent hands on to its tools. `show`: see `count`."""
        found = await self.count(asked, remembered, show)
        budget = found["budget"]
        return {
            "conversation_tokens": found["conversation_tokens"],
            "accumulated_tool_tokens": found["tool_tokens"],
            "budget": budget,
            "remaining": None if budget is None else max(0, budget - found["tokens"] - found["margin"]),
            **{name: found[name] for name in SHOWN if name in show},
        }

    async def trim(self, call: Call, asked: PlanRequest, remembered: Remembered) -> tuple[bytes, Plan]:
        """The body as it would be forwarded with its tool results as they came, and why.

        No result is shown in a response mode: what that leaves out would have to be kept. Nor is a model ever called
        for this. Where one would be asked for a summary first, the body is as it would be if that failed, and the plan
        says what it needs.

        Raises:
            ContextOverflow: it cannot be made to fit.
            InvalidRequest: requests of its format are not fitted.
        """
        if asked.format_name == _EMBEDDINGS:
            raise InvalidRequest("A request for embeddings has no messages to choose among, and is sent as it is.")
        if asked.contents.wire not in VIEWED:
            raise InvalidRequest(
                f"A {asked.contents.wire} request has no messages to choose among. It is sent as it is where it fits; "
                "over its budget it is refused (400 context_length_exceeded), but with context.on_overflow: least or "
                "forward sent all the same."
            )
        plan = await self._planner.plan(asked, remembered, use="ask")
        if plan.needs is not None:
            plan = replace(await self._planner.plan(asked, remembered), needs=plan.needs)
        if plan.overflow is not None:
            raise plan.overflow
        messages = plan.messages if plan.messages is not None or not asked.contents.marked else asked.contents.messages
        if messages is None:
            return call.body, plan
        return write_fields(call.fields, {ITEMS[asked.contents.wire]: join(messages)}), plan

    async def told(self, asked: PlanRequest, plan: Plan, *, explain: bool) -> dict[str, Any]:
        """What would be decided about a call, as `gateway trim` and /api/trim show it.

        `explain`: what would become of each message, too. `note`: it would be decided otherwise, with a summary.
        """
        found = context_json(plan.context, explain=explain)
        if explain and not plan.context.message_fates:
            found["items"] = [
                {**item, "sent_tokens": item["tokens"], "rule": "kept"} for item in await self._items(asked)
            ]
        if plan.needs is not None:
            found["note"] = (
                f"{plan.needs.model} would first be asked to summarize {plan.needs.count} messages; "
                "this is what would be sent without that summary"
            )
        return found


def context_json(context: ContextRecord, *, explain: bool) -> dict[str, Any]:
    """What was decided about one call, as /api and the command line show it. `explain`: each message's fate too."""
    found: dict[str, Any] = {
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
        found["items"] = [fate_json(index, fate) for index, fate in enumerate(context.message_fates)]
    return found


def thinking_json(thinking: ThinkingRecord) -> dict[str, Any]:
    """Return what became of a call's thinking blocks."""
    return {"received": thinking.received, "sent": thinking.sent, "reason": thinking.reason or None}


def tools_json(weights: ToolWeights) -> dict[str, dict[str, int]]:
    """The results of each tool, the heaviest first."""
    heaviest = sorted(weights.items(), key=lambda item: -item[1].tokens)
    return {name: {"results": weight.results, "result_tokens": weight.tokens} for name, weight in heaviest}


def fate_json(index: int, fate: Fate) -> dict[str, Any]:
    """One message's fate."""
    return {
        "index": index,
        "role": fate.role,
        "tokens": fate.tokens_before,
        "sent_tokens": fate.tokens_after,
        "rule": fate.rule,
    }


def _format(fields: Fields, model: str) -> str:
    """The name of the format; only what tells formats apart is decoded."""
    if _EMBEDS in model.lower() and "input" in fields and "messages" not in fields:
        return _EMBEDDINGS
    told = {name: decode(fields[name]) if name in ("model", "tools") else None for name in fields}
    return wire_of(told)


def _as_prompt(call: Call) -> Call:
    """A call for embeddings as one that completes its texts."""
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
