"""Steps on models that think: unforced tools where force is refused, and an unchanged tool list for bound thinking."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.conftest import StartGateway, StartUpstream
from tests.support.formats import Format
from tests.support.scripted import Connection
from tests.support.web import Reply, Web

Json = dict[str, Any]
NAMES = ("read_a", "write_a", "check", "secret")
#: two entries that are due one after the other, and a tool that no step allows
ORDERED = {
    "name": "ordered",
    "is_default": True,
    "available_tools": {"denied": ["secret"]},
    "sequence": ["read_a", "check"],
}
SILENT = {"name": "silent", "conditions": [{"message_matches": "(?i)summary"}], "available_tools": {"allowed": []}}


def written(wire: str, name: str) -> Json:
    schema = {"type": "object", "properties": {}}
    if wire == "chat":
        return {"type": "function", "function": {"name": name, "parameters": schema}}
    if wire == "responses":
        return {"type": "function", "name": name, "parameters": schema}
    return {"name": name, "input_schema": schema}


def ask(wire: str, model: str, *, messages: Sequence[Json] = (), text: str = "hi", **fields: Any) -> Json:
    spoken = list(messages) or [{"role": "user", "content": text}]
    tools = [written(wire, name) for name in NAMES]
    return {**Format(wire).body([{"role": "user", "content": "hi"}], model=model), Format(wire).array: spoken,
            "tools": tools, **fields}  # fmt: skip


def names(body: Json) -> list[str]:
    return [(one.get("function") or one)["name"] for one in body["tools"]]


def withdrawn(body: Json) -> set[str]:
    """Return the tools that system messages have withdrawn at the end of a request."""
    found = set[str]()
    for message in body["messages"]:
        for block in message["content"] if message["role"] == "system" else ():
            (found.add if block["type"] == "tool_removal" else found.discard)(block["tool"]["name"])
    return found


def offered(body: Json) -> list[str]:
    """Return the tools that the model may call at the end of a request."""
    return [name for name in names(body) if name not in withdrawn(body)]


def is_forced(body: Json) -> bool:
    choice = body.get("tool_choice", "auto")
    kind = choice if isinstance(choice, str) else choice["type"]
    return kind not in ("auto", "none")


def answer(wire: str, model: str) -> Json:
    if wire == "chat":
        message = {"role": "assistant", "content": "Nile"}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": model,
            "choices": choices,
            "usage": usage,
        }
    usage = {"input_tokens": 10, "output_tokens": 5}
    if wire == "responses":
        return {"id": "r", "object": "response", "status": "completed", "model": model, "output": [],
                "usage": {**usage, "total_tokens": 15}}  # fmt: skip
    return {"id": "m", "type": "message", "role": "assistant", "model": model, "stop_reason": "end_turn",
            "content": [{"type": "text", "text": "Nile"}], "usage": usage}  # fmt: skip


class RefusesForce:
    """A provider whose model refuses a forced tool call with this text."""

    def __init__(self, wire: str, text: str) -> None:
        self.wire, self.text = wire, text

    def __call__(self, connection: Connection) -> None:
        body = connection.request.json
        if is_forced(body):
            error = {"error": {"message": self.text, "type": "invalid_request_error"}}
            connection.whole(json.dumps(error).encode(), status=b"400 Bad Request")
        else:
            connection.whole(json.dumps(answer(self.wire, body["model"])).encode())


def notes(web: Web, session: str) -> list[Json]:
    return [one["notes"] for one in reversed(web.get(f"/api/sessions/{session}/calls").json["calls"])]


REFUSING = pytest.mark.parametrize(
    ("wire", "model"),
    [
        ("chat", "deepseek-v4-flash"),
        ("responses", "deepseek-v4-pro"),
        ("messages", "deepseek-v4-pro"),
        ("chat", "qwen3.5-plus"),
        ("chat", "kimi-k2.6"),
        ("messages", "claude-opus-5-5"),
        ("chat", "claude-sonnet-5-5"),
    ],
)
WIRES = pytest.mark.parametrize("wire", ["chat", "responses", "messages"])


@REFUSING
def test_a_model_known_to_refuse_forced_tools_is_never_sent_one(
    wire: str, model: str, gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    upstream = byte_server(RefusesForce(wire, "no tool_choice of this kind"))
    gateway = gateway_server(upstream.url, steps=[{**ORDERED, "enforce": "require"}])
    reply = gateway.web.post(Format(wire).path, ask(wire, model), {"x-session-id": "s"})
    assert (reply.status, len(upstream.requests)) == (200, 1)
    (noted,) = notes(gateway.web, "s")
    assert noted["step_required"].startswith("no tool call is forced")
    if model.startswith("claude") and wire == "chat":
        assert names(upstream.requests[0].json) == ["read_a", "write_a", "check"]
        assert noted["step_tools"].startswith("offered although not due or not allowed: write_a, check;")
    elif model.startswith("claude"):
        assert names(upstream.requests[0].json) == ["read_a", "write_a", "check"]
        assert offered(upstream.requests[0].json) == ["read_a"]
        assert "step_tools" not in noted
    else:
        assert names(upstream.requests[0].json) == ["read_a"]


@pytest.mark.parametrize(
    ("wire", "model", "fields"),
    [
        ("chat", "deepseek-v4-flash", {"thinking": {"type": "disabled"}}),
        ("responses", "deepseek-v4-pro", {"reasoning": {"effort": "none"}}),
        ("chat", "qwen3.5-plus", {"enable_thinking": False}),
        ("chat", "kimi-k2.6", {"thinking": {"type": "disabled"}}),
        ("chat", "qwen-plus", {}),
        ("messages", "claude-haiku-5-5", {"thinking": {"type": "adaptive"}}),
        ("messages", "claude-opus-5", {}),
    ],
)
def test_a_tool_is_forced_if_thinking_is_off_or_the_model_accepts_it(
    wire: str, model: str, fields: Json, gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    upstream = byte_server(lambda connection: connection.whole(json.dumps(answer(wire, model)).encode()))
    gateway = gateway_server(upstream.url, steps=[{**ORDERED, "enforce": "require"}])
    reply = gateway.web.post(Format(wire).path, ask(wire, model, **fields), {"x-session-id": "s"})
    assert reply.status == 200
    assert is_forced(upstream.requests[0].json)
    assert "step_required" not in notes(gateway.web, "s")[0]


@WIRES
@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_of_forced_tools_is_learned_once(
    wire: str, stream: bool, gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    upstream = byte_server(RefusesForce(wire, "Thinking mode does not support this tool_choice"))
    gateway = gateway_server(upstream.url, steps=[{**ORDERED, "enforce": "require"}])
    for count in (2, 3, 4):
        reply = gateway.web.post(Format(wire).path, ask(wire, "home-made", stream=stream), {"x-session-id": "s"})
        assert (reply.status, len(upstream.requests)) == (200, count)
    assert [is_forced(one.json) for one in upstream.requests] == [True, False, False, False]
    assert ["step_required" in one for one in notes(gateway.web, "s")] == [True] * 3
    assert gateway.web.get("/api/sessions/s").json["calls"] == 3


def test_a_forced_choice_of_the_client_is_forwarded_unchanged(
    gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    upstream = byte_server(RefusesForce("chat", "Thinking mode does not support this tool_choice"))
    gateway = gateway_server(upstream.url, steps=[{"name": "all", "enforce": "require"}])
    body = ask("chat", "deepseek-v4-flash", tool_choice="required")
    reply = gateway.web.post(Format("chat").path, body, {"x-session-id": "s"})
    assert (reply.status, len(upstream.requests)) == (400, 1)
    assert upstream.requests[0].json == body


# --- thinking that is bound to the list of tools --------------------------------------------------------------------


class Binds:
    """A provider whose thinking blocks are valid only with the tool list that they were created with.

    It calls the tools of `calls`, one per response, even if they are not offered.
    """

    def __init__(self, *calls: str) -> None:
        self._calls = iter(calls)
        #: signature -> the JSON of the tools that it was created with
        self._made: dict[str, bytes] = {}
        self.lists: list[bytes] = []

    def __call__(self, connection: Connection) -> None:
        body = json.loads(connection.request.body)
        listed = json.dumps(body.get("tools")).encode()
        self.lists.append(listed)
        blocks = [
            one for message in body["messages"] if isinstance(message["content"], list) for one in message["content"]
        ]
        for block in blocks:
            if block["type"] == "thinking" and self._made[block["signature"]] != listed:
                self._refuse(connection, "Invalid `signature` in `thinking` block. The block is bound to a different "
                             "conversation.")  # fmt: skip
                return
        if (body.get("tool_choice") or {}).get("type") in ("any", "tool"):
            self._refuse(connection, 'tool_choice: type "tool" and "any" are not supported for this model.')
            return
        signature, name = f"signed-{len(self.lists)}", next(self._calls, "")
        content: list[Json] = [{"type": "text", "text": "done"}]
        if (body.get("thinking") or {}).get("type") != "disabled":
            self._made[signature] = listed
            content.insert(0, {"type": "thinking", "thinking": "", "signature": signature})
        if name:
            content.append({"type": "tool_use", "id": f"toolu_{len(self.lists)}", "name": name, "input": {}})
        whole = {**answer("messages", body["model"]), "content": content,
                 "stop_reason": "tool_use" if name else "end_turn"}  # fmt: skip
        connection.whole(json.dumps(whole).encode())

    @staticmethod
    def _refuse(connection: Connection, text: str) -> None:
        error = {"type": "error", "error": {"type": "invalid_request_error", "message": text}}
        connection.whole(json.dumps(error).encode(), status=b"400 Bad Request")


class Conversation:
    """An agent's conversation in the Messages API that sends every response back."""

    def __init__(self, web: Web, **fields: Any) -> None:
        self.web, self.fields = web, fields
        self.messages: list[Json] = [{"role": "user", "content": "go"}]

    def call(self, **fields: Any) -> Reply:
        body = ask("messages", "claude-opus-5-5", messages=self.messages, **{**self.fields, **fields})
        reply = self.web.post(Format("messages").path, body, {"x-session-id": "s"})
        assert reply.status == 200, reply.body
        content = reply.json["content"]
        self.messages.append({"role": "assistant", "content": content})
        results = [
            {"type": "tool_result", "tool_use_id": one["id"], "content": "ok"}
            for one in content
            if one["type"] == "tool_use"
        ]
        self.messages.append({"role": "user", "content": results or "go on"})
        return reply


@pytest.mark.parametrize("enforce", ["filter", "require"])
def test_the_tool_list_is_unchanged_on_all_turns_if_thinking_is_bound_to_it(
    enforce: str, gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    provider = Binds("read_a", "write_a", "check", "write_a")
    upstream = byte_server(provider)
    gateway = gateway_server(upstream.url, steps=[SILENT, {**ORDERED, "enforce": enforce}])
    agent = Conversation(gateway.web)
    places = [agent.call().header("x-session-sequence-index") for _ in range(5)]
    assert places == ["1", "1", "2", "2", "2"]
    assert len(upstream.requests) == 5
    assert len(set(provider.lists)) == 1
    assert names(upstream.requests[0].json) == ["read_a", "write_a", "check"], "no step allows the tool 'secret'"
    assert [offered(one.json) for one in upstream.requests] == [
        ["read_a"],
        *[["check"]] * 2,
        *[["read_a", "write_a", "check"]] * 2,
    ]
    stray = [one.get("stray_tools") for one in notes(gateway.web, "s")]
    assert stray == [None, "write_a", None, None, None], "this provider calls tools that are not offered"
    assert not any("step_tools" in one for one in notes(gateway.web, "s"))


def test_a_step_without_tools_sends_tool_choice_none_and_keeps_the_list(
    gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    provider = Binds("read_a")
    gateway = gateway_server(byte_server(provider).url, steps=[SILENT, ORDERED])
    agent = Conversation(gateway.web)
    agent.call()
    agent.messages[-1]["content"].append({"type": "text", "text": "a summary"})
    assert agent.call().header("x-session-step") == "silent"
    agent.call(tool_choice={"type": "none"})
    assert len(set(provider.lists)) == 1
    assert "step_tools" not in notes(gateway.web, "s")[1]


def test_a_step_without_tools_sends_tool_choice_none_on_every_turn(
    gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    upstream = byte_server(Binds())
    gateway = gateway_server(upstream.url, steps=[{"name": "none", "available_tools": {"allowed": []}}])
    agent = Conversation(gateway.web)
    agent.call()
    agent.call()
    assert [one.json["tool_choice"] for one in upstream.requests] == [{"type": "none"}] * 2
    assert [names(one.json) for one in upstream.requests] == [list(NAMES)] * 2


def test_the_tool_list_is_restricted_until_the_first_thinking_block(
    gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    provider = Binds("read_a", "write_a", "write_a", "check")
    upstream = byte_server(provider)
    gateway = gateway_server(upstream.url, steps=[ORDERED])
    agent = Conversation(gateway.web)
    off = {"thinking": {"type": "disabled"}}
    agent.call(**off)
    agent.call()
    agent.call(**off)
    agent.call()
    assert names(upstream.requests[0].json) == ["read_a"]
    assert [names(one.json) for one in upstream.requests[1:]] == [["read_a", "write_a", "check"]] * 3


def test_a_tool_that_messages_refer_to_is_kept_in_a_shortened_list(
    gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    upstream = byte_server(lambda connection: connection.whole(json.dumps(answer("messages", "m")).encode()))
    gateway = gateway_server(upstream.url, steps=[ORDERED])
    found = {"type": "tool_search_tool_search_result", "tool_references": [{"type": "tool_reference",
             "tool_name": "secret"}]}  # fmt: skip
    messages: list[Json] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_search_tool_result", "tool_use_id": "t", "content": found}]},
        {"role": "user", "content": "go on"},
    ]
    body = ask("messages", "claude-opus-4-6", messages=messages)
    assert gateway.web.post(Format("messages").path, body, {"x-session-id": "s"}).status == 200
    assert names(upstream.requests[0].json) == ["read_a", "secret"]
    assert notes(gateway.web, "s")[0]["step_tools"] == (
        "offered although not due or not allowed: secret; messages refer to them"
    )
