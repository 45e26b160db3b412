"""Convert chat requests to the other two APIs, trim them there, and convert them back: do all formats keep the same?

`python bench/fit.py SCORER.py DATA_DIR --wire responses|messages` scores `Wired`. All token counts are those of the
original chat request, so that only the selection can differ. The system prompt has its own field, as in these APIs.
Recorded conversations have no reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from gateway.core.context_budget import ContextPolicy
from gateway.core.conversation.message import SYSTEM_ROLES, encode, text_parts
from gateway.core.conversation.units import Conversation
from gateway.core.counting.context import ContextCounts
from gateway.core.counting.counted import LearnedCorrections, count_tokens
from gateway.core.counting.estimate import Estimate
from gateway.core.counting.measure import Wire
from gateway.core.counting.request import RequestParts
from gateway.core.plan import ChoiceBudget, TokenCounters, make_room
from gateway.core.session import SessionState
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.views import view_of

Json = dict[str, Any]

#: tokens of a request in addition to its messages and tools
REQUEST_TOKENS = 3


def elements_of(wire: Wire, messages: Sequence[Json]) -> list[Json]:
    """Return chat messages as elements of a body."""
    if wire == "responses":
        return [item for message in messages for item in _items(message)]
    found: list[Json] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if role == "user" and found and found[-1]["role"] == "user":
            found[-1]["content"] += _blocks(message)
        else:
            found.append({"role": role, "content": list(_blocks(message))})
    return found


def _items(message: Json) -> Iterator[Json]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": content}
    elif content:
        own: Json = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
        yield {"type": "message", "role": role, "content": [own | {"text": content}]}
    for call in message.get("tool_calls") or ():
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _blocks(message: Json) -> Iterator[Json]:
    content = message.get("content")
    if message["role"] == "tool":
        yield {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
    elif content:
        yield {"type": "text", "text": content}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        given = json.loads(function["arguments"] or "{}")
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def messages_of(wire: Wire, elements: Sequence[Json], arguments: Mapping[str, str]) -> list[Json]:
    """Return elements as chat messages. `arguments`: the original spelling for each call, by its id."""
    if wire == "messages":
        return [message for element in elements for message in _of_element(element, arguments)]
    found: list[Json] = []
    for item in elements:
        kind = item.get("type", "message")
        if kind == "function_call":
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(_call(item["call_id"], item["name"], item["arguments"]))
        elif kind == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        else:
            found.append({"role": item["role"], "content": _text(item["content"])})
    return found


def _of_element(element: Json, arguments: Mapping[str, str]) -> Iterator[Json]:
    content = element["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [block for block in blocks if block["type"] == "text"]
    calls = []
    for block in blocks:
        if block["type"] == "tool_result":
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _text(block["content"])}
        elif block["type"] == "tool_use":
            was = arguments.get(block["id"]) or "{}"
            is_same = json.loads(was) == block["input"]
            said = was if is_same else json.dumps(block["input"], ensure_ascii=False)
            calls.append(_call(block["id"], block["name"], said))
    if texts or calls:
        message = {"role": element["role"], "content": _text(texts) if texts else None}
        yield message | ({"tool_calls": calls} if calls else {})


def _call(name: str, function: str, arguments: str) -> Json:
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n\n".join(text_parts([part]) for part in content)


class _Exact:
    """Count the tokens of a body as those of the original chat request."""

    def __init__(self, wire: Wire, weigh_one: Callable[[bytes], int]) -> None:
        self._wire = wire
        self._weigh_one = weigh_one
        self.overhead = 0
        self.arguments: Mapping[str, str] = {}

    def estimate(self, request: RequestParts, *, keys: object = None) -> Estimate:
        del keys
        messages = messages_of(self._wire, [json.loads(raw) for raw in request.messages], self.arguments)
        tokens = self.overhead + sum(self._weigh_one(encode(message)) for message in messages)
        return Estimate(tokens, "exact", 0.0, 0, "", "", "", ContextCounts(), self.overhead)


class Wired:
    """A trimmer of chat requests that sends them in another format, with all its trim decisions."""

    def __init__(self, wire: Wire, count: Callable[[str], int], policy: TrimPolicy) -> None:
        weigh_all = counter_of(count)
        self._wire = wire
        self._weigh_one = lru_cache(1 << 16)(lambda raw: weigh_all([raw])[0])
        self._reader = Reader(lambda raws: weigh_all([_bare(raw) for raw in raws]))
        self._exact = _Exact(wire, self._weigh_one)
        self._count = lru_cache(256)(count)
        self._policy = ContextPolicy(overflow="least", safety=1.0, fit=policy)
        self._trim_decisions: dict[str, dict[str, Any]] = {}

    def __call__(self, request: Json, budget: int) -> Json:
        original = request["messages"]
        start = next(place for place, message in enumerate(original) if message["role"] not in SYSTEM_ROLES)
        tools = json.dumps(request["tools"], ensure_ascii=False) if request.get("tools") else ""
        system = sum(self._weigh_one(encode(message)) for message in original[:start])
        self._exact.overhead = self._count(tools) + system + REQUEST_TOKENS
        calls = [call for message in original for call in message.get("tool_calls") or ()]
        self._exact.arguments = {call["id"]: call["function"]["arguments"] for call in calls}
        raws = [encode(element) for element in elements_of(self._wire, original[start:])]
        body = RequestParts(wire=self._wire, messages=raws)
        counted = count_tokens(body, self._exact.estimate(body), LearnedCorrections())
        if counted.tokens <= budget:
            return request
        view, known = view_of(self._wire, raws), self._trim_decisions.setdefault(str(request.get("user", "")), {})
        stale = dict.fromkeys(view.marks.stale, 0.0)
        conversation = Conversation.of(
            view.messages,
            self._reader,
            pinned=view.marks.held,
            leading=view.marks.undroppable,
            following=view.marks.following,
            priorities=stale,
            takes_turns=False,
            tools=[tools.encode()] if tools else [],
        )
        room = ChoiceBudget(budget, self._policy, False, SessionState(known), LearnedCorrections(), lambda: False)  # noqa: FBT003
        exact: Any = self._exact
        plan = make_room(counted, view, conversation, room, TokenCounters(exact, self._reader))
        if plan.trim_decision is not None:
            # as it is read from a store
            known[plan.trim_decision["prefix"]] = json.loads(json.dumps(plan.trim_decision))
        if plan.messages is None:
            return request
        sent = [json.loads(raw) for raw in plan.messages]
        return {**request, "messages": original[:start] + messages_of(self._wire, sent, self._exact.arguments)}


def _bare(raw: bytes) -> bytes:
    """Return a message without its type field, which chat messages do not have."""
    message = json.loads(raw)
    return encode({name: value for name, value in message.items() if name != "type"})
