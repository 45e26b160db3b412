"""A call in a step: the restrictions that are sent, the position that is stored, and errors of other parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.call.types import Caller, ClientResponse, Directives, Purpose
from gateway.core.errors import StoreConflict, StoreDamaged, StoreUnavailable, UpstreamProtocolError
from gateway.core.http.headers import ProviderAddress
from gateway.core.http.request import Outgoing
from gateway.core.ledger.arithmetic import Limits
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Observer, RecordRefused
from gateway.core.record import CallRecord
from gateway.core.routing import ModelRule, Routes
from gateway.core.session import Change, SessionState
from gateway.core.steps import (
    Agent,
    BudgetBelow,
    MessageMatches,
    SequenceMatch,
    Step,
    StepChange,
    StepState,
    TokensAbove,
)
from gateway.core.stored import StepEnding
from gateway.core.usage import Totals
from tests.support.fakes import KEY, SSE, FakeReply, UnavailableStore, World
from tests.support.scripted import DONE, chunk, completion
from tests.support.timing import eventually

Json = dict[str, Any]
NAMES = ("search", "read_draft", "list_flaws", "publish")


def tool(name: str) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def body(names: Sequence[str] = NAMES, text: str = "hello there", **fields: Any) -> bytes:
    tools = {"tools": [tool(name) for name in names]} if names else {}
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **tools, **fields}).encode()


def calling(*names: str, finish: str = "tool_calls") -> FakeReply:
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in enumerate(names)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    return FakeReply(pieces=[completion(choices=[{"index": 0, "message": message, "finish_reason": finish}])])


WORK = Step("work", is_default=True, denied=("publish",))
CRITIQUE = Step(
    "critique",
    conditions=(MessageMatches(lambda text: "evaluate" in text),),
    allowed=("read_*", "list_flaws"),
    sequence=(("read_*",), ("list_flaws",)),
)


def world_of(*steps: Step, allowed_tools: bool = True, name: str = "default") -> World:
    world = World(agents={name: Agent(name, steps)})
    world.providers["p"] = replace(world.providers["p"], allowed_tools=allowed_tools)
    return world


def sent(world: World) -> Json:
    found: Json = json.loads(world.upstream.sent[-1].body)
    return found


async def state(world: World, agent: str = "default") -> StepState:
    remembered = await world.store.remembered(KEY)
    return remembered.state.steps[agent]


async def call(
    world: World, sending: bytes, answer: FakeReply | None = None, **changes: Any
) -> tuple[ClientResponse, Json]:
    world.upstream.answer = lambda _: answer or FakeReply()
    reply, answered = await world.call(world.incoming(sending, **changes))
    found: Json = json.loads(answered)
    return reply, found


def allowed(*names: str, mode: str = "auto") -> Json:
    entries = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": entries}}


# --- restrictions in the request ------------------------------------------------------------------------------------


async def test_only_what_the_step_allows_may_be_called() -> None:
    world = world_of(WORK)
    await call(world, body())
    assert sent(world)["tool_choice"] == allowed("search", "read_draft", "list_flaws")
    assert sent(world)["tools"] == [tool(name) for name in NAMES]


async def test_a_provider_without_allowed_tools_gets_a_shorter_list() -> None:
    world = world_of(WORK, allowed_tools=False)
    await call(world, body())
    assert sent(world)["tools"] == [tool(name) for name in NAMES[:3]]
    assert "tool_choice" not in sent(world)


async def test_only_the_due_tool_is_offered_and_the_step_may_require_it() -> None:
    world = world_of(replace(CRITIQUE, enforce="require"), WORK)
    await call(world, body(text="evaluate it"), calling("read_draft"))
    assert sent(world)["tool_choice"] == {"type": "function", "function": {"name": "read_draft"}}
    assert sent(world)["tools"] == [tool(name) for name in NAMES]
    assert await state(world) == StepState("critique", 1, ("read_draft",))


@pytest.mark.parametrize("enforce", ["filter", "require", "reject", "observe"])
async def test_a_call_without_tools_is_forwarded_byte_for_byte(enforce: Any) -> None:
    world = world_of(replace(CRITIQUE, enforce=enforce))
    sending = body((), text="evaluate  it", x_odd=[1.0])
    reply, _ = await call(world, sending)
    assert world.upstream.sent[-1].body == sending
    assert reply.active_step is not None
    assert reply.active_step.step is not None


async def test_a_call_with_tool_choice_none_is_unchanged() -> None:
    world = world_of(replace(CRITIQUE, enforce="reject"))
    sending = body(text="evaluate it", tool_choice="none")
    await call(world, sending)
    assert world.upstream.sent[-1].body == sending


async def test_an_observing_step_changes_nothing() -> None:
    world = world_of(replace(CRITIQUE, enforce="observe"))
    sending = body(text="evaluate it", Tools=[], functions=5)
    reply, _ = await call(world, sending, calling("publish"))
    assert world.upstream.sent[-1].body == sending
    assert reply.active_step is not None
    assert reply.active_step.stray == ("publish",)
    assert world.record.notes["stray_tools"] == "publish"


async def test_the_fallback_gets_the_restriction_that_it_supports() -> None:
    world = world_of(WORK)
    routes = Routes([ModelRule("m", "p", fallback=("q-1",)), ModelRule("q-*", "q")], ["p", "q"], "p")
    world.gateway = replace(world.gateway, routes=routes)

    def answer(request: Outgoing) -> FakeReply:
        return FakeReply(503, pieces=[b"{}"]) if request.url.startswith("http://p/") else FakeReply()

    world.upstream.answer = answer
    await world.call(world.incoming(body()))
    first, second = (json.loads(one.body) for one in world.upstream.sent)
    assert (len(first["tools"]), first["tool_choice"]) == (4, allowed("search", "read_draft", "list_flaws"))
    assert (len(second["tools"]), "tool_choice" in second) == (3, False)


# --- refusals of the provider ---------------------------------------------------------------------------------------


def choosy(request: Outgoing) -> FakeReply:
    if b"allowed_tools" in request.body:
        return FakeReply(400, pieces=[b'{"error":{"message":"allowed_tools is no tool_choice"}}'])
    return FakeReply()


async def test_a_provider_that_refuses_the_choice_gets_a_shorter_list_and_is_remembered() -> None:
    world = world_of(WORK)
    world.upstream.answer = choosy
    for count in (2, 3):
        reply, _ = await world.call(world.incoming(body()))
        assert (reply.status, len(world.upstream.sent)) == (200, count)
        assert len(sent(world)["tools"]) == 3
    notes = [record.notes.get("tool_choice") for record, _ in world.recorder.records]
    assert notes == ["the provider refused allowed_tools, so its list of tools is shorter", None]


async def test_a_refusal_that_only_repeats_the_words_of_a_client_is_not_remembered() -> None:
    world = world_of(WORK)
    world.upstream.answer = lambda _: FakeReply(400, pieces=[b'{"error":{"message":"bad text: allowed_tools"}}'])
    reply, _ = await world.call(world.incoming(body(text="allowed_tools")))
    assert (reply.status, len(world.upstream.sent)) == (400, 2)
    await call(world, body())
    assert sent(world)["tool_choice"]["type"] == "allowed_tools"


async def test_the_fallback_gets_the_choice_that_the_first_provider_refused() -> None:
    world = world_of(WORK)
    world.providers["q"] = replace(world.providers["q"], allowed_tools=True)
    routes = Routes([ModelRule("m", "p", fallback=("q-1",)), ModelRule("q-*", "q")], ["p", "q"], "p")
    world.gateway = replace(world.gateway, routes=routes)

    def answer(request: Outgoing) -> FakeReply:
        if request.url.startswith("http://q/"):
            return FakeReply()
        refused = choosy(request)
        return refused if refused.status == 400 else FakeReply(503, pieces=[b"{}"])

    world.upstream.answer = answer
    await world.call(world.incoming(body()))
    assert len(world.upstream.sent) == 3
    assert sent(world)["tool_choice"] == allowed("search", "read_draft", "list_flaws")


async def test_a_refusal_of_the_clients_choice_is_passed_on_after_all_tries() -> None:
    world = world_of(Step("s", sequence=(("search", "read_draft"),), enforce="require"))

    def answer(request: Outgoing) -> FakeReply:
        assert len(world.upstream.sent) < 9, "it is sent over and over"
        return choosy(request)

    world.upstream.answer = answer
    reply, _ = await world.call(world.incoming(body(tool_choice=allowed("search", "read_draft"))))
    assert (reply.status, len(world.upstream.sent)) == (400, 3)
    assert json.loads(world.upstream.sent[-1].body)["tool_choice"] == allowed("search", "read_draft")


FORCED = (
    "Thinking mode does not support this tool_choice",
    "<400> InternalError.Algo.InvalidParameter: The tool_choice parameter does not support being set to required",
    "tool_choice 'specified' is incompatible with thinking enabled",
    "Thinking may not be enabled when tool_choice forces tool use.",
    'tool_choice: type "tool" and "any" are not supported for this model.',
    "ToolChoice is not supported by this model",
    "Forced function calling (mode = ANY) is not supported",
)
REQUIRED = replace(CRITIQUE, enforce="require", conditions=())


def unforced(text: str) -> Callable[[Outgoing], FakeReply]:
    def answer(request: Outgoing) -> FakeReply:
        choice = json.loads(request.body).get("tool_choice", "auto")
        mode = choice if isinstance(choice, str) else choice.get("allowed_tools", {}).get("mode", "required")
        if mode == "required":
            return FakeReply(400, pieces=[json.dumps({"error": {"message": text}}).encode()])
        return FakeReply()

    return answer


@pytest.mark.parametrize("text", FORCED)
@pytest.mark.parametrize("allowed_tools", [True, False])
async def test_a_provider_that_refuses_a_forced_call_is_remembered(text: str, allowed_tools: bool) -> None:
    world = world_of(REQUIRED, allowed_tools=allowed_tools)
    world.upstream.answer = unforced(text)
    for count in (2, 3):
        reply, _ = await world.call(world.incoming(body()))
        assert (reply.status, len(world.upstream.sent)) == (200, count)
        if allowed_tools:
            assert sent(world)["tool_choice"] == allowed("read_draft")
        else:
            assert sent(world)["tools"] == [tool("read_draft")]
            assert "tool_choice" not in sent(world)
    notes = [record.notes.get("step_required") for record, _ in world.recorder.records]
    assert notes == ["no tool call is forced: the model refuses that, or refuses it while thinking"] * 2


@pytest.mark.parametrize("text", [FORCED[0], FORCED[4]])
async def test_a_refused_forced_choice_is_sent_without_force(text: str) -> None:
    world = world_of(replace(REQUIRED, sequence=(("read_*", "list_flaws"),)))
    world.upstream.answer = unforced(text)
    reply, _ = await world.call(world.incoming(body()))
    assert reply.status == 200
    assert "required" not in json.dumps(sent(world))


async def test_a_refusal_of_the_clients_forced_call_is_passed_on() -> None:
    world = world_of(WORK)
    world.upstream.answer = unforced(FORCED[0])
    reply, _ = await world.call(world.incoming(body(NAMES[:3], tool_choice="required")))
    assert (reply.status, len(world.upstream.sent)) == (400, 1)
    assert sent(world)["tool_choice"] == "required"


async def test_a_refusal_that_stays_without_force_is_passed_on_and_not_remembered() -> None:
    world = world_of(REQUIRED, allowed_tools=False)
    world.upstream.answer = lambda _: FakeReply(400, pieces=[b'{"error":{"message":"bad text: tool_choice"}}'])
    reply, _ = await world.call(world.incoming(body()))
    assert (reply.status, len(world.upstream.sent)) == (400, 2)
    await call(world, body())
    assert sent(world)["tool_choice"] == {"type": "function", "function": {"name": "read_draft"}}


async def test_notes_on_a_failed_provider_are_removed_for_the_fallback() -> None:
    world = world_of(REQUIRED)
    routes = Routes(
        [ModelRule("m", "p", name="deepseek-v4-flash", fallback=("q-1",)), ModelRule("q-*", "q")], ["p", "q"], "p"
    )
    world.gateway = replace(world.gateway, routes=routes)
    world.upstream.answer = lambda request: FakeReply() if request.url.startswith("http://q/") else FakeReply(503)
    reply, _ = await world.call(world.incoming(body()))
    assert (reply.status, len(world.upstream.sent)) == (200, 2)
    assert json.loads(world.upstream.sent[0].body)["tool_choice"] == allowed("read_draft")
    assert sent(world)["tool_choice"] == {"type": "function", "function": {"name": "read_draft"}}
    assert [record.notes.get("step_required") for record, _ in world.recorder.records] == [None]


async def test_a_refusal_about_something_else_is_passed_on() -> None:
    world = world_of(WORK)
    world.upstream.answer = lambda _: FakeReply(400, pieces=[b'{"error":{"message":"no such model"}}'])
    reply, _ = await world.call(world.incoming(body()))
    assert (reply.status, len(world.upstream.sent)) == (400, 1)


async def test_a_refusal_of_the_clients_allowed_tools_is_passed_on() -> None:
    world = world_of(Step("all"))
    world.upstream.answer = choosy
    reply, _ = await world.call(world.incoming(body(tool_choice=allowed("search"))))
    assert (reply.status, len(world.upstream.sent)) == (400, 1)


async def test_a_restricted_client_choice_that_is_refused_twice_is_passed_on() -> None:
    world = world_of(WORK)
    world.upstream.answer = choosy
    reply, _ = await world.call(world.incoming(body(tool_choice=allowed("search", "publish"))))
    assert (reply.status, len(world.upstream.sent)) == (400, 2)
    assert sent(world)["tool_choice"] == allowed("search")


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"tool_choice": "required"}, {"tool_choice": None}])
async def test_a_choice_of_some_tools_counts_as_many_tokens_as_of_all(fields: Json) -> None:
    world, plain = world_of(WORK), World()
    await call(world, body(**fields))
    await call(plain, body(**fields))
    assert sent(world)["tool_choice"]["type"] == "allowed_tools"
    one, other = world.record.context, plain.record.context
    assert one is not None
    assert other is not None
    assert one.tokens == other.tokens


async def test_the_tokens_of_a_shorter_list_are_counted() -> None:
    world = world_of(Step("s", allowed=("search",)))
    world.upstream.answer = choosy
    await world.call(world.incoming(body([f"tool_{number}" for number in range(30)] + ["search"])))
    shorter = world.record.context
    plain = World()
    await plain.call(plain.incoming(body(["search"])))
    assert shorter is not None
    assert plain.record.context is not None
    assert shorter.tokens == plain.record.context.tokens


# --- refusals of the gateway ----------------------------------------------------------------------------------------


async def test_a_sequence_whose_tool_is_not_offered_is_a_clear_error() -> None:
    world = world_of(CRITIQUE)
    reply, answered = await call(world, body(["search", "publish"], text="evaluate it"))
    assert (reply.status, world.upstream.sent) == (400, [])
    error = answered["error"]
    assert (error["code"], error["param"]) == ("tool_not_allowed", "tools")
    assert 'the step "critique": entry 1 of 2 of its sequence is due, read_*.' in error["message"]
    assert "The request offers search, publish." in error["message"]
    assert (await world.store.totals(KEY)).calls == 0


async def test_a_step_whose_tools_are_not_offered_is_an_error_and_no_empty_list() -> None:
    world = world_of(Step("s", allowed=("verdict",), denied=("verdict_2",)))
    _, answered = await call(world, body(["search"]))
    assert "it allows verdict but verdict_2." in answered["error"]["message"]


@pytest.mark.parametrize("step", [Step("s", allowed=()), Step("s", denied=("*",))])
@pytest.mark.parametrize("enforce", ["filter", "require"])
async def test_a_step_without_tools_lets_the_model_respond_with_text(step: Step, enforce: Any) -> None:
    world = world_of(replace(step, enforce=enforce))
    await call(world, body())
    assert sent(world)["tool_choice"] == "none"
    assert len(sent(world)["tools"]) == 4


async def test_a_forced_choice_outside_the_step_is_refused_and_one_inside_goes_through() -> None:
    world = world_of(WORK)
    choice = {"type": "function", "function": {"name": "publish"}}
    reply, answered = await call(world, body(tool_choice=choice))
    assert (reply.status, answered["error"]["param"]) == (400, "tool_choice")
    assert "The request forces publish." in answered["error"]["message"]
    sending = body(tool_choice={"type": "function", "function": {"name": "search"}})
    await call(world, sending)
    assert world.upstream.sent[-1].body == sending


async def test_a_forced_choice_is_refused_where_nothing_may_be_called() -> None:
    world = world_of(Step("s", allowed=()))
    choice = {"type": "function", "function": {"name": "search"}}
    reply, answered = await call(world, body(tool_choice=choice))
    assert (reply.status, answered["error"]["param"]) == (400, "tool_choice")
    assert "it allows none" in answered["error"]["message"]


async def test_reject_refuses_tools_outside_the_step_and_changes_nothing() -> None:
    world = world_of(replace(WORK, enforce="reject"))
    reply, answered = await call(world, body())
    assert (reply.status, answered["error"]["code"]) == (400, "tool_not_allowed")
    sending = body(NAMES[:3])
    await call(world, sending)
    assert world.upstream.sent[-1].body == sending


@pytest.mark.parametrize("enforce", ["filter", "require", "reject"])
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": {"0": tool("publish")}},
        {"tools": None, "functions": [{"name": "publish"}]},
        {"tools": [], "functions": [{"name": "publish"}]},
        {"functions": [{"name": "publish"}]},
        {"Tools": [tool("publish")]},
        {"tools": [{"type": "x", "x": {"name": "search"}, "function": {"name": "publish"}}]},
        {"tools": [tool("publish")], "tool_choice": {"type": "none"}},
    ],
)
async def test_unusual_tool_formats_cannot_offer_denied_tools(enforce: Any, fields: Json) -> None:
    world = world_of(replace(WORK, enforce=enforce))
    reply, _ = await call(world, body((), **fields))
    assert (reply.status, world.upstream.sent) == (400, [])


@pytest.mark.parametrize(
    ("name", "hint"), [("default", '{"active_step": …}'), ("w", '{"active_step": …, "agent": "w"}')]
)
async def test_an_error_names_the_request_that_sets_another_step(name: str, hint: str) -> None:
    world = world_of(Step("s", allowed=("x",)), name=name)
    _, answered = await call(world, body(), directives=Directives(agent=name))
    assert answered["error"]["message"].endswith(f" PATCH /api/sessions/{KEY.id} {hint}.")


async def test_the_names_in_an_error_are_limited() -> None:
    world = world_of(Step("s", allowed=("x",)))
    _, answered = await call(world, body([f"{number:03}" + "n" * 5000 for number in range(500)]))
    assert len(answered["error"]["message"]) < 3000
    assert "and 484 more" in answered["error"]["message"]


async def test_an_unknown_agent_is_an_error() -> None:
    world = world_of(WORK, name="writer")
    reply, answered = await call(world, body(), directives=Directives(agent="editor"))
    assert reply.status == 400
    assert answered["error"]["message"] == 'Unknown agent "editor"; agents with steps: writer.'


# --- transitions by tool calls --------------------------------------------------------------------------------------


async def test_a_step_changes_within_a_turn_when_its_sequence_is_finished() -> None:
    debate = Step("debate", conditions=(SequenceMatch((("read_*",), ("list_flaws",))),), sequence=(("search",),))
    world = world_of(CRITIQUE, debate)
    reply, _ = await call(world, body(text="evaluate it"), calling("read_draft"))
    assert (reply.active_step and reply.active_step.state) == StepState("critique", 1, ("read_draft",))
    # The message still says "evaluate", so the step stays active. Its sequence is finished, so all its tools are allowed.
    reply, _ = await call(world, body(text="evaluate it"), calling("list_flaws"))
    assert await state(world) == StepState("critique", 2, ("read_draft", "list_flaws"))
    reply, _ = await call(world, body(text="and now?"))
    assert (await state(world)).active == "debate"


async def test_parallel_tool_calls_are_applied_in_order() -> None:
    world = world_of(CRITIQUE)
    reply, _ = await call(world, body(text="evaluate it"), calling("read_draft", "publish", "list_flaws"))
    assert reply.active_step is not None
    assert (reply.active_step.state.index, reply.active_step.stray) == (2, ("publish",))
    assert world.record.notes["stray_tools"] == "publish"


async def test_the_name_of_a_tool_set_is_valid_in_a_header() -> None:
    world = world_of(replace(WORK, enforce="observe", denied=("*",)))
    server = {"type": "mcp", "server_label": "a\r\nx: 1" + "b" * 300, "server_url": "http://x"}
    reply, _ = await call(
        world, body(()).replace(b"{", b'{"tools":[%b],' % json.dumps(server).encode(), 1), calling("b")
    )
    assert reply.active_step is not None
    (name,) = reply.active_step.stray
    assert name.isprintable()
    assert len(name) == 256
    assert world.record.notes["stray_tools"] == name


async def test_the_tools_of_a_stream_are_applied_at_its_end() -> None:
    world = world_of(CRITIQUE)
    delta = {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "read_draft"}}]}
    pieces = [
        chunk(choices=[{"index": 0, "delta": delta, "finish_reason": None}]),
        chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]),
        DONE,
    ]
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=pieces)
    await world.call(world.incoming(body(text="evaluate it", stream=True)))
    assert await state(world) == StepState("critique", 1, ("read_draft",))


@pytest.mark.parametrize("finish", ["length", "content_filter"])
async def test_tool_calls_of_a_truncated_response_are_not_applied(finish: str) -> None:
    world = world_of(CRITIQUE)
    await call(world, body(text="evaluate it"), calling("read_draft", finish=finish))
    assert await state(world) == StepState("critique")


async def test_tool_calls_of_a_broken_stream_are_not_applied() -> None:
    world = world_of(CRITIQUE)
    delta = {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "read_draft"}}]}
    begun = chunk(choices=[{"index": 0, "delta": delta, "finish_reason": None}])
    world.upstream.answer = lambda _: FakeReply(headers=SSE, pieces=[begun, UpstreamProtocolError("broke off")])
    await world.call(world.incoming(body(text="evaluate it", stream=True)))
    assert await state(world) == StepState("critique")


async def test_function_call_and_custom_tools_are_applied() -> None:
    world = world_of(CRITIQUE)
    older = {"role": "assistant", "content": None, "function_call": {"name": "read_draft", "arguments": "{}"}}
    functions = [{"name": name} for name in NAMES]
    answer = FakeReply(pieces=[completion(choices=[{"index": 0, "message": older, "finish_reason": "function_call"}])])
    await call(world, body((), text="evaluate it", functions=functions), answer)
    assert sent(world)["functions"] == [{"name": "read_draft"}]
    assert (await state(world)).index == 1
    custom = {"id": "c", "type": "custom", "custom": {"name": "list_flaws", "input": "x"}}
    message = {"role": "assistant", "content": None, "tool_calls": [custom]}
    answer = FakeReply(pieces=[completion(choices=[{"index": 0, "message": message, "finish_reason": "tool_calls"}])])
    await call(world, body(text="evaluate it"), answer)
    assert (await state(world)).index == 2


async def test_hosted_tools_are_applied_under_their_offered_names() -> None:
    world = world_of(Step("s", allowed=("web_search", "github"), sequence=(("web_search",), ("github",))))
    tools = [{"type": "web_search_preview"}, {"type": "mcp", "server_label": "github", "server_url": "https://x"}]
    output = [
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "mcp_call", "id": "m", "server_label": "github", "name": "create_issue", "arguments": "{}"},
    ]
    answer = FakeReply(pieces=[json.dumps({"id": "r", "status": "completed", "output": output}).encode()])
    world.upstream.answer = lambda _: answer
    sending = json.dumps({"model": "m", "input": "hi", "tools": tools}).encode()
    await world.call(world.incoming(sending, "responses"))
    assert await state(world) == StepState("s", 2, ("web_search", "github"))
    assert "stray_tools" not in world.record.notes


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_call_of_an_mcp_tool_counts_for_the_server_in_the_response(is_stream: bool) -> None:
    world = world_of(Step("s", sequence=(("crm",), ("github",), ("docs",), ("search",))))
    tools = [
        *({"type": "mcp", "server_label": name, "server_url": "https://x"} for name in ("github", "docs")),
        {"type": "namespace", "name": "crm", "tools": []},
        {"type": "function", "name": "search"},
    ]
    called = {"arguments": "{}", "name": "search"}
    output = [
        {"type": "function_call", "id": "n", "call_id": "n", "namespace": "crm", **called},
        {"type": "mcp_call", "id": "g", "server_label": "github", **called},
        {"type": "mcp_call", "id": "d", "server_label": "docs", **called},
        {"type": "function_call", "id": "f", "call_id": "f", **called},
    ]
    ended = {"id": "r", "status": "completed", "output": output}
    answer = FakeReply(pieces=[json.dumps(ended).encode()])
    if is_stream:
        items = [
            {"type": "response.output_item.added", "output_index": index, "item": item}
            for index, item in enumerate(output)
        ]
        pieces = [
            b"data: %b\n\n" % json.dumps(one).encode()
            for one in (*items, {"type": "response.completed", "response": ended})
        ]
        answer = FakeReply(pieces=pieces, headers=[(b"content-type", b"text/event-stream")])
    world.upstream.answer = lambda _: answer
    sending = json.dumps({"model": "m", "input": "hi", "tools": tools, "stream": is_stream}).encode()
    await world.call(world.incoming(sending, "responses"))
    assert await state(world) == StepState("s", 4, ("crm", "github", "docs", "search"))
    assert "stray_tools" not in world.record.notes


async def test_each_called_tool_has_its_offered_name() -> None:
    world = world_of(Step("s", sequence=(("search",), ("docs",))))
    blocks: list[Json] = [{"type": "tool_use", "id": name, "name": name, "input": {}} for name in ("search", "query")]
    message = {"type": "message", "content": blocks, "stop_reason": "tool_use"}
    world.upstream.answer = lambda _: FakeReply(pieces=[json.dumps(message).encode()])
    sending = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "search", "input_schema": {}}],
        "mcp_servers": [{"type": "url", "url": "https://x", "name": "docs"}],
    }
    await world.call(world.incoming(json.dumps(sending).encode(), "messages"))
    assert await state(world) == StepState("s", 2, ("search", "docs"))


async def test_a_server_that_the_request_does_not_name_is_ignored() -> None:
    world = world_of(Step("s", sequence=(("query",),)))
    servers = [{"type": "url", "url": "https://x", "name": name} for name in ("a", "b")]
    blocks = [{"type": "mcp_tool_use", "id": "1", "server_name": "c", "name": "query", "input": {}}]
    message = {"type": "message", "content": blocks, "stop_reason": "tool_use"}
    world.upstream.answer = lambda _: FakeReply(pieces=[json.dumps(message).encode()])
    tools = [{"name": "query", "input_schema": {}}]
    sending = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    await world.call(world.incoming(json.dumps({**sending, "mcp_servers": servers}).encode(), "messages"))
    assert (await state(world)).recent == ("query",)
    blocks[0]["server_name"] = "b"
    world.upstream.answer = lambda _: FakeReply(pieces=[json.dumps(message).encode()])
    await world.call(world.incoming(json.dumps({**sending, "mcp_servers": servers}).encode(), "messages"))
    assert (await state(world)).recent == ("query", "b")


# --- conditions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "sending"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "old"}, {"role": "assistant", "content": "evaluate"},
                                           {"role": "user", "content": [{"type": "text", "text": "new"}]},
                                           {"role": "tool", "tool_call_id": "1", "content": "evaluate"}]}),
        ("responses", {"input": "new"}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "new"}]},
                                 {"type": "function_call_output", "call_id": "1", "output": "evaluate"}]}),
        ("messages", {"max_tokens": 5, "messages": [
            {"role": "user", "content": "new"}, {"role": "assistant", "content": "evaluate"},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "evaluate"}]}]}),
    ],
)  # fmt: skip
async def test_conditions_read_the_last_user_message_and_no_tool_result(path: str, sending: Json) -> None:
    seen = []
    world = world_of(Step("s", conditions=(MessageMatches(lambda text: seen.append(text) or True),)))  # type: ignore[func-returns-value]
    await world.call(world.incoming(json.dumps({"model": "m", **sending}).encode(), path))
    assert set(seen) == {"new"}
    assert (await state(world)).active == "s"


@pytest.mark.parametrize(
    ("path", "sending"),
    [
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": [5, {"role": "user"}, {"role": "user", "content": 7}]}),
        ("responses", {"prompt": {"id": "pmpt_1"}}),
    ],
)
async def test_a_request_without_a_user_message_matches_no_condition(path: str, sending: Json) -> None:
    world = world_of(Step("s", conditions=(MessageMatches(bool),)), Step("t", conditions=(TokensAbove(10_000),)))
    reply, _ = await call(world, json.dumps({"model": "m", **sending}).encode(), path=path)
    assert reply.active_step is not None
    assert reply.active_step.step is None


async def test_conditions_read_the_tokens_before_trimming() -> None:
    world = world_of(Step("big", conditions=(TokensAbove(500),)), Step("small", is_default=True))
    reply, _ = await call(world, body(text="short"))
    assert reply.active_step is not None
    assert reply.active_step.state.active == "small"
    reply, _ = await call(world, body(text="word " * 1000))
    assert reply.active_step is not None
    assert reply.active_step.state.active == "big"


async def test_the_smallest_remaining_budget_decides() -> None:
    agent = Agent("default", [Step("poor", conditions=(BudgetBelow(0.9),)), Step("rich", is_default=True)])
    world = World(budget=BudgetPolicy(session=Limits(tokens=100)), agents={"default": agent})
    active = []
    for _ in range(2):
        reply, _ = await call(world, body((), text="x", max_tokens=5))
        assert reply.active_step is not None
        active.append(reply.active_step.state.active)
    assert active == ["rich", "poor"]


# --- agents and sessions --------------------------------------------------------------------------------------------


async def test_each_agent_of_a_session_has_its_own_position() -> None:
    agents = {name: Agent(name, [CRITIQUE]) for name in ("a", "b")}
    world = World(agents=agents)
    await call(world, body(text="evaluate"), calling("read_draft"), directives=Directives(agent="a"))
    await call(world, body(text="evaluate"), directives=Directives(agent="b"))
    remembered = await world.store.remembered(KEY)
    assert [(name, one.index) for name, one in remembered.state.steps.items()] == [("a", 1), ("b", 0)]


async def test_a_session_remembers_eight_agents_and_a_ninth_replaces_the_first() -> None:
    agents = {f"a{number}": Agent(f"a{number}", [CRITIQUE]) for number in range(9)}
    world = World(agents=agents)
    for name in agents:
        await call(world, body(text="evaluate"), directives=Directives(agent=name))
    remembered = await world.store.remembered(KEY)
    assert list(remembered.state.steps) == [f"a{number}" for number in range(1, 9)]


async def test_calls_of_the_gateway_and_other_endpoints_have_no_step() -> None:
    world = world_of(CRITIQUE)
    purpose = Purpose("summary", derived=False, notes={})
    for changes in ({"purpose": purpose}, {"path": "completions"}, {"path": "embeddings"}):
        sending = json.dumps({"model": "m", "messages": [], "prompt": "evaluate", "input": "evaluate"}).encode()
        reply, _ = await world.call(world.incoming(sending, **changes))
        assert reply.active_step is None
    assert (await world.store.remembered(KEY)).state.steps == {}


async def test_a_gateway_without_steps_changes_nothing() -> None:
    world = World()
    reply, _ = await call(world, body(Tools=5))
    assert reply.active_step is None
    assert (await world.store.remembered(KEY)).state == SessionState()


# --- models and limits of a step ------------------------------------------------------------------------------------


async def test_a_step_may_call_another_model() -> None:
    world = world_of(Step("s", model="q-small"))
    await call(world, body())
    assert (world.upstream.sent[-1].url, sent(world)["model"]) == ("http://q/v1/chat/completions", "q-real")
    assert world.record.notes["model"] == "q-small, set by the step"


async def test_an_error_names_the_step_whose_model_a_client_key_may_not_use() -> None:
    world = world_of(Step("s", model="q-small"))
    reply, answered = await call(world, body(), caller=Caller("alice", models=("m",)))
    assert (reply.status, world.upstream.sent) == (404, [])
    assert 'it may use m. The step "s" calls it.' in answered["error"]["message"]


async def test_the_callers_credential_is_not_sent_to_the_provider_of_a_step() -> None:
    world = world_of(Step("s", model="q-small"))
    world.providers["p"] = ProviderAddress("p", "http://p/v1")
    headers = [(b"x-session-id", b"s"), (b"authorization", b"Bearer of-p")]
    world.providers["q"] = ProviderAddress("q", "http://q/v1")
    reply, answered = await call(world, body(), headers=headers)
    assert (reply.status, world.upstream.sent) == (401, [])
    assert 'The step "s" calls q-small at the provider q' in answered["error"]["message"]
    world.providers["q"] = ProviderAddress("q", "http://q/v1", key="held")
    await call(world, body(), headers=headers)
    assert (b"authorization", b"Bearer held") in list(world.upstream.sent[-1].headers)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, 50), ({"max_tokens": 20}, 20), ({"max_tokens": 500}, 50), ({"max_completion_tokens": 500}, 50)],
)
async def test_the_output_of_a_step_is_limited(fields: Json, limit: int) -> None:
    world = world_of(Step("s", max_output_tokens=50))
    await call(world, body(**fields))
    name = next(iter(fields), "max_tokens")
    assert sent(world)[name] == limit


# --- observers and errors of the store ------------------------------------------------------------------------------


class Watching(Observer):
    def __init__(self) -> None:
        self.changes: list[StepChange] = []

    def record(self, call: CallRecord, totals: Any, left: Any = None) -> None:
        pass

    def stepped(self, change: StepChange) -> None:
        self.changes.append(change)
        raise RuntimeError("an observer's bug")


def watched(world: World) -> Watching:
    watching = Watching()
    world.gateway.steps._listeners = [watching.stepped]
    return watching


async def test_observers_are_notified_of_each_change_and_their_errors_fail_no_call() -> None:
    world = world_of(CRITIQUE, WORK)
    watching = watched(world)
    await call(world, body(text="evaluate it"), calling("read_draft"))
    await call(world, body(text="evaluate it"), calling("publish"))
    told = [(one.step_before, one.step, one.index, one.tools) for one in watching.changes]
    assert told == [(None, "critique", 0, ()), ("critique", "critique", 1, ("read_draft",))]
    assert {(one.session, one.agent) for one in watching.changes} == {(KEY, "default")}


class Flaky(UnavailableStore):
    error: StoreUnavailable | None = None

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        if self.error is not None:
            raise self.error
        return await super().update(session, change)

    async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
        if self.error is not None and ending is not None:
            raise self.error
        return await super().settle(record, ending)


WHY = {
    StoreUnavailable: "the store is unavailable",
    StoreConflict: "other calls changed the session at each try",
    RecordRefused: "the store refuses the record of the call",
    StoreDamaged: "the session's data in the store is damaged",
}


@pytest.mark.parametrize("error", [kind("no") for kind in WHY], ids=lambda error: type(error).__name__)
async def test_a_step_that_cannot_be_stored_is_noted_and_fails_no_call(error: StoreUnavailable) -> None:
    world = world_of(CRITIQUE)
    flaky = Flaky()
    flaky.error = error
    world.gateway.steps._store = world.settler._store = flaky
    watching = watched(world)
    reply, _ = await call(world, body(text="evaluate it"), calling("read_draft", "publish"))
    assert reply.status == 200
    assert reply.active_step is not None
    assert (reply.active_step.state.index, reply.active_step.stray) == (1, ("publish",))
    assert world.record.notes["step"] == f"not stored: {WHY[type(error)]}"
    assert world.record.notes["stray_tools"] == "publish"
    assert watching.changes == []
    assert world.settler.availability.is_unavailable is (type(error) is StoreUnavailable)
    await eventually(lambda: not world.settler.availability.is_unavailable, "the settler recovers")
    assert (await flaky.totals(KEY)).calls == 1, "it is charged all the same"
    assert (await flaky.remembered(KEY)).state.steps == {}
    written = await flaky.call(None, "request-1")
    assert written == world.record, "what is written says so"


async def test_the_position_is_written_together_with_the_charge() -> None:
    world = world_of(CRITIQUE)
    await call(world, body(text="evaluate it"))
    flaky = Flaky()
    flaky._states, world.gateway.steps._store = world.store._states, flaky
    flaky.error = StoreUnavailable("away")
    watching = watched(world)
    await call(world, body(text="evaluate it"), calling("read_draft", "publish"))
    assert await state(world) == StepState("critique", 1, ("read_draft",))
    told, (record, totals) = watching.changes[0], world.recorder.records[-1]
    assert (told.step_before, told.step, told.index) == ("critique", "critique", 1)
    assert record.notes == {"stray_tools": "publish"}
    assert totals is not None
    assert totals.calls == 2
    assert await world.store.call(None, "request-2") == record


async def test_a_response_does_not_wait_for_an_unavailable_store() -> None:
    world = world_of(CRITIQUE)
    await call(world, body())

    def answer(_: Outgoing) -> FakeReply:
        world.store.away = True
        world.settler.availability.report(StoreUnavailable("away"))
        return calling("read_draft")

    world.upstream.answer = answer
    reply, _ = await world.call(world.incoming(body(text="evaluate it")))
    assert reply.status == 200
    assert world.recorder.records[-1][0].notes["step"] == "not stored: the store is unavailable"
    assert "update" not in world.store.missed
    world.store.away = False


async def test_no_step_is_enforced_while_the_position_is_unknown() -> None:
    world = world_of(replace(WORK, enforce="reject"))
    world.settler.availability.accepts_without_store = True
    world.store.away = True
    sending = body(["publish"])
    reply, _ = await call(world, sending)
    assert (reply.status, reply.active_step) == (200, None)
    assert world.record.notes["step"] == "none: the store is unavailable"
    world.store.away = False


@pytest.mark.parametrize("is_written", [True, False])
async def test_a_call_cancelled_while_its_step_is_stored_is_charged_once(*, is_written: bool) -> None:
    class Slow(UnavailableStore):
        async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
            if ending is None:
                return await super().settle(record)
            if is_written:
                await super().settle(record, ending)
            reached.set()
            await asyncio.sleep(60)
            raise AssertionError

    world, reached = world_of(CRITIQUE), asyncio.Event()
    world.settler._store = world.store = slow = Slow()
    world.gateway.steps._store = slow
    world.upstream.answer = lambda _: calling("read_draft")
    task = asyncio.create_task(world.call(world.incoming(body(text="evaluate it"))))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: not world.settler.waiting, "what was offered again is settled")
    assert (await slow.totals(KEY)).calls == 1
    assert (await state(world)).index == is_written
